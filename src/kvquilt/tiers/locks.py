"""Locks of the disk tier's directories: one for starts, one for each namespace, freed with their process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvquilt.errors import ConfigError

__all__ = [
    "LOCK",
    "Lock",
    "hold_namespace",
    "is_locked",
    "locked",
    "may_be_in_use",
    "no_start",
    "try_lock",
]

LOCK = "lock"
_START_SECONDS = 60.0


class Lock:
    """A lock that is held, until `release`. fd: of its file; -1 once it is released."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def release(self) -> None:
        """Give it up; also what a child that was forked meanwhile still has of it. May be called twice."""
        fd, self.fd = self.fd, -1
        _locks.discard(self)
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


_locks: set[Lock] = set()


def _let_go_in_child() -> None:
    # A forked child shares the locks, and would keep them when this process is killed. To close the child's
    # descriptors leaves the parent's locks alone.
    for lock in _locks:
        with contextlib.suppress(OSError):
            os.close(lock.fd)
        lock.fd = -1
    _locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def try_lock(path: Path, *, shared: bool = False) -> Lock | None:
    """The lock at `path`; None if another has it. The system frees it with its process.

    shared: only asks, and makes nothing: raises FileNotFoundError if there is no such file.
    """
    flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
    lock = Lock(os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    _locks.add(lock)
    try:
        fcntl.flock(lock.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        # Closed only: to unlock it would be to unlock what a forked child shares.
        _locks.discard(lock)
        os.close(lock.fd)
        return None
    except BaseException:
        lock.release()
        raise
    return lock


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of the whole directory, for a start: they are short."""
    deadline = time.monotonic() + _START_SECONDS
    while (lock := try_lock(path, shared=shared)) is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"disk_path: {path} has been locked for {_START_SECONDS:.0f} s by another start"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def no_start(root: Path, *, shared: bool) -> Iterator[None]:
    """Keep engines from starting meanwhile: they wait. shared: others may do the same, and nothing is made.

    Raises ConfigError if a start takes too long.
    """
    if shared and not (root / LOCK).exists():
        yield
        return
    with locked(root / LOCK, shared=shared):
        yield


def hold_namespace(root: Path, path: Path) -> Lock | None:
    """A namespace's lock, as an engine holds it; None if a live process has it."""
    with locked(root / LOCK):
        return try_lock(path / LOCK)


def is_locked(path: Path) -> bool:
    """Does a live process hold this namespace? To be asked where no engine can be starting (`no_start`):
    it could not have the namespace for the moment that this takes."""
    with contextlib.suppress(FileNotFoundError):
        lock = try_lock(path / LOCK, shared=True)
        if lock is None:
            return True
        lock.release()
    return False


def may_be_in_use(path: Path) -> bool:
    """Also True where that can't be said: it is left alone, and does not keep others from starting."""
    try:
        return is_locked(path)
    except OSError:
        return True
