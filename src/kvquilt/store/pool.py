"""Arenas: fixed slots in anonymous shared memory, made usable extent by extent.

Touching fresh memory costs half a second and more per GiB, so an arena of hundreds of GiB can't be faulted
in before the engine starts, nor by the first saves. One daemon thread does it in the
background for all arenas in turn, extent by extent: `posix_fallocate` gives the memory, which
is collapsed into huge pages, and MADV_POPULATE_WRITE proves that it can be written. None of
these holds the GIL. The thread shares one thing with everyone else, the integer
`Arena.usable_slots`, which only grows.

An extent that can't be had (ENOSPC, ENOMEM, EFAULT) is logged once and counted, and that arena
stays at what it has: slots without memory are never handed out, since a write to them would
end the process with SIGBUS.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvquilt.errors import SizingError
from kvquilt.store.mapping import collapse, huge_page_bytes, map_memory, touch
from kvquilt.store.records import ArenaInfo

__all__ = [
    "EXTENT_BYTES",
    "SLOT_ALIGNMENT",
    "Arena",
    "Populate",
    "Prefault",
    "SlotSpace",
    "populate_all",
    "populate_extent",
]

SLOT_ALIGNMENT = 4096
EXTENT_BYTES = 64 << 20

_logger = logging.getLogger(__name__)

Populate = Callable[[int, int, int], None]
"""(fd, offset, length) -> None: give memory to a part of a file; raises OSError if it can't."""


def populate_extent(fd: int, offset: int, length: int) -> None:
    """Allocate and touch [offset, offset + length) of a memfd, if it can be had with the rest of the huge
    page that it ends in, so that none is left to the next extent half in use. Raises OSError."""
    end = offset + length
    if 0 < (huge := huge_page_bytes()) <= EXTENT_BYTES:
        end = max(end, min(-(-end // huge) * huge, os.fstat(fd).st_size))
    try:
        os.posix_fallocate(fd, offset, end - offset)
    except OSError:
        os.posix_fallocate(fd, offset, length)
        end = offset + length
    memory = map_memory(fd, end - offset, offset)
    collapse(memory, offset)
    touch(memory)


def populate_all(fd: int, size: int) -> None:
    """`populate_extent` for all of a memfd. Raises OSError."""
    for offset in range(0, size, EXTENT_BYTES):
        populate_extent(fd, offset, min(EXTENT_BYTES, size - offset))


class SlotSpace(Protocol):
    """What slots lie in: shared memory, or a file.

    usable_slots: slots [0, usable) can be used; it only grows.
    """

    index: int
    name: str
    num_slots: int
    slot_stride: int
    usable_slots: int
    fd: int

    def close(self) -> None:
        """Give it up. May be called twice."""


class Arena:
    """`num_slots` slots of `slot_stride` bytes in one memfd; slot i starts at i * slot_stride.

    The file is sealed against shrinking and growing, so a peer that maps it can't be made to
    fault. The arena keeps no mapping itself: users map `fd`. usable_slots: slots [0, usable)
    have memory; it only grows. Raises SizingError for impossible sizes or if the system refuses.
    """

    def __init__(self, index: int, name: str, num_slots: int, slot_stride: int) -> None:
        if num_slots < 1 or slot_stride < 1 or slot_stride % SLOT_ALIGNMENT:
            raise SizingError(
                f"arena {name!r}: {num_slots} slots of {slot_stride} bytes: at least one slot, and a stride "
                f"that is a positive multiple of {SLOT_ALIGNMENT}, are needed"
            )
        self.index = index
        self.name = name
        self.num_slots = num_slots
        self.slot_stride = slot_stride
        self.usable_slots = 0
        self.fd = _sealed_memfd(name, self.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self.num_slots * self.slot_stride

    @property
    def info(self) -> ArenaInfo:
        """What a peer needs to know beside the file descriptor."""
        return ArenaInfo.of(self)

    def close(self) -> None:
        """Close the file descriptor; the memory goes with its last mapping. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _sealed_memfd(name: str, size_bytes: int) -> int:
    # The name only serves whoever reads /proc; the system refuses more than 249 bytes.
    fd = os.memfd_create(f"kvquilt-{name}"[:60], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise SizingError(f"arena {name!r}: shared memory of {size_bytes} bytes: {error}") from error
    return fd


class Prefault:
    """Gives the arenas their memory, extent by extent, one extent of each arena in turn.

    `start` runs it in one daemon thread, `run` in the caller's. failures: extents that could
    not be had. Guarded by nothing: once the thread runs, it alone writes `failures` and `usable_slots`.
    """

    def __init__(self, arenas: Sequence[SlotSpace], populate: Populate = populate_extent) -> None:
        self.failures = 0
        self._arenas = arenas
        self._populate = populate
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make one extent of each arena usable, then work in the background until all are done or
        `stop` is called. Without that first sweep the first request of an engine would find no slot.
        Called again after a failure, it goes on from there."""
        if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        growing = [arena for arena in self._arenas if self._grow(arena)]
        self._thread = threading.Thread(
            target=self._run, args=(growing,), name="kvquilt-prefault", daemon=True
        )
        self._thread.start()

    def run(self) -> None:
        """Work until all extents are done."""
        self._run(list(self._arenas))

    def _run(self, growing: list[SlotSpace]) -> None:
        while growing and not self._stop.is_set():
            growing = [arena for arena in growing if not self._stop.is_set() and self._grow(arena)]

    def stop(self, timeout_seconds: float | None = None) -> bool:
        """Stop after the extent in hand; False if the system takes longer over it than the caller waits."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _grow(self, arena: SlotSpace) -> bool:
        """Make one more extent usable; False if there is none to do."""
        first = arena.usable_slots
        if first >= arena.num_slots:
            return False
        last = min(arena.num_slots, first + max(1, EXTENT_BYTES // arena.slot_stride))
        try:
            self._populate(arena.fd, first * arena.slot_stride, (last - first) * arena.slot_stride)
        except (OSError, ValueError) as error:
            self.failures += 1
            if self.failures == 1:
                _logger.error(
                    "no room for slots %d.. of arena %s (%s): going on with %d of %d slots there",
                    first, arena.name, error, first, arena.num_slots,
                )  # fmt: skip
            return False
        arena.usable_slots = last
        return last < arena.num_slots
