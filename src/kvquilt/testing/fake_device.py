"""`FakeDevice`: an accelerator with streams, events and a logical clock, in host memory.

Work is cut into small steps, and a seeded choice decides which stream takes the next one, so
that each seed is another schedule that a real device could take. Steps really move bytes: a
copy that begins too early carries old bytes, and one that is overtaken is torn. Beside that,
two pieces of work that touch the same bytes at the same time, one of them writing, are
recorded in `hazards`, as is host memory that is unpinned under a copy.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvquilt.transfer.device import Addresses

__all__ = ["FakeDevice", "FakeEvent", "FakeStream", "Span"]

Step = Callable[[], None]


@dataclass(frozen=True)
class Span:
    """Bytes [address, address + num_bytes) that a piece of work reads or writes."""

    address: int
    num_bytes: int
    write: bool

    def conflicts(self, other: Span) -> bool:
        """Whether both touch a byte and at least one writes it."""
        apart = (
            self.address + self.num_bytes <= other.address or other.address + other.num_bytes <= self.address
        )
        return not apart and (self.write or other.write)


@dataclass(eq=False)
class FakeEvent:
    """Happens when its stream reaches it; `at` is the clock then."""

    at: int | None = None


@dataclass(eq=False)
class _Work:
    name: str
    steps: deque[Step]
    spans: tuple[Span, ...] = ()
    waits_for: FakeEvent | None = None
    begun: bool = False


@dataclass(eq=False)
class FakeStream:
    """Work in order."""

    name: str
    work: deque[_Work] = field(default_factory=deque)


class FakeDevice:
    """A `Device` (see there) whose time passes only when it is asked to.

    seed: chooses the schedule. ignore_waits: break `wait_event`, to prove that a test notices.
    fail_copy: number of the `copy` call (from 0) that gives half of its copies and then raises.
    pinning: what `register` answers. steps_per_look: steps that pass at each `done`.
    """

    device_type = "cpu"
    has_kernel = True

    def __init__(
        self,
        seed: int = 0,
        *,
        ignore_waits: bool = False,
        fail_copy: int | None = None,
        pinning: bool = True,
        steps_per_look: int = 0,
    ) -> None:
        self.clock = 0
        self.hazards: list[str] = []
        self.copies: list[tuple[str, bool, int]] = []
        """Of each `copy` call: the stream's name, by kernel or not, number of pieces."""
        self._random = random.Random(seed)
        self._ignore_waits, self._pinning = ignore_waits, pinning
        self._fail_copy, self._steps_per_look = fail_copy, steps_per_look
        self._lock = threading.RLock()
        self._engine = FakeStream("engine")
        self._streams = [self._engine]
        self._pinned: dict[int, int] = {}

    def bind_thread(self) -> None:
        """Nothing to do."""

    def current_stream(self) -> FakeStream:
        """The engine's stream, whatever the thread."""
        return self._engine

    def new_stream(self) -> FakeStream:
        """See `Device`."""
        with self._lock:
            self._streams.append(FakeStream(f"stream{len(self._streams)}"))
            return self._streams[-1]

    def record(self, stream: FakeStream) -> FakeEvent:
        """See `Device`."""
        event = FakeEvent()

        def happen() -> None:
            event.at = self.clock

        with self._lock:
            stream.work.append(_Work("event", deque([happen])))
        return event

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        """See `Device`."""
        if not self._ignore_waits:
            with self._lock:
                stream.work.append(_Work("wait", deque([_nothing]), waits_for=event))

    def done(self, event: FakeEvent) -> bool:
        """See `Device`."""
        with self._lock:
            for _ in range(self._steps_per_look):
                self.step()
            return event.at is not None

    def synchronize(self, event: FakeEvent) -> None:
        """Let time pass until `event` has happened."""
        with self._lock:
            while event.at is None:
                if not self.step():
                    raise RuntimeError("the event can never happen: no stream can go on")

    def register(self, address: int, num_bytes: int) -> bool:
        """See `Device`."""
        if self._pinning:
            self._pinned[address] = num_bytes
        return self._pinning

    def unregister(self, address: int) -> None:
        """See `Device`; a hazard if work that touches the memory has not ended."""
        with self._lock:
            span = Span(address, self._pinned.pop(address), True)
            for stream in self._streams:
                for work in stream.work:
                    if any(span.conflicts(other) for other in work.spans):
                        self.hazards.append(f"clock {self.clock}: memory unpinned under {work.name}")

    def copy(
        self,
        stream: FakeStream,
        dst: Addresses,
        src: Addresses,
        size: Addresses,
        *,
        to_host: bool,
        kernel: bool,
    ) -> None:
        """See `Device`. Pieces move in random order, each in two halves."""
        with self._lock:
            number = len(self.copies)
            self.copies.append((stream.name, kernel, len(dst)))
            pieces = list(zip(dst.tolist(), src.tolist(), size.tolist(), strict=True))
            if number == self._fail_copy:
                pieces = pieces[: len(pieces) // 2]
            self._random.shuffle(pieces)
            steps = [
                _move(d + lo, s + lo, hi - lo) for d, s, n in pieces for lo, hi in ((0, n // 2), (n // 2, n))
            ]
            spans = [Span(d, n, True) for d, _, n in pieces] + [Span(s, n, False) for _, s, n in pieces]
            self.work(stream, f"copy {number}", steps, spans)
            if number == self._fail_copy:
                raise RuntimeError("the device failed in the middle of a batch")

    def zero(self, stream: FakeStream, dst: Addresses, size: Addresses) -> None:
        """See `Device`."""
        pieces = list(zip(dst.tolist(), size.tolist(), strict=True))
        steps = [_fill(address, count) for address, count in pieces]
        self.work(stream, "zero", steps, [Span(address, count, True) for address, count in pieces])

    def work(self, stream: FakeStream, name: str, steps: Iterable[Step], spans: Sequence[Span] = ()) -> None:
        """Give `stream` some work: what it does, step by step, and which bytes that touches."""
        with self._lock:
            stream.work.append(_Work(name, deque([*steps, _nothing]), tuple(spans)))

    def step(self) -> bool:
        """One step of one stream that can go on, by chance; False if none can."""
        with self._lock:
            ready = [s for s in self._streams if s.work and self._can_go_on(s.work[0])]
            if not ready:
                return False
            self.clock += 1
            stream = self._random.choice(ready)
            work = stream.work[0]
            if not work.begun:
                work.begun = True
                self._look_for_hazards(stream, work)
            work.steps.popleft()()
            if not work.steps:
                stream.work.popleft()
            return True

    def idle(self) -> bool:
        """Whether all work is done."""
        with self._lock:
            return not any(stream.work for stream in self._streams)

    def _can_go_on(self, work: _Work) -> bool:
        return work.waits_for is None or work.waits_for.at is not None

    def _look_for_hazards(self, mine: FakeStream, work: _Work) -> None:
        for stream in self._streams:
            other = stream.work[0] if stream.work else None
            if stream is mine or other is None or not other.begun:
                continue
            if any(a.conflicts(b) for a in work.spans for b in other.spans):
                self.hazards.append(f"clock {self.clock}: {work.name} begins during {other.name}")


def _nothing() -> None:
    pass


def _move(dst: int, src: int, size: int) -> Step:
    return lambda: _discard(ctypes.memmove(dst, src, size))


def _fill(dst: int, size: int) -> Step:
    return lambda: _discard(ctypes.memset(dst, 0, size))


def _discard(_: Any) -> None:
    pass
