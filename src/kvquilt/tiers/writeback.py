"""Copies pages from host RAM to the tier below, behind everybody's back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import KVQuiltError
from kvquilt.layout import CacheLayout
from kvquilt.sizing import Partition, arena_indices
from kvquilt.store import Chain, Store, Want, span_steps
from kvquilt.tiers.base import Tier
from kvquilt.tiers.memory import RamMemory

__all__ = ["WriteBack"]

_OWNER = "write-back"
_MOST_AHEAD = 8192
_NEAR_THE_END = 8  # pages within this part of a pool of being evicted are about to leave RAM


class WriteBack:
    """Hears of every commit, and offers pages to the tier while a lease keeps them where they are.

    when: "through": at once; "evicted": when they are about to be evicted, so only those that leave RAM.
    Pages whose chain is not durable stay in RAM (`not_durable` counts them). A page that is not accepted
    is dropped: the tier counts it; one that was evicted before it could be offered is in
    `left_unwritten`. Used by whoever commits, on one thread; leases end on the tier's threads.
    """

    def __init__(
        self,
        store: Store,
        tier: Tier,
        layout: CacheLayout,
        memory: RamMemory,
        *,
        partition: Partition,
        when: Literal["through", "evicted"],
    ) -> None:
        self._store = store
        self._tier = tier
        self._layout = layout
        self._memory = memory
        self._when = when
        self._arena_of = arena_indices(layout, partition)
        self._steps = span_steps(layout)
        self.not_durable = 0
        # Slots whose page need not be written: it was, or may not be. New pages clear the mark.
        self._settled = [np.zeros(arena.num_slots, dtype=np.bool_) for arena in store.arenas]
        self.left_unwritten = 0
        self._leases: set[int] = set()  # the tier's threads take out what has ended
        store.register_owner(_OWNER, live=True)
        if when == "evicted":
            store.watch_evictions(self._evicted)

    def committed(self, wants: Sequence[Want]) -> None:
        """These pages have become visible in RAM."""
        if self._when == "through":
            for want in wants:
                if want.chain.durable:
                    self._offer(want.chain, want.group, want.blocks)
                else:
                    self.not_durable += want.blocks.size
            return
        for want in wants:
            self._mark(want)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Slots have been taken: under "evicted", write what would be evicted next.

        Dense pages take the windows and states that need them along, from pools that may be far from full.
        So whatever is as old as the pages near their end is written, in all pools.
        """
        if self._when != "evicted":
            return
        until = max(map(self._near_the_end, range(len(self._settled))), default=-1)
        if until >= 0:
            for arena in range(len(self._settled)):
                self._write_oldest(arena, until)

    def _evicted(self, arena: int, slots: NDArray[np.int64]) -> None:
        self.left_unwritten += int(np.count_nonzero(~self._settled[arena][slots]))

    def _offer(self, chain: Chain, group: int, blocks: NDArray[np.int64]) -> None:
        lease_id, held, slots = self._store.lease_blocks(_OWNER, chain, group, blocks)
        if lease_id is not None:
            self._leases.add(lease_id)
            pages = self._memory.pages(chain, group, held, slots)
            self._tier.save([pages], lambda: self._release(lease_id))

    def holds_slots(self) -> bool:
        """Are pages being written? Until they are, they can't make room for others."""
        return bool(self._leases)

    def _release(self, lease_id: int) -> None:
        self._leases.discard(lease_id)
        with contextlib.suppress(KVQuiltError):  # the store is closed
            self._store.release(lease_id, _OWNER)

    def _mark(self, want: Want) -> None:
        lease_id, _, slots = self._store.lease_blocks(_OWNER, want.chain, want.group, want.blocks)
        if lease_id is None:
            return
        self._store.release(lease_id, _OWNER)
        self._settled[self._arena_of[want.group]][slots] = not want.chain.durable
        if not want.chain.durable:
            self.not_durable += slots.size

    def _near_the_end(self, arena: int) -> int:
        """Once a pool is nearly full: the store's clock up to which its pages would be evicted next; -1."""
        near = self._near(arena)
        if self._store.free_slots(arena) > near:
            return -1
        return self._store.oldest_until(arena, near)

    def _near(self, arena: int) -> int:
        """How many pages from its eviction a page counts as near."""
        return max(1, min(_MOST_AHEAD, self._settled[arena].size // _NEAR_THE_END))

    def _write_oldest(self, arena: int, until: int) -> None:
        """Write what has not been touched since and has not been written, as far as the tier has room: the
        rest is offered the next time."""
        slots = self._store.oldest(arena, self._settled[arena].size, before=until + 1)
        fresh = slots[~self._settled[arena][slots]]
        fresh = fresh[: self._tier.room_bytes() // self._store.arenas[arena].slot_stride]
        if not fresh.size:
            return
        self._settled[arena][fresh] = True
        known = self._store.known_pages(arena, fresh)
        for group in np.unique(known.group).tolist():
            chosen = known.group == group
            step = self._steps.get(group, 0)
            chain = Chain.of_pages(self._layout, group, known.keys[chosen], known.spans[chosen], step)
            self._offer(chain, group, np.arange(int(chosen.sum()), dtype=np.int64))
