"""Local hits of the full-attention groups that run ahead of the engine's recurrent states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvquilt.layout import CacheLayout
from kvquilt.vllm.lookups import Finder
from kvquilt.vllm.requests import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

__all__ = ["DivergentHits"]


class DivergentHits:
    """Decides how the engine is to ask. Running ahead, it asks with all that its full groups hold,
    and a state of ours beyond that completes the hit with the fewest bytes to load. But if we have
    no state beyond it and one below, then that answer could not be given: the engine has to ask
    that request again with what all its groups hold.

    Only for models of one full group and recurrent ones: the engine tells how far its first full group
    is, and elsewhere windows, or another full group, could be behind.
    """

    def __init__(self, finder: Finder, layout: CacheLayout, *, wanted: bool) -> None:
        self._finder = finder
        kinds = [group.kind for group in layout.cacheable_groups]
        self._possible = wanted and set(kinds) == {"full", "recurrent"} and kinds.count("full") == 1
        self._asking_again: set[str] = set()
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Learn of the engine's cache manager."""
        self._manager = manager

    @property
    def may_run_ahead(self) -> bool:
        """Read by the engine before each look-up."""
        return self._possible and not self._asking_again

    def ask_again(self, state: RequestState, local_tokens: int) -> bool:
        """Nothing lies beyond `local_tokens`: is the engine to ask again, with less?"""
        request_id = state.request.request_id
        if request_id in self._asking_again:
            self._asking_again.discard(request_id)
            return False
        if not self._possible or not local_tokens or self._manager is None:
            return False
        if state.behind_checked == local_tokens:
            return False
        state.behind_checked = local_tokens
        below = self._finder.below(state, local_tokens)
        if not below or below <= self._manager.get_computed_blocks(state.request)[1]:
            return False
        self._asking_again.add(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """The request has been answered, or has ended."""
        self._asking_again.discard(request_id)
