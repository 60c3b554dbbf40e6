"""System calls of the disk tier in one place, so that tests can let each of them fail."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Calls", "Files", "aligned_buffer", "probe_direct"]

logger = logging.getLogger(__name__)
_IOV_MAX = 1024


def aligned_buffer(size: int) -> memoryview:
    """Writable memory that starts on a page: direct I/O takes no other."""
    return memoryview(mmap.mmap(-1, size))


class Calls:
    """How many calls move pages at once: `count`, and one less where they write, so that reads find the
    medium free. More threads than that share them: while some wait for the medium, others check.

    reading, writing: entered around each call.
    """

    def __init__(self, count: int) -> None:
        self.reading = threading.Semaphore(count)
        self.writing = threading.Semaphore(max(1, count - 1))


class Files:
    """The calls that the disk tier makes. Raises OSError; short transfers are one."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor of mode 0600, closed in child programs."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from `offset` on; the end of the file inside them is an error (EIO)."""
        for start in range(0, len(buffers), _IOV_MAX):
            part = buffers[start : start + _IOV_MAX]
            size = sum(map(len, part))
            if os.preadv(fd, part, offset) != size:
                raise OSError(errno.EIO, "the file ended early")
            offset += size

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write the buffers from `offset` on."""
        for start in range(0, len(buffers), _IOV_MAX):
            part = buffers[start : start + _IOV_MAX]
            size = sum(map(len, part))
            if os.pwritev(fd, part, offset) != size:
                raise OSError(errno.ENOSPC, "a write was cut short")
            offset += size

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Give disk space to a part of a file whose beginning has it; all or nothing."""
        facts, disk = os.fstat(fd), os.fstatvfs(fd)
        if offset + length - facts.st_blocks * 512 > disk.f_bavail * disk.f_frsize:
            # Some file systems would give what there is before they say so, and nobody else has any then.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        """Set a file's length."""
        os.ftruncate(fd, length)

    def replace(self, path: Path, data: bytes) -> None:
        """Put `data` in place of the file at `path`, all or nothing, and on the medium."""
        fd, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        self._sync_directory(path.parent)

    @staticmethod
    def _sync_directory(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def probe_direct(files: Files, directory: Path) -> bool:
    """Does the file system take direct I/O? Tried with one block in a file that is gone afterwards."""
    path = directory / ".probe.tmp"
    block = aligned_buffer(mmap.PAGESIZE)
    try:
        fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            path.unlink(missing_ok=True)
            return False
        raise
    try:
        files.write(fd, [block], 0)
        files.read(fd, [block], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    return True
