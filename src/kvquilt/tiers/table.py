"""Geometry of a slab, and the table beside it: an entry for each slot, and the slots' recency."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.tiers.files import Files
from kvquilt.tiers.format import BLOCK_BYTES, TABLE_MAGIC, FileHead, entry_dtype, header_bytes

__all__ = ["GIVEN_UP_AFTER", "SlabFacts", "SlotTable", "make_doubtful", "neighbours"]

IntArray = NDArray[np.int64]

_LATEST_STAMP = 1 << 62  # no index has been touched that often
GIVEN_UP_AFTER = 8
"""Reads that fail one after another from the first on: it is the medium, not a block."""


@dataclass(frozen=True)
class SlabFacts:
    """What both files of a slab are made for. slot_bytes: header and payload."""

    arena: int
    name: str
    num_slots: int
    slot_bytes: int
    span_keys: int
    namespace: bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot before its payload."""
        return header_bytes(self.span_keys)

    @property
    def entry_bytes(self) -> int:
        """Bytes of a table entry."""
        return entry_dtype(self.span_keys).itemsize

    @property
    def slab_bytes(self) -> int:
        """Length of the slab file."""
        return BLOCK_BYTES + self.num_slots * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        """Length of the table file."""
        return BLOCK_BYTES + self.num_slots * self.entry_bytes

    @property
    def stamps_bytes(self) -> int:
        """Length of the file of stamps."""
        return 8 * self.num_slots

    @property
    def lengths(self) -> dict[str, int]:
        """Bytes of each file by its name."""
        sizes = {"slab": self.slab_bytes, "table": self.table_bytes, "stamps": self.stamps_bytes}
        return {f"{self.name}.{kind}": size for kind, size in sizes.items()}

    @property
    def total_bytes(self) -> int:
        """Bytes of all three files on a disk that gives space in blocks of 4 KiB."""
        return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in self.lengths.values())

    def head(self, magic: bytes) -> FileHead:
        """First block of the slab or the table."""
        entry = self.entry_bytes if magic == TABLE_MAGIC else 0
        return FileHead(
            magic, self.arena, self.slot_bytes, self.num_slots, self.span_keys, entry, self.namespace
        )


class SlotTable:
    """Descriptors of a slab's table and stamps, -1 where there is no such file; `close` closes them."""

    def __init__(self, facts: SlabFacts, fd: int, stamps_fd: int, files: Files) -> None:
        self.fd = fd
        self._stamps = stamps_fd
        self._facts = facts
        self._files = files
        self._dtype = entry_dtype(facts.span_keys)

    def prepare(self, kept_slots: int, *, whole: bool) -> None:
        """Give the files their lengths, with the entries of the first `kept_slots` slots.

        whole: it has an entry for each of them. Raises OSError.
        """
        facts = self._facts
        if kept_slots == 0:
            self._files.truncate(self.fd, 0)
        if not whole:
            # Whoever is killed before all headers are read must not leave an empty table that looks whole.
            self._files.write(self.fd, [bytes(BLOCK_BYTES)], 0)
        # Entries of slots that a truncated slab has lost must not come back when it grows again.
        self._files.truncate(self.fd, BLOCK_BYTES + kept_slots * facts.entry_bytes)
        self._files.truncate(self.fd, facts.table_bytes)
        self._files.allocate(self.fd, 0, facts.table_bytes)
        self._files.truncate(self._stamps, facts.stamps_bytes)
        self._files.allocate(self._stamps, 0, facts.stamps_bytes)

    def write_head(self) -> None:
        """Say that it has a word on every slot. Raises OSError."""
        self._files.write(self.fd, [self._facts.head(TABLE_MAGIC).pack()], 0)

    def write(self, slots: IntArray, entries: NDArray[np.void] | None) -> None:
        """Write the entries of these slots, in ascending order, or clear them; neighbours in one call."""
        size = self._facts.entry_bytes
        for run in neighbours(slots):
            data = bytes(size * len(run)) if entries is None else entries[run.start : run.stop].tobytes()
            self._files.write(self.fd, [data], BLOCK_BYTES + int(slots[run.start]) * size)

    def read(self, slots: IntArray) -> NDArray[np.void]:
        """Entries of these slots, in ascending order, as they are now, neighbours in one call; zero where the
        table ends before. Raises OSError."""
        size, entries = self._facts.entry_bytes, np.zeros(slots.size, dtype=self._dtype)
        held = max(0, (os.fstat(self.fd).st_size - BLOCK_BYTES) // size) if self.fd >= 0 else 0
        for run in neighbours(slots[slots < held]):
            try:
                self._read_run(slots, entries, run)
            except OSError:
                self._read_around_bad_blocks(slots, entries, run)
        return entries

    def _read_run(self, slots: IntArray, entries: NDArray[np.void], run: range) -> None:
        found = entries[run.start : run.stop].view(np.uint8)
        offset = BLOCK_BYTES + int(slots[run.start]) * self._facts.entry_bytes
        self._files.read(self.fd, [found.data], offset)

    def _read_around_bad_blocks(self, slots: IntArray, entries: NDArray[np.void], run: range) -> None:
        """Read neighbours in small parts; what cannot be becomes doubtful. Raises OSError if nothing can."""
        step, failed, read = max(1, BLOCK_BYTES // self._facts.entry_bytes), 0, False
        for start in range(run.start, run.stop, step):
            part = range(start, min(start + step, run.stop))
            try:
                self._read_run(slots, entries, part)
                read = True
            except OSError:
                failed += 1
                if not read and (failed == GIVEN_UP_AFTER or part.stop == run.stop):
                    raise
                make_doubtful(entries[part.start : part.stop])

    def save_stamps(self, stamps: IntArray) -> None:
        """Keep the recency of all slots for the next start, in a file of its own: entries change under
        the hands of others. A torn one costs only the order. Raises OSError."""
        self._files.write(self._stamps, [stamps.astype("<i8").tobytes()], 0)

    def read_stamps(self, count: int) -> IntArray:
        """Recency of the first `count` slots as last kept; 0 where nothing is known. Raises OSError."""
        stamps = np.zeros(count, dtype=np.int64)
        size = min(os.fstat(self._stamps).st_size // 8, count) if self._stamps >= 0 else 0
        if size:
            self._files.read(self._stamps, [stamps[:size].data.cast("B")], 0)
        stamps[(stamps < 0) | (stamps > _LATEST_STAMP)] = 0  # damaged, and a clock from there would overflow
        return stamps

    def close(self) -> None:
        """Close the files. May be called twice."""
        for fd in (self.fd, self._stamps):
            if fd >= 0:
                os.close(fd)
        self.fd = self._stamps = -1


def make_doubtful(entries: NDArray[np.void]) -> None:
    """Make entries that are neither empty nor intact: the slot's header says what lies there."""
    entries[:] = 0
    entries["reserved"] = 1


def neighbours(slots: IntArray) -> list[range]:
    """Places of runs of neighbours among different slots in ascending order."""
    if slots.size and int(slots[-1]) - int(slots[0]) == slots.size - 1:
        return [range(slots.size)]
    ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), slots.size]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]
