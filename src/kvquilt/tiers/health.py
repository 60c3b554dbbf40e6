"""Is a medium worth asking? Off after failures in a row, tried again with growing pauses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Health"]

logger = logging.getLogger(__name__)
_FAILURES_IN_A_ROW = 3
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Health:
    """State of a tier: "starting", "on" or "off". Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.state = "starting"
        self.why = ""
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_PAUSE_SECONDS
        self._try_at = 0.0

    @property
    def on(self) -> bool:
        """May the medium be asked?"""
        return self.state == "on"

    def good(self) -> None:
        """The medium did what it was asked."""
        self._failures = 0
        if self.state == "on":
            self._pause = _FIRST_PAUSE_SECONDS

    def bad(self, why: str) -> None:
        """The medium failed once; it is switched off if that happens several times in a row."""
        with self._lock:
            self._failures += 1
            enough = self._failures >= _FAILURES_IN_A_ROW and self.state == "on"
        if enough:
            self.switch_off(why)

    def switch_off(self, why: str) -> None:
        """Ask the medium no more until it is due for a try."""
        with self._lock:
            if self.state != "off":
                logger.error("kvquilt: %s is switched off: %s", self._name, why)
            self.state, self.why = "off", why
            self._try_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def switch_on(self) -> None:
        """The medium works, as far as a probe can tell; only real work makes the next pause short again."""
        with self._lock:
            if self.state == "off":
                logger.warning("kvquilt: %s is switched on again", self._name)
            self.state, self.why = "on", ""
            self._failures = 0

    @property
    def due(self) -> bool:
        """Off, and time for a try."""
        return self.state == "off" and self._clock() >= self._try_at
