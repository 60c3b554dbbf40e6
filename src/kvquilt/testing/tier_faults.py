"""Media that fail, and tiers that are late or lose pages, on purpose.

`FaultyFiles` goes under a tier that keeps files; `FaultyTier` goes around any tier.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvquilt.store import Chain
from kvquilt.tiers.base import Loaded, Pages, Tier, TierStats
from kvquilt.tiers.files import Files

__all__ = ["FaultyFiles", "FaultyTier", "FileCall", "FileEffect", "FileFault", "TierFault"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FileCall = Literal["open", "read", "write", "allocate", "truncate", "replace"]
FileEffect = Literal["short", "corrupt", "hang", "delay"]
"""short: half is transferred, then the error of a transfer that was cut short. corrupt: one byte is
flipped on the way. hang: the call waits for `FileFault.release`. delay: it waits up to `seconds`."""

TierFault = Literal["miss", "scribble", "refuse"]
"""miss: loads bring nothing. scribble: so do they, and leave other bytes in the memory. refuse:
nothing is accepted."""


@dataclass(eq=False)
class FileFault:
    """Which calls go wrong, and how: by `error`, an errno, or by `effect`.

    calls: names of the calls. match: part of the file's name. only_direct: opening with O_DIRECT only.
    from_offset, to_offset: transfers that touch a byte in between. rate, seed: a share of the calls that fit.
    num_calls, num_waiting: calls that went wrong, and those that wait for `release` now.
    """

    calls: Collection[FileCall]
    error: int | None = None
    effect: FileEffect | None = None
    match: str = ""
    only_direct: bool = False
    from_offset: int = 0
    to_offset: int = 1 << 62
    rate: float = 1.0
    seed: int = 0
    seconds: float = 0.002
    num_calls: int = field(default=0, init=False)
    num_waiting: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (self.error is None) == (self.effect is None):
            raise ValueError("one of error and effect is needed")
        self._draw = random.Random(self.seed)
        self._changed = threading.Condition()  # guards the counts and the random numbers
        self._released = False

    def release(self) -> None:
        """Let all calls that hang go on, and those that come."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def wait_for_calls(self, count: int = 1, timeout_seconds: float = 60.0) -> None:
        """Wait until this many calls have gone wrong. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_calls >= count, timeout_seconds):
                raise TimeoutError(f"{self.num_calls} calls of {self.calls} instead of {count}")

    def apply(
        self, call: FileCall, name: str, *, direct: bool = False, offset: int = 0, length: int = 1
    ) -> FileEffect | None:
        """Let this call wait or raise OSError, or return what is left to do to it; counts it if it fits."""
        if call not in self.calls or self.match not in name or (self.only_direct and not direct):
            return None
        if offset + length <= self.from_offset or offset >= self.to_offset:
            return None
        with self._changed:
            if self.rate < 1.0 and self._draw.random() >= self.rate:
                return None
            self.num_calls += 1
            self._changed.notify_all()
            if self.effect == "hang":
                self.num_waiting += 1
                self._changed.wait_for(lambda: self._released)
                self.num_waiting -= 1
            elif self.effect == "delay":
                self._changed.wait_for(lambda: self._released, self._draw.uniform(0, self.seconds))
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error), name)
        return self.effect


class FaultyFiles(Files):
    """`Files` with faults, each in force while its `with` lasts.

    with files.inject(FileFault({"read"}, error=errno.EIO, match=".slab")) as fault:
        ...
    assert fault.num_calls > 0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; never held during a call
        self._faults: list[FileFault] = []
        self._names: dict[int, str] = {}

    @contextlib.contextmanager
    def inject(self, fault: FileFault) -> Iterator[FileFault]:
        """Put a fault in force; at the end it is released."""
        with self._lock:
            self._faults.append(fault)
        try:
            yield fault
        finally:
            with self._lock:
                self._faults.remove(fault)
            fault.release()

    def open(self, path: Path, flags: int) -> int:
        self._apply("open", path.name, direct=bool(flags & os.O_DIRECT))
        fd = super().open(path, flags)
        with self._lock:
            self._names[fd] = path.name
        return fd

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        effects = self._apply("read", self._name(fd), offset=offset, length=sum(map(len, buffers)))
        if "short" in effects:
            super().read(fd, _half(buffers), offset)
            raise OSError(errno.EIO, "the file ended early")
        super().read(fd, buffers, offset)
        if "corrupt" in effects:
            _flip(buffers[-1])

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        effects = self._apply("write", self._name(fd), offset=offset, length=sum(map(len, buffers)))
        if "short" in effects:
            super().write(fd, _half(buffers), offset)
            raise OSError(errno.ENOSPC, "a write was cut short")
        super().write(fd, buffers, offset)
        if "corrupt" in effects:
            with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
                at = offset + sum(map(len, buffers)) // 2
                old = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([old[0] ^ 1]), at)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._apply("allocate", self._name(fd), offset=offset, length=length)
        super().allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self._apply("truncate", self._name(fd))
        super().truncate(fd, length)

    def replace(self, path: Path, data: bytes) -> None:
        effects = self._apply("replace", path.name)
        super().replace(path, data[: len(data) // 2] if "short" in effects else data)

    def _name(self, fd: int) -> str:
        with self._lock:
            return self._names.get(fd, "")

    def _apply(
        self, call: FileCall, name: str, *, direct: bool = False, offset: int = 0, length: int = 1
    ) -> set[FileEffect | None]:
        with self._lock:
            faults = list(self._faults)
        return {fault.apply(call, name, direct=direct, offset=offset, length=length) for fault in faults}


def _half(buffers: Sequence[memoryview | bytes]) -> list[memoryview]:
    """About the first half of the bytes, in whole disk blocks where there are some."""
    size = sum(map(len, buffers)) // 2
    left = size // 4096 * 4096 or size
    out = []
    for buffer in buffers:
        part = memoryview(buffer)[:left]
        if len(part):
            out.append(part)
        left -= len(part)
    return out


def _flip(buffer: memoryview) -> None:
    buffer[len(buffer) // 2] ^= 1


class FaultyTier:
    """A tier around another one that tells of every end late, in another order, and may lose pages.

    seconds: the longest delay; 0: none. fault: what goes wrong, with a share `rate` of the calls.
    While `hold` is in force nothing is told at all. The inner tier does its work at once; so memory may be
    given back later than needed, never earlier.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        seconds: float = 0.002,
        fault: TierFault | None = None,
        rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.fault: TierFault | None = fault
        self.rate = rate
        self._seconds = seconds
        self._draw = random.Random(seed)
        # Guards what is below. _open: calls whose end has not been told, whether it has come or not.
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], None]] = []
        self._open = 0
        self._held = False
        self._closed = False
        self._thread = threading.Thread(target=self._tell, name="kvquilt-faulty-tier", daemon=True)
        self._thread.start()

    def present(self, chain: Chain, group: int, first: int, last: int) -> BoolArray:
        """As the inner tier."""
        return self.inner.present(chain, group, first, last)

    def save(self, pages: Sequence[Pages], done: Callable[[], None]) -> int:
        """As the inner tier; the end is told later."""
        if self._goes_wrong("refuse"):
            done()
            return 0
        self._begin()
        return self.inner.save(pages, lambda: self._later(done))

    def room_bytes(self) -> int:
        """As the inner tier."""
        return self.inner.room_bytes()

    def load(self, pages: Sequence[Pages], done: Loaded) -> None:
        """As the inner tier; the end is told later."""
        scribble = self._goes_wrong("scribble")
        if scribble or self._goes_wrong("miss"):
            for part in pages if scribble else ():
                size = part.chain.layout.groups[part.group].page_bytes
                for start in part.offsets.tolist():
                    part.memory[start : start + size] = bytes([0xEE]) * size
            done([np.zeros(part.blocks.size, dtype=np.bool_) for part in pages])
            return
        self._begin()
        self.inner.load(pages, lambda results: self._later(lambda: done(results)))

    def touch(self, chain: Chain, tokens: int) -> None:
        """As the inner tier."""
        self.inner.touch(chain, tokens)

    def withdraw(self, chain: Chain, group: int, blocks: IntArray) -> int:
        """As the inner tier."""
        return self.inner.withdraw(chain, group, blocks)

    def reset(self) -> bool:
        """As the inner tier."""
        return self.inner.reset()

    def stats(self) -> TierStats:
        """As the inner tier."""
        return self.inner.stats()

    def audit(self) -> None:
        """As the inner tier, if it has one."""
        getattr(self.inner, "audit", lambda: None)()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Until it ends, no end of a call is told."""
        with self._changed:
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Also until every end has been told."""
        if not self.inner.wait_idle(timeout_seconds):
            return False
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_seconds)

    def close(self) -> None:
        """As the inner tier, and tell what has not been told."""
        self.inner.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _goes_wrong(self, fault: TierFault) -> bool:
        with self._changed:
            return self.fault == fault and self._draw.random() < self.rate

    def _begin(self) -> None:
        with self._changed:
            self._open += 1

    def _later(self, done: Callable[[], None]) -> None:
        with self._changed:
            if not self._closed:
                self._waiting.append(done)
                self._changed.notify_all()
                return
        self._end(done)

    def _end(self, done: Callable[[], None]) -> None:
        try:
            done()
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self._held))
                if not self._waiting:
                    return
                if self._seconds and not self._closed:
                    self._changed.wait_for(lambda: self._closed, self._draw.uniform(0, self._seconds))
                done = self._waiting.pop(self._draw.randrange(len(self._waiting)))
            self._end(done)
