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
from kvquilt.tiers.files import Calls, Files, aligned_buffer
from kvquilt.tiers.format import (
    BLOCK_BYTES,
    SLAB_MAGIC,
    TABLE_MAGIC,
    FileHead,
    PageHeaders,
    entry_dtype,
    intact_entries,
    parse_page_header,
    seal_entries,
)
from kvquilt.tiers.slot_pages import SlotPages
from kvquilt.tiers.table import GIVEN_UP_AFTER, SlabFacts, SlotTable, make_doubtful, neighbours

__all__ = ["Recovered", "Slab", "Verdicts"]

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]

_RUN_BYTES = 4 << 20  # neighbouring slots that go in one system call, and are checked before the next
_SCAN_REPORT = 100_000  # slots between two lines of progress
_local = threading.local()


@dataclass(frozen=True, eq=False)
class Recovered:
    """Pages that an earlier run left, oldest first. scanned: their headers were read, not the table."""

    pages: KnownPages
    stamps: IntArray
    scanned: bool


class Verdicts(NamedTuple):
    """Of a batch that was read: which pages are proven good, and which could not be read at all."""

    good: NDArray[np.bool_]
    unread: NDArray[np.bool_]


class Slab:
    """Descriptors of one slab, its table and its stamps. Used by several threads at once: every call
    names its slots, and no two calls name the same one at a time.

    usable_slots: as of `kvquilt.store.Arena`, whose part it plays for the tier's index. listed_slots: those
    that the table, as found, reaches. table_lost: it reaches none of the slots there are. head_lost: slots
    are there, but nothing says intact of what.
    """

    def __init__(
        self,
        facts: SlabFacts,
        fds: tuple[int, int, int],
        files: Files,
        generation: int,
        calls: Calls,
    ) -> None:
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
        self.fd = fds[0]
        self.table = SlotTable(facts, fds[1], fds[2], files)
        self._writable = False
        self._files = files
        self._calls = calls
        self._dtype = entry_dtype(facts.span_keys)
        self._slots_per_run = -(-_RUN_BYTES // facts.slot_bytes)

    @classmethod
    def open(
        cls,
        directory: Path,
        facts: SlabFacts,
        files: Files,
        generation: int,
        *,
        direct: bool,
        writable: bool,
        calls: Calls | None = None,
    ) -> Slab:
        """Open or make the three files in `directory`; pages in slots that no longer exist are gone.

        Files of other geometry, and damaged ones, are made anew; a damaged table is only emptied. Whoever
        only reads makes nothing, and can do without all but the slab. calls: shared by all slabs of a
        tier; without them one moves pages at a time. Raises OSError.
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
        slab = cls(facts, (fds[0], fds[1], fds[2]), files, generation, calls or Calls(1))
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
        listed = self._slots_kept(self.table.fd, TABLE_MAGIC, facts.entry_bytes)
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
        size = os.fstat(self.fd).st_size
        if size > facts.slab_bytes:
            self._files.truncate(self.fd, facts.slab_bytes)
        self.usable_slots = (
            max(0, min(size - BLOCK_BYTES, facts.num_slots * facts.slot_bytes)) // facts.slot_bytes
        )
        whole = self.listed_slots >= self.usable_slots
        self.table.prepare(self.usable_slots if listed else 0, whole=whole)
        self._files.allocate(self.fd, 0, BLOCK_BYTES)
        self.write_head()
        if whole:
            self.table.write_head()

    def probe(self) -> None:
        """Does the medium do what will be asked of it? Raises OSError."""
        if self._writable:
            self.write_head()
        else:
            self._files.read(self.fd, [aligned_buffer(BLOCK_BYTES)], 0)

    def write_head(self) -> None:
        """Write the slab's first block and read it back. Raises OSError."""
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

    def write_pages(self, pages: SlotPages, generation: int, stamp: int | IntArray) -> None:
        """Write each page to its slot, and then all entries. stamp: recency, of all or of each. Raises
        OSError; then no entry is left."""
        order = np.argsort(pages.slots)
        stamps = np.broadcast_to(stamp, order.size)[order]
        pages = pages.take(order)
        self.table.write(pages.slots, None)
        headers = self._headers_of(pages, generation)
        for run in self._runs(pages.slots):
            slots = self._pieces(pages, run)
            for place, (header, payload) in zip(run, slots, strict=True):
                headers.seal(place, header, payload)
            with self._calls.writing:
                self._files.write(self.fd, _flat(slots), self._offset(int(pages.slots[run.start])))
        self.table.write(pages.slots, self._entries_of(pages, generation, stamps))

    def read_pages(self, pages: SlotPages, generation: int) -> Verdicts:
        """Read the payloads of these pages to where they belong, and prove each there: until it is proven,
        and if it is not, its place may hold any bytes. Raises OSError if no page could be read."""
        order = np.argsort(pages.slots)
        pages = pages.take(order)
        good, unread = np.zeros((2, len(pages)), dtype=np.bool_)
        failure: OSError | None = None
        headers = self._headers_of(pages, generation)
        runs = self._runs(pages.slots)
        while runs:
            run = runs.pop()
            slots = self._pieces(pages, run)
            try:
                with self._calls.reading:
                    self._files.read(self.fd, _flat(slots), self._offset(int(pages.slots[run.start])))
            except OSError as error:
                if len(run) > 1:  # one bad block must not take its neighbours with it
                    runs += [range(i, i + 1) for i in run]
                else:
                    unread[run.start] = True
                failure = error
                continue
            for place, (header, payload) in zip(run, slots, strict=True):
                good[place] = headers.proves(place, header, payload)
        if failure is not None and unread.all():
            raise failure
        back = np.argsort(order)
        return Verdicts(good[back], unread[back])

    def _pieces(self, pages: SlotPages, run: range) -> list[tuple[memoryview, memoryview]]:
        """Neighbouring slots, header and payload of each: headers pass through this thread's memory, payloads
        come and go where they lie."""
        size, payload_bytes = self.facts.header_bytes, self.facts.slot_bytes - self.facts.header_bytes
        memory = _own_headers(len(run) * size)
        return [
            (memory[i * size : (i + 1) * size], pages.payload(place, payload_bytes))
            for i, place in enumerate(run)
        ]

    def forget(self, slots: Sequence[int]) -> None:
        """Let no later start find these slots' pages: entry and header go. Raises OSError."""
        self.table.write(np.unique(np.asarray(slots, dtype=np.int64)), None)
        empty = aligned_buffer(self.facts.header_bytes)
        for slot in slots:
            self._files.write(self.fd, [empty], self._offset(slot))

    def _runs(self, slots: IntArray) -> list[range]:
        """Places of neighbours among these slots in ascending order, no more than one call takes."""
        most = self._slots_per_run
        return [
            range(start, min(start + most, run.stop))
            for run in neighbours(slots)
            for start in range(run.start, run.stop, most)
        ]

    def _headers_of(self, pages: SlotPages, generation: int) -> PageHeaders:
        return PageHeaders(
            self.facts.span_keys,
            self.facts.namespace,
            groups=pages.groups,
            generation=generation,
            payload_bytes=self.facts.slot_bytes - self.facts.header_bytes,
            slots=pages.slots,
            keys=pages.keys,
            spans=pages.spans,
        )

    def _offset(self, slot: int) -> int:
        return BLOCK_BYTES + slot * self.facts.slot_bytes

    # ---- entries ----

    def _entries_of(self, pages: SlotPages, generation: int, stamps: IntArray) -> NDArray[np.void]:
        entries = np.zeros(len(pages), dtype=self._dtype)
        entries["key"] = pages.keys
        entries["group"] = pages.groups
        entries["span"][:, : pages.spans.shape[1]] = pages.spans
        entries["generation"] = generation
        entries["stamp"] = stamps
        seal_entries(entries, pages.slots)
        return entries

    def survey(
        self, slots: IntArray, stopped: Callable[[], bool] = lambda: False
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Entries of these slots, of any generation, and for which of them the slot's header had to be read
        since the table has no intact word on it. Raises OSError."""
        entries = self.table.read(slots)
        unlisted = slots >= self.listed_slots
        entries[unlisted] = 0
        words = entries.view(np.uint64).reshape(slots.size, self.facts.entry_bytes // 8)
        doubtful = ~intact_entries(entries, slots) & (words.any(axis=1) | unlisted)
        if doubtful.any():
            entries[doubtful] = self._scan(slots[doubtful], stopped)
        return entries, doubtful

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
            self.table.write(slots[doubtful], entries[doubtful])
            self.table.write_head()
            self.table_lost = False
            self.listed_slots = self.num_slots
        good = intact & (entries["generation"] == generation) & np.isin(entries["group"], groups)
        stamps = np.maximum(entries["stamp"], self.table.read_stamps(usable))[good]
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
        """Entries of these slots, made anew from the slots' headers; doubtful ones where a header cannot be
        read, so that the next start tries again. Raises OSError if the medium gives none."""
        header = aligned_buffer(self.facts.header_bytes)
        entries = np.zeros(slots.size, dtype=self._dtype)
        unread: list[int] = []
        for done, slot in enumerate(slots.tolist()):
            if done % 1024 == 0 and stopped():
                raise OSError(errno.ECANCELED, "stopped while reading slot headers")
            if done and done % _SCAN_REPORT == 0:
                logger.info("kvquilt: disk: %s: %d of %d slot headers read", self.name, done, slots.size)
            try:
                self._files.read(self.fd, [header], self._offset(slot))
            except OSError:
                unread.append(done)
                if len(unread) == done + 1 == GIVEN_UP_AFTER:
                    raise
                continue
            page = parse_page_header(header)
            if page is None or page.slot != slot or page.namespace != self.facts.namespace:
                continue
            if len(page.spans) > 32 * self.facts.span_keys:
                continue
            entries[done]["key"] = np.frombuffer(page.key, dtype=np.uint64)
            entries[done]["generation"] = page.generation
            entries[done]["group"] = page.group
            spans = np.frombuffer(page.spans, dtype=np.uint64).reshape(-1, 4)
            entries[done]["span"][: len(spans)] = spans
        seal_entries(entries, slots)
        entries[entries["generation"] == 0] = 0
        for done in unread:
            make_doubtful(entries[done : done + 1])
        return entries

    def close(self) -> None:
        """Close the files. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.table.close()


def _flat(slots: list[tuple[memoryview, memoryview]]) -> list[memoryview]:
    return [piece for slot in slots for piece in slot]


def _own_headers(size: int) -> memoryview:
    """This thread's memory for the headers of one call, of any slab: the same each time."""
    kept: memoryview | None = getattr(_local, "headers", None)
    if kept is None or len(kept) < size:
        kept = _local.headers = aligned_buffer(size)
    return kept[:size]
