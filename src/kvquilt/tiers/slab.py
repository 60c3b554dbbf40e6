"""One slab file of fixed slots, and the table beside it that makes a start fast.

A slot is a header and the payload, in whole disk blocks. The order of writes keeps what a killed
process leaves harmless: the table's entry is cleared, the slot is written, the entry is filled. So
an entry never names a page that was not written whole, and whatever happens to the medium
later is caught when the page is read, since header and payload are checked together.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvquilt.store import KnownPages
from kvquilt.tiers.files import Files, aligned_buffer
from kvquilt.tiers.format import (
    BLOCK_BYTES,
    SLAB_MAGIC,
    TABLE_MAGIC,
    FileHead,
    PageHeaders,
    entry_dtype,
    header_bytes,
    intact_entries,
    parse_page_header,
    seal_entries,
)

__all__ = ["Recovered", "Slab", "SlabFacts", "SlotPage"]

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]

_RUN_BYTES = 2 << 20  # neighbouring slots that go in one system call
_SCAN_REPORT = 100_000  # slots between two lines of progress


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


class SlotPage(NamedTuple):
    """One page of a batch: its slot, what names it, and its place in host memory."""

    slot: int
    group: int
    key: bytes
    spans: bytes
    payload: memoryview


@dataclass(frozen=True, eq=False)
class Recovered:
    """Pages that an earlier run left, oldest first. scanned: their headers were read, not the table."""

    pages: KnownPages
    stamps: IntArray
    scanned: bool


class Slab:
    """Descriptors of one slab, its table and its stamps. Used by several threads at once: every call
    names its slots, and no two calls name the same one at a time.

    usable_slots: as of `kvquilt.store.Arena`, whose part it plays for the tier's index. listed_slots: those
    that the table, as found, reaches. table_lost: it reaches none of the slots there are. head_lost: slots
    are there, but nothing says intact of what.
    """

    def __init__(self, facts: SlabFacts, fds: tuple[int, int, int], files: Files, generation: int) -> None:
        self.facts = facts
        self.generation = generation
        self.index = facts.arena
        self.name = facts.name
        self.num_slots = facts.num_slots
        self.slot_stride = facts.slot_bytes
        self.usable_slots = 0
        self.listed_slots = 0
        self.head_lost = False
        self.table_lost = False
        self.fd, self._table, self._stamps = fds
        self._writable = False
        self._files = files
        self._local = threading.local()
        self._dtype = entry_dtype(facts.span_keys)

    @classmethod
    def open(
        cls, directory: Path, facts: SlabFacts, files: Files, generation: int, *, direct: bool, writable: bool
    ) -> Slab:
        """Open or make the three files in `directory`; pages in slots that no longer exist are gone.

        Files of other geometry, and damaged ones, are made anew; a damaged table is only emptied. Whoever
        only reads makes nothing, and can do without all but the slab. Raises OSError.
        """
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        fds: list[int] = []
        try:
            for kind, more in (("slab", os.O_DIRECT if direct else 0), ("table", 0), ("stamps", 0)):
                try:
                    fds.append(files.open(directory / f"{facts.name}.{kind}", flags | more))
                except FileNotFoundError:
                    if writable or kind == "slab":
                        raise
                    fds.append(-1)
        except OSError:
            for fd in fds:
                if fd >= 0:
                    os.close(fd)
            raise
        slab = cls(facts, (fds[0], fds[1], fds[2]), files, generation)
        try:
            slab._prepare(writable)
        except BaseException:
            slab.close()
            raise
        return slab

    def _prepare(self, writable: bool) -> None:
        """Check both heads, and give the files their lengths."""
        facts = self.facts
        kept = self._slots_kept(self.fd, SLAB_MAGIC, facts.slot_bytes)
        listed = self._slots_kept(self._table, TABLE_MAGIC, facts.entry_bytes)
        self.listed_slots = min(listed, facts.num_slots)
        size = os.fstat(self.fd).st_size
        self.head_lost = size > BLOCK_BYTES and self._head(self.fd, SLAB_MAGIC) is None
        self.table_lost = kept > 0 and listed == 0
        self._writable = writable
        if not writable:
            self.usable_slots = min(kept, facts.num_slots)
            return
        if kept == 0:
            self._files.truncate(self.fd, 0)
        if listed == 0 or kept == 0:
            self._files.truncate(self._table, 0)
        size = os.fstat(self.fd).st_size
        if size > facts.slab_bytes:
            self._files.truncate(self.fd, facts.slab_bytes)
        self.usable_slots = (
            max(0, min(size - BLOCK_BYTES, facts.num_slots * facts.slot_bytes)) // facts.slot_bytes
        )
        # Entries of slots that a truncated slab has lost must not come back when it grows again.
        self._files.truncate(self._table, BLOCK_BYTES + self.usable_slots * facts.entry_bytes)
        self._files.truncate(self._table, facts.table_bytes)
        self._files.allocate(self._table, 0, facts.table_bytes)
        self._files.truncate(self._stamps, facts.stamps_bytes)
        self._files.allocate(self._stamps, 0, facts.stamps_bytes)
        self._files.allocate(self.fd, 0, BLOCK_BYTES)
        self.write_head()
        self._files.write(self._table, [facts.head(TABLE_MAGIC).pack()], 0)

    def write_head(self) -> None:
        """Write the slab's first block and read it back. Raises OSError: also the tier's probe."""
        block = aligned_buffer(BLOCK_BYTES)
        block[:] = self.facts.head(SLAB_MAGIC).pack()
        self._files.write(self.fd, [block], 0)
        self._files.read(self.fd, [block], 0)

    def _slots_kept(self, fd: int, magic: bytes, unit: int) -> int:
        """Slots for which the file was made; 0 if it is none of ours, or of other geometry."""
        head = self._head(fd, magic)
        if head is None:
            return 0
        return min(head.num_slots, (os.fstat(fd).st_size - BLOCK_BYTES) // unit)

    def _head(self, fd: int, magic: bytes) -> FileHead | None:
        """The file's first block, if it is one of this slab's."""
        block = aligned_buffer(BLOCK_BYTES)
        if fd < 0 or os.fstat(fd).st_size < BLOCK_BYTES:
            return None
        self._files.read(fd, [block], 0)
        head = FileHead.parse(bytes(block))
        if head is None:
            return None
        ours = self.facts.head(magic)
        return head if replace(head, num_slots=ours.num_slots) == ours else None

    def allocate(self, _fd: int, offset: int, length: int) -> None:
        """`kvquilt.store.pool.Populate` for this slab. Raises OSError."""
        self._files.allocate(self.fd, BLOCK_BYTES + offset, length)

    # ---- pages ----

    def write_pages(self, pages: Sequence[SlotPage], generation: int, stamp: int) -> None:
        """Write each page to its slot, and then all entries. Raises OSError; then no entry
        is left."""
        self._write_entries([page.slot for page in pages], None)
        headers = self._scratch(len(pages))
        payloads = [page.payload for page in pages]
        self._headers_of(pages, generation).write(headers, payloads)
        size = self.facts.header_bytes
        for run in self._runs(pages):
            buffers = [part for i in run for part in (headers[i * size : (i + 1) * size], payloads[i])]
            self._files.write(self.fd, buffers, self._offset(pages[run[0]].slot))
        self._write_entries([page.slot for page in pages], self._entries_of(pages, generation, stamp))

    def read_pages(self, pages: Sequence[SlotPage], generation: int) -> list[bool | None]:
        """Fill the payloads of these pages: True if it is proven good, False if it is not that page,
        None if it could not be read. Raises OSError if no page could be read."""
        verdicts: list[bool | None] = [None] * len(pages)
        failure: OSError | None = None
        headers = self._scratch(len(pages))
        payloads = [page.payload for page in pages]
        wanted = self._headers_of(pages, generation)
        size = self.facts.header_bytes
        runs = self._runs(pages)
        while runs:
            run = runs.pop()
            buffers = [part for i in run for part in (headers[i * size : (i + 1) * size], payloads[i])]
            try:
                self._files.read(self.fd, buffers, self._offset(pages[run[0]].slot))
            except OSError as error:
                if len(run) > 1:  # one bad block must not take its neighbours with it
                    runs += [[i] for i in run]
                failure = error
                continue
            for i, verdict in zip(run, wanted.verify(headers, payloads, run), strict=True):
                verdicts[i] = verdict
        if failure is not None and all(verdict is None for verdict in verdicts):
            raise failure
        return verdicts

    def forget(self, slots: Sequence[int]) -> None:
        """Let no later start find these slots' pages: entry and header go. Raises OSError."""
        self._write_entries(list(slots), None)
        empty = aligned_buffer(self.facts.header_bytes)
        for slot in slots:
            self._files.write(self.fd, [empty], self._offset(slot))

    def _runs(self, pages: Sequence[SlotPage]) -> list[list[int]]:
        """Indices of the pages, those of neighbouring slots together."""
        most = max(1, _RUN_BYTES // self.facts.slot_bytes)
        runs: list[list[int]] = []
        for i in sorted(range(len(pages)), key=lambda i: pages[i].slot):
            if runs and len(runs[-1]) < most and pages[runs[-1][-1]].slot + 1 == pages[i].slot:
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def _headers_of(self, pages: Sequence[SlotPage], generation: int) -> PageHeaders:
        return PageHeaders(
            self.facts.span_keys,
            self.facts.namespace,
            groups=[page.group for page in pages],
            generation=generation,
            payload_bytes=self.facts.slot_bytes - self.facts.header_bytes,
            slots=np.asarray([page.slot for page in pages], dtype=np.int64),
            keys=_joined_keys(pages),
            spans=[page.spans for page in pages],
        )

    def _scratch(self, pages: int) -> memoryview:
        """Memory of this thread for the headers of so many pages."""
        size = pages * self.facts.header_bytes
        kept: memoryview | None = getattr(self._local, "headers", None)
        if kept is None or len(kept) < size:
            kept = self._local.headers = aligned_buffer(size)
        return kept[:size]

    def _offset(self, slot: int) -> int:
        return BLOCK_BYTES + slot * self.facts.slot_bytes

    # ---- table ----

    def _entries_of(self, pages: Sequence[SlotPage], generation: int, stamp: int) -> NDArray[np.void]:
        entries = np.zeros(len(pages), dtype=self._dtype)
        entries["key"] = _joined_keys(pages)
        entries["group"] = [page.group for page in pages]
        if self.facts.span_keys:
            entries["span"] = [self._padded_spans(page.spans) for page in pages]
        entries["generation"] = generation
        entries["stamp"] = stamp
        seal_entries(entries, np.asarray([page.slot for page in pages], dtype=np.int64))
        return entries

    def _padded_spans(self, spans: bytes) -> NDArray[np.uint64]:
        whole = spans.ljust(32 * self.facts.span_keys, b"\0")
        return np.frombuffer(whole, dtype=np.uint64).reshape(self.facts.span_keys, 4)

    def _write_entries(self, slots: Sequence[int], entries: NDArray[np.void] | None) -> None:
        """Write the entries of these slots, or clear them; neighbours in one call."""
        size = self.facts.entry_bytes
        order = sorted(range(len(slots)), key=lambda i: slots[i])
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and slots[order[end]] == slots[order[end - 1]] + 1:
                end += 1
            data = bytes(size * (end - start)) if entries is None else entries[order[start:end]].tobytes()
            self._files.write(self._table, [data], BLOCK_BYTES + slots[order[start]] * size)
            start = end

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
        return stamps

    def survey(
        self, slots: IntArray, stopped: Callable[[], bool] = lambda: False
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Entries of these slots, of any generation, and for which of them the slot's header had to be read
        since the table has no intact word on it. Raises OSError."""
        entries = self.read_entries(slots)
        unlisted = slots >= self.listed_slots
        entries[unlisted] = 0
        words = entries.view(np.uint64).reshape(slots.size, self.facts.entry_bytes // 8)
        doubtful = ~intact_entries(entries, slots) & (words.any(axis=1) | unlisted)
        if doubtful.any():
            entries[doubtful] = self._scan(slots[doubtful], stopped)
        return entries, doubtful

    def read_entries(self, slots: IntArray) -> NDArray[np.void]:
        """Entries of these slots as they are now, neighbours in one call; zero where the table ends before.
        Raises OSError."""
        size, entries = self.facts.entry_bytes, np.zeros(slots.size, dtype=self._dtype)
        held = max(0, (os.fstat(self._table).st_size - BLOCK_BYTES) // size) if self._table >= 0 else 0
        ends = np.flatnonzero(np.diff(slots) != 1) + 1
        for part in np.split(np.arange(slots.size), ends):
            part = part[slots[part] < held]
            if part.size:
                found = np.zeros(part.size, dtype=self._dtype)
                self._files.read(
                    self._table, [found.view(np.uint8).data], BLOCK_BYTES + int(slots[part[0]]) * size
                )
                entries[part] = found
        return entries

    def recover(
        self, groups: Sequence[int], generation: int, stopped: Callable[[], bool] = lambda: False
    ) -> Recovered:
        """Pages of one generation that the table lists; slots whose entry is damaged are
        looked at themselves, and all slots if there is no table.

        groups: those that may have pages here. stopped: asked now and then; True ends it. Raises OSError.
        """
        usable = self.usable_slots
        slots = np.arange(usable, dtype=np.int64)
        entries, doubtful = self.survey(slots, stopped)
        intact = intact_entries(entries, slots)
        if doubtful.any() and self._writable:
            self._write_entries(slots[doubtful].tolist(), entries[doubtful])
            self.table_lost = False
            self.listed_slots = self.num_slots
        good = intact & (entries["generation"] == generation) & np.isin(entries["group"], groups)
        stamps = np.maximum(entries["stamp"], self.read_stamps(usable))[good]
        order = np.argsort(stamps, kind="stable")
        found = entries[good][order]
        pages = KnownPages(
            slots[good][order],
            np.ascontiguousarray(found["key"]),
            np.ascontiguousarray(found["span"]),
            np.ascontiguousarray(found["group"]),
        )
        return Recovered(pages, stamps[order], bool(doubtful.any()))

    def _scan(self, slots: IntArray, stopped: Callable[[], bool]) -> NDArray[np.void]:
        """Entries of these slots, made anew from the slots' headers."""
        header = aligned_buffer(self.facts.header_bytes)
        entries = np.zeros(slots.size, dtype=self._dtype)
        for done, slot in enumerate(slots.tolist()):
            if done % 1024 == 0 and stopped():
                raise OSError(errno.ECANCELED, "stopped while reading slot headers")
            if done and done % _SCAN_REPORT == 0:
                logger.info("kvquilt: disk: %s: %d of %d slot headers read", self.name, done, slots.size)
            try:
                self._files.read(self.fd, [header], self._offset(slot))
            except OSError:
                continue
            page = parse_page_header(header)
            if page is None or page.slot != slot or page.namespace != self.facts.namespace:
                continue
            if len(page.spans) > 32 * self.facts.span_keys:
                continue
            entries[done]["key"] = np.frombuffer(page.key, dtype=np.uint64)
            entries[done]["generation"] = page.generation
            entries[done]["group"] = page.group
            entries[done]["span"] = self._padded_spans(page.spans)
        seal_entries(entries, slots)
        entries[entries["generation"] == 0] = 0
        return entries

    def close(self) -> None:
        """Close the files. May be called twice."""
        for fd in (self.fd, self._table, self._stamps):
            if fd >= 0:
                os.close(fd)
        self.fd = self._table = self._stamps = -1


def _joined_keys(pages: Sequence[SlotPage]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(page.key for page in pages), dtype=np.uint64).reshape(len(pages), 4)
