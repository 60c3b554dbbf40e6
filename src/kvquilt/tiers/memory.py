"""The pools of a `Store` as memory of this process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvquilt.store import Chain, Store, map_memory
from kvquilt.tiers.base import Pages

__all__ = ["RamMemory"]


class RamMemory:
    """Maps the store's arenas. Addresses only: memory comes with the first touch."""

    def __init__(self, store: Store) -> None:
        self._arena_of = store.arena_of
        self._strides = [arena.slot_stride for arena in store.arenas]
        self._maps = [map_memory(arena.fd, arena.num_slots * arena.slot_stride) for arena in store.arenas]

    def pages(self, chain: Chain, group: int, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> Pages:
        """Block blocks[i] of the group, as it lies in slots[i] of its arena."""
        arena = self._arena_of[group]
        return Pages(chain, group, blocks, self._maps[arena], slots * self._strides[arena])

    def close(self) -> None:
        """Let the memory go, as soon as nobody holds pages of it any more. May be called twice."""
        self._maps = []

    def slot(self, arena: int, slot: int) -> memoryview:
        """The bytes of one slot."""
        stride = self._strides[arena]
        return self._maps[arena][slot * stride : (slot + 1) * stride]
