"""Long-lived threads of a tier: batches of reads before batches of writes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Batch", "Workers"]

logger = logging.getLogger(__name__)
Kind = Literal["read", "write"]


@dataclass(eq=False)
class Batch:
    """Work for one thread: `run` does it, `drop` ends it undone; one of them is called, once.

    pages, num_bytes: what it counts for in the queue.
    """

    kind: Kind
    pages: int
    num_bytes: int
    run: Callable[[], None]
    drop: Callable[[], None]
    queued_at: float = field(default_factory=time.monotonic)


class Workers:
    """`count` daemon threads. At least one is left for reads while writes are under way, if there are two.

    One lock guards the queues and what each thread is doing; it is never held while a batch runs. Threads
    wait for `_queued`, callers for `_changed`: so a batch wakes one thread, not all.
    """

    def __init__(self, name: str, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._queued = threading.Condition(lock)
        self._queues: dict[Kind, deque[Batch]] = {"read": deque(), "write": deque()}
        self._pages: dict[Kind, int] = {"read": 0, "write": 0}
        self._bytes: dict[Kind, int] = {"read": 0, "write": 0}
        self._busy: dict[int, tuple[Kind, float]] = {}
        self._writers = max(1, count - 1)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch) -> None:
        """Queue a batch; it is dropped at once if the threads are closed."""
        with self._changed:
            closed = self._closed
            if not closed:
                self._queues[batch.kind].append(batch)
                self._pages[batch.kind] += batch.pages
                self._bytes[batch.kind] += batch.num_bytes
                self._queued.notify()
        if closed:
            batch.drop()

    def pages(self, kind: Kind) -> int:
        """Pages queued or under way."""
        return self._pages[kind]

    def num_bytes(self, kind: Kind) -> int:
        """Bytes queued or under way."""
        return self._bytes[kind]

    def oldest_start(self) -> float | None:
        """When the longest running batch began, by the clock; None if none runs."""
        with self._changed:
            return min((since for _, since in self._busy.values()), default=None)

    def drop_queued(self) -> None:
        """Drop what no thread has begun."""
        with self._changed:
            dropped = [*self._queues["read"], *self._queues["write"]]
            for queue in self._queues.values():
                queue.clear()
        for batch in dropped:
            try:
                batch.drop()
            except Exception:
                logger.exception("kvquilt: disk: a batch of %ss could not be dropped", batch.kind)
            finally:
                self._ended(batch)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or under way; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._pages.values()), timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Drop what is queued, and wait for what is under way; False if a thread did not end in time."""
        with self._changed:
            self._closed = True
            self._queued.notify_all()
        self.drop_queued()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                # Whoever ends a batch comes back here for what it has made room for.
                self._queued.wait_for(lambda: self._closed or self._next_kind() is not None)
                kind = self._next_kind()
                if kind is None:
                    return
                batch = self._queues[kind].popleft()
                self._busy[number] = (kind, self._clock())
            try:
                batch.run()
            except Exception:
                logger.exception("kvquilt: disk: a batch of %ss failed", batch.kind)
            finally:
                with self._changed:
                    del self._busy[number]
                self._ended(batch)

    def _next_kind(self) -> Kind | None:
        if self._queues["read"]:
            return "read"
        writing = sum(kind == "write" for kind, _ in self._busy.values())
        return "write" if self._queues["write"] and writing < self._writers else None

    def _ended(self, batch: Batch) -> None:
        with self._changed:
            self._pages[batch.kind] -= batch.pages
            self._bytes[batch.kind] -= batch.num_bytes
            self._changed.notify_all()
