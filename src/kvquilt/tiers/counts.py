"""What a tier counts, from several threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TypedDict

from kvquilt.layout import CacheLayout
from kvquilt.tiers.base import DropReason

__all__ = ["Counts"]

_MOST_SAMPLES = 4096


class _Group(TypedDict):
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    dropped: dict[str, int]
    bad: int


class Counts:
    """Counters per group since the start, and the latest seconds. page_bytes: payload by group index."""

    def __init__(self, layout: CacheLayout, num_ranks: int = 1) -> None:
        self._bytes = [group.slot_content_bytes(num_ranks) for group in layout.groups]
        self._lock = threading.Lock()
        self._reads = [0] * len(self._bytes)
        self._writes = [0] * len(self._bytes)
        self._bad = [0] * len(self._bytes)
        self._dropped: list[defaultdict[str, int]] = [defaultdict(int) for _ in self._bytes]
        self._seconds: dict[str, list[float]] = {"read": [], "write": []}

    def read(self, group: int, pages: int, seconds: float) -> None:
        """Pages that were read and proven good."""
        with self._lock:
            self._reads[group] += pages
            self._sample("read", seconds)

    def wrote(self, group: int, pages: int, seconds: float) -> None:
        """Pages that were written."""
        with self._lock:
            self._writes[group] += pages
            self._sample("write", seconds)

    def found_bad(self, group: int, pages: int) -> None:
        """Pages that could not be read, or not be proven good."""
        with self._lock:
            self._bad[group] += pages

    def bad(self) -> int:
        """All pages that were found bad."""
        with self._lock:
            return sum(self._bad)

    def drop(self, group: int, reason: DropReason, pages: int) -> None:
        """Pages that were not written."""
        if pages:
            with self._lock:
                self._dropped[group][reason] += int(pages)

    def of(self, group: int) -> _Group:
        """All of one group, as `GroupTierStats` names them."""
        with self._lock:
            return _Group(
                reads=self._reads[group],
                read_bytes=self._reads[group] * self._bytes[group],
                writes=self._writes[group],
                written_bytes=self._writes[group] * self._bytes[group],
                dropped=dict(self._dropped[group]),
                bad=self._bad[group],
            )

    def take_seconds(self) -> dict[str, list[float]]:
        """Samples since the last call, by "read" and "write"."""
        with self._lock:
            taken, self._seconds = self._seconds, {"read": [], "write": []}
        return taken

    def _sample(self, kind: str, seconds: float) -> None:
        if len(self._seconds[kind]) < _MOST_SAMPLES:
            self._seconds[kind].append(seconds)
