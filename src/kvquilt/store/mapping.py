"""Shared memory in huge pages, where the system has them.

Disks, GPUs and page tables move whole runs of memory faster than scattered pages of 4 KiB. The kernel
gives shared memory no huge pages of its own accord (shmem_enabled is "never" on most systems), but it
collapses what is there into huge pages when asked (MADV_COLLAPSE, Linux 6.1), and maps them as
such where address and offset in the file agree. Pinned pages it leaves as they are. All of this is best
effort: without it there are small pages.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

__all__ = ["collapse", "huge_page_bytes", "map_memory", "touch"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_NO_ACCESS = 0
_MAP_FIXED = 0x10  # of all of Linux but alpha and parisc
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_TRIES = 3
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def huge_page_bytes() -> int:
    """Size of a huge page; 0 if the system has none, or its administrator wants none."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def map_memory(fd: int, length: int, offset: int = 0) -> memoryview:
    """Map a part of a file to read and write, at an address that huge pages of the file can be mapped at.
    Mapped until nobody holds any of it; until then it takes a huge page of addresses more than `length`.

    offset: a multiple of 4096. Raises ValueError for what is not in the file: to touch it would end the
    process; OSError if the system refuses.
    """
    if not (length > 0 and 0 <= offset <= os.fstat(fd).st_size - length):
        raise ValueError(f"{length} bytes from {offset} on are not in the file")
    huge = huge_page_bytes()
    if not 0 < huge <= length:
        return memoryview(mmap.mmap(fd, length, offset=offset))
    room = _map(None, length + huge, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    at = room + (offset - room) % huge
    kind = mmap.MAP_SHARED | _MAP_FIXED
    try:
        _map(at, length, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, offset)  # in place of a part of `room`
    except OSError:
        _libc.munmap(room, length + huge)
        raise
    memory = (ctypes.c_ubyte * length).from_address(at)
    # Not at exit: threads may still be at work in it.
    weakref.finalize(memory, _libc.munmap, room, length + huge).atexit = False
    return memoryview(memory).cast("B")


def collapse(memory: memoryview, offset: int) -> None:
    """Put what is there into huge pages, as far as they lie in `memory`, which starts at `offset` of its file
    and has memory everywhere."""
    huge = huge_page_bytes()
    if not huge:
        return
    first, last = -offset % huge, (offset + len(memory)) // huge * huge - offset
    for _ in range(_TRIES if last > first else 0):
        if not _libc.madvise(_address(memory) + first, last - first, _MADV_COLLAPSE):
            return
        if ctypes.get_errno() != errno.EAGAIN:  # else somebody was just using a page of it
            return


def touch(memory: memoryview) -> None:
    """Prove that all of it can be written, without changing it. Raises OSError."""
    if _libc.madvise(_address(memory), len(memory), _MADV_POPULATE_WRITE):
        error = _last_error()
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 5.14; the memory is allocated all the same
            raise error


def _map(at: int | None, length: int, access: int, kind: int, fd: int, offset: int) -> int:
    address: int | None = _libc.mmap(at, length, access, kind, fd, offset)
    if address is None or address == _FAILED:
        raise _last_error()
    return address


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
