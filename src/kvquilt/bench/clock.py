"""A clock that stands still while the benchmark looks at pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvquilt.testing.pages import PageList, PageRecorder

__all__ = ["PausableClock", "UnclockedObserver"]


class PausableClock:
    """Seconds since some moment, without those spent in `paused`. For one thread."""

    def __init__(self, source: Callable[[], float] = time.perf_counter) -> None:
        self._source = source
        self._left_out = 0.0

    def __call__(self) -> float:
        return self._source() - self._left_out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time until the end of the block."""
        start = self._source()
        try:
            yield
        finally:
            self._left_out += self._source() - start


class UnclockedObserver:
    """Passes pages on to another observer while `clock` is paused: digests are not the engine's work."""

    def __init__(self, inner: PageRecorder, clock: PausableClock) -> None:
        self._inner = inner
        self._clock = clock

    def saved(self, pages: PageList) -> None:
        """Pages that are about to be copied out."""
        with self._clock.paused():
            self._inner.saved(pages)

    def loaded(self, pages: PageList) -> None:
        """Pages that have been put back."""
        with self._clock.paused():
            self._inner.loaded(pages)
