"""Look-ups: the longest boundary for a request, remembered with its lease, and why it had that length."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from kvquilt.layout import CacheLayout
from kvquilt.store import Found, Store
from kvquilt.tiers import Promoter
from kvquilt.vllm.metrics import Meter
from kvquilt.vllm.requests import RequestState

__all__ = ["Finder", "LookupRecord", "LookupRing"]

_NONE: frozenset[str] = frozenset()


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


class Finder:
    """Asks the store on behalf of requests. One answer, with its lease, is remembered per request
    and local length, since the engine may ask thousands of times.

    drafters: groups that a hit may do without ("best_effort"); none if drafts are required.
    promoter: brings what a tier below host RAM has; None if there is none.
    Used on the scheduler's thread only.
    """

    def __init__(
        self,
        store: Store,
        layout: CacheLayout,
        meter: Meter,
        *,
        owner: str,
        drafters: Collection[str],
        promoter: Promoter | None = None,
    ) -> None:
        self.ring = LookupRing()
        self._store = store
        self._layout = layout
        self._meter = meter
        self._owner = owner
        self._drafters = frozenset(drafters)
        self._recurrent = {group.name for group in layout.groups if group.kind == "recurrent"}
        self._promoter = promoter
        self._dense = any(group.dense and group.cacheable for group in layout.groups)

    def find(self, state: RequestState, local_tokens: int) -> Found | None:
        """The longest boundary for the request, given what the engine holds of it; None while pages of a
        longer one are on their way from a slower tier."""
        found = state.found
        if found is not None and state.found_local == local_tokens:
            if found.lease_id is not None:
                self._store.renew(found.lease_id, self._owner)
            return found
        request_id = state.request.request_id
        if self._promoter is not None and self._promoter.waiting(request_id):
            return None
        self._release_found(state)
        state.sync_hashes()
        found, without = self._look(state, local_tokens)
        try:
            more = self._is_promoted(state, found, local_tokens)
        except BaseException:
            self.release(found)
            raise
        if more:
            self.release(found)
            return None
        state.found, state.found_local, state.found_without = found, local_tokens, without
        self._record(state, found, local_tokens)
        if self._promoter is not None:
            self._promoter.forget(request_id)
        return found

    def _is_promoted(self, state: RequestState, found: Found, local_tokens: int) -> bool:
        """Is more coming from below than host RAM has?"""
        if self._promoter is None or found.limited_by is None:
            return False
        return self._promoter.ask(
            state.request.request_id,
            state.chain,
            state.request.num_tokens,
            local_tokens=local_tokens,
            ram_tokens=found.tokens,
            optional=self._drafters,
        )

    def _look(self, state: RequestState, local_tokens: int) -> tuple[Found, frozenset[str]]:
        owner, chain, num_tokens = self._owner, state.chain, state.request.num_tokens
        found = self._store.lookup(owner, chain, num_tokens, local_tokens=local_tokens)
        if not self._drafters or found.limited_by is None:
            return found, _NONE
        try:
            longer = self._store.lookup(
                owner, chain, num_tokens, local_tokens=local_tokens, ignore=self._drafters
            )
        except BaseException:
            self.release(found)
            raise
        if longer.tokens <= found.tokens:
            self.release(longer)
            return found, _NONE
        self.release(found)
        # A drafter's missing pages kept it from being longer, whatever it is limited by without them.
        limiting = found.limited_by if found.limited_by in self._drafters else min(self._drafters)
        return replace(longer, limited_by=limiting), self._drafters

    def below(self, state: RequestState, tokens: int) -> int:
        """The longest boundary up to `tokens` that can be served without what the engine holds."""
        found = self._store.lookup(self._owner, state.chain, tokens + 1)
        self.release(found)
        if self._promoter is not None:
            return max(found.tokens, self._promoter.best(state.chain, tokens + 1))
        return found.tokens

    def junction(self, found: Found) -> int:
        """Where a shared prefix goes on in the dense groups, but no state was kept; 0 if nowhere.

        A state at that boundary lets the next request with that prefix resume there.
        """
        if not self._dense or found.limited_by not in self._recurrent or found.dense_tokens <= found.tokens:
            return 0
        return found.dense_tokens

    def take(self, state: RequestState, external_tokens: int) -> tuple[Found | None, int, frozenset[str]]:
        """Hand over the remembered answer for what the engine finally took: (what to load or None,
        the local length, groups to do without). Pages beyond it are released."""
        found, local_tokens, without = state.found, state.found_local, state.found_without
        state.found, state.found_local, state.found_without = None, -1, _NONE
        tokens = local_tokens + external_tokens
        if found is None or found.tokens == tokens:
            return found, local_tokens, without
        self.release(found)
        if tokens % self._layout.lattice_tokens or local_tokens < 0:
            return None, local_tokens, _NONE
        for ignored in dict.fromkeys((_NONE, self._drafters)):
            again = self._store.lease_at(
                self._owner, state.chain, tokens, local_tokens=local_tokens, ignore=ignored
            )
            if again is not None:
                return replace(again, limited_by=found.limited_by), local_tokens, ignored
        return None, local_tokens, _NONE

    def forget(self, state: RequestState) -> None:
        """Release the remembered answer's pages, and wait for no others."""
        if self._promoter is not None:
            self._promoter.forget(state.request.request_id)
        self._release_found(state)

    def _release_found(self, state: RequestState) -> None:
        found, state.found, state.found_local, state.found_without = state.found, None, -1, _NONE
        if found is not None:
            self.release(found)

    def release(self, found: Found) -> None:
        """Release an answer's pages."""
        if found.lease_id is not None:
            self._store.release(found.lease_id, self._owner)

    def _record(self, state: RequestState, found: Found, local_tokens: int) -> None:
        request = state.request
        hit = found.tokens if found.tokens > local_tokens else 0
        if self._promoter is not None and self._promoter.cut_short(request.request_id):
            why = "host memory had no room for more of what a slower tier holds"
        elif found.limited_by is None:
            why = "it is the longest boundary that leaves one token to compute"
        elif state.found_without:
            why = f"taken without group {found.limited_by!r}, which lacks a block: drafts are recomputed"
        else:
            why = f"group {found.limited_by!r} lacks a block that the next boundary needs"
        if not hit and local_tokens:
            why = f"the engine's own prefix of {local_tokens} tokens is as long; {why}"
        self._meter.count("lookups", 1, "hit" if hit else "miss")
        self.ring.add(
            LookupRecord(request.request_id, request.num_tokens, local_tokens, hit, found.limited_by, why)
        )
