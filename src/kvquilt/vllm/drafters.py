"""Drafters' blocks without real content: never saved as if they had any."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheLayout, needed_blocks
from kvquilt.vllm.requests import RequestState

__all__ = ["HollowBlocks"]

IntArray = NDArray[np.int64]
_MOST = 1 << 16


class HollowBlocks:
    """Remembers which blocks of drafters' own groups were filled with zeros, or computed after such
    ones, because a hit was taken without the drafter's pages. The engine offers them to later
    requests as a local hit: harmless, since the target verifies every draft, but not worth keeping.

    drafters: indices of the groups concerned.
    """

    def __init__(self, layout: CacheLayout, drafters: Iterable[int]) -> None:
        self.groups = frozenset(drafters)
        self._layout = layout
        # Hashes that close such blocks, oldest first.
        self._hollow: OrderedDict[bytes, None] = OrderedDict()

    def without(self, state: RequestState, index: int, blocks: IntArray) -> IntArray:
        """`blocks` of a drafter's group, less the hollow ones."""
        if not blocks.size or not (state.hollow or self._hollow):
            return blocks
        keys = [key.tobytes() for key in state.chain.keys(index)[blocks]]
        state.hollow = state.hollow or self._builds_on_hollow(state, index)
        if state.hollow:
            self._hollow.update(dict.fromkeys(keys))
            while len(self._hollow) > _MOST:
                self._hollow.popitem(last=False)
            return blocks[:0]
        own = blocks * self._layout.groups[index].tokens_per_block >= state.computed_from
        for key, is_own in zip(keys, own, strict=True):
            if is_own:  # computed anew, from the start
                self._hollow.pop(key, None)
        return blocks[[key not in self._hollow for key in keys]]

    def _builds_on_hollow(self, state: RequestState, index: int) -> bool:
        """Did this admission begin with a local hit on such blocks, so that all it computes is like them?"""
        group = self._layout.groups[index]
        lo, hi = needed_blocks(group, state.computed_from // group.tokens_per_block * group.tokens_per_block)
        return any(key.tobytes() in self._hollow for key in state.chain.keys(index)[lo:hi])
