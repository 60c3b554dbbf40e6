"""The last look-ups, with why each hit had its length."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["LookupRecord", "LookupRing"]


@dataclass(frozen=True)
class LookupRecord:
    """One resolved look-up.

    local_tokens: held by the engine itself. hit_tokens: the boundary (0: nothing beyond the
    local prefix). limited_by: the group that kept it from being longer. why: one sentence.
    """

    request_id: str
    num_tokens: int
    local_tokens: int
    hit_tokens: int
    limited_by: str | None
    why: str


class LookupRing:
    """Keeps the newest `size` records.

    >>> ring = LookupRing(size=1)
    >>> ring.add(LookupRecord("a", 97, 0, 96, None, "the whole prompt"))
    >>> ring.of("a").hit_tokens
    96
    """

    def __init__(self, size: int = 1024) -> None:
        self._records: deque[LookupRecord] = deque(maxlen=size)

    def add(self, record: LookupRecord) -> None:
        self._records.append(record)

    def last(self, count: int = 10) -> list[LookupRecord]:
        """The newest `count` records, oldest first."""
        return list(self._records)[-count:]

    def of(self, request_id: str) -> LookupRecord | None:
        """The newest record of one request."""
        return next((r for r in reversed(self._records) if r.request_id == request_id), None)
