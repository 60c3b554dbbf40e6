"""The clock that leaves out the time of digests."""

from __future__ import annotations

from typing import Any

from kvquilt.bench.clock import PausableClock, UnclockedObserver


class Hands:
    """A source of seconds that a test moves."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_time_in_a_pause_is_left_out_even_if_it_ends_in_an_error() -> None:
    hands = Hands()
    clock = PausableClock(hands)
    start = clock()
    hands.now += 1
    pause = clock.paused()
    pause.__enter__()
    hands.now += 5
    assert pause.__exit__(RuntimeError, RuntimeError(), None) is False
    hands.now += 2
    assert clock() - start == 3.0


def test_an_observer_is_called_outside_the_clock() -> None:
    hands = Hands()
    clock = PausableClock(hands)
    seen: list[tuple[str, Any]] = []

    class Slow:
        def saved(self, pages: Any) -> None:
            seen.append(("saved", pages))
            hands.now += 7

        def loaded(self, pages: Any) -> None:
            seen.append(("loaded", pages))
            hands.now += 7

    observer = UnclockedObserver(Slow(), clock)  # type: ignore[arg-type]
    observer.saved("a")  # type: ignore[arg-type]
    observer.loaded("b")  # type: ignore[arg-type]
    assert seen == [("saved", "a"), ("loaded", "b")]
    assert clock() == 10.0
