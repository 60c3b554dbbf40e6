"""Slots of the arenas by key, in bulk, with their recency: the data behind `Store`.

One `Slots` record per arena, and per cacheable group a `GroupIndex`, which names keys of that
group only: equal hashes in two groups are two keys, also where groups share an arena.
Everything here is guarded by the store's lock. A slot costs 48-60 bytes for key and index
(plus 32 per dense slot and finer checkpoint end inside its block) and 25 for recency, state and leases.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import kernels
from kvquilt.store.chain import Chain
from kvquilt.store.kernels import Slots

__all__ = ["GroupIndex", "Orphaning", "new_slots", "orphaning_rules", "span_steps"]

IntArray = NDArray[np.int64]


def new_slots(num_slots: int, span_keys: int, clock: IntArray, pages: IntArray) -> Slots:
    """State of an arena of `num_slots` slots, none of them usable yet."""
    meta = np.zeros(kernels.META_SIZE, dtype=np.int64)
    meta[[kernels.OLDEST, kernels.NEWEST]] = -1
    capacity = 1 << max(4, math.ceil(math.log2(num_slots * 1.5)))
    return Slots(
        keys=np.zeros((num_slots, 4), dtype=np.uint64),
        group=np.zeros(num_slots, dtype=np.int32),
        state=np.zeros(num_slots, dtype=np.uint8),
        pins=np.zeros(num_slots, dtype=np.int32),
        older=np.zeros(num_slots, dtype=np.int32),
        newer=np.zeros(num_slots, dtype=np.int32),
        stamp=np.zeros(num_slots, dtype=np.int64),
        span=np.zeros((num_slots, span_keys, 4), dtype=np.uint64),
        table=np.zeros(capacity, dtype=np.uint64),
        free=np.zeros(num_slots, dtype=np.int32),
        meta=meta,
        clock=clock,
        pages=pages,
    )


@dataclass(frozen=True, eq=False)
class GroupIndex:
    """One cacheable group's keys in its arena.

    index: the group's index in the layout. arena: its arena's. span_step: dense groups: distance
    in hashes between the hashes kept inside a block, 0 if none is kept.
    """

    group: CacheGroup
    index: int
    arena: int
    slots: Slots
    hashes_per_block: int
    span_step: int

    def prefix(self, chain: Chain, first: int, last: int) -> IntArray:
        """Slots of the visible blocks from `first` up to the first hole, at most up to `last`."""
        last = min(last, chain.num_blocks(self.index))
        out = np.empty(max(0, last - first), dtype=np.int64)
        count = kernels.probe_prefix(
            self.slots, self.index, chain.hashes, self.hashes_per_block, first, last, out
        )
        return out[: max(0, count)]

    def probe(self, chain: Chain, first: int, last: int) -> tuple[IntArray, int]:
        """Slots of blocks first..last-1, -1 where nothing is visible, and how many are."""
        out = np.empty(max(0, last - first), dtype=np.int64)
        hashed = min(last, chain.num_blocks(self.index))
        if hashed < last:
            out[max(0, hashed - first) :] = -1
        count = kernels.probe(self.slots, self.index, chain.hashes, self.hashes_per_block, first, hashed, out)
        return out, count

    def all_visible(self, chain: Chain, lo: IntArray, hi: IntArray, held: int) -> NDArray[np.bool_]:
        """For each i: are all of blocks lo[i]..hi[i]-1 visible, or before block `held`? lo, hi: ascending."""
        out = np.empty(lo.size, dtype=np.bool_)
        hashed = chain.num_blocks(self.index)
        kernels.all_visible(
            self.slots, self.index, chain.hashes, self.hashes_per_block, held, hashed, lo, hi, out
        )
        return out

    def find(self, chain: Chain, blocks: IntArray) -> IntArray:
        """Slots of these blocks' visible pages, -1 where there is none."""
        out = np.empty(blocks.size, dtype=np.int64)
        kernels.find(self.slots, self.index, chain.hashes, self.hashes_per_block, blocks, out)
        return out

    def states(self, chain: Chain, blocks: IntArray) -> NDArray[np.uint8]:
        """kernels.FREE (missing), TICKETED or RESIDENT for each block."""
        out = np.empty(blocks.size, dtype=np.uint8)
        kernels.states(self.slots, self.index, chain.hashes, self.hashes_per_block, blocks, out)
        return out

    def touch(self, chain: Chain, first: int, last: int) -> None:
        """Make the visible ones of blocks first..last-1 the newest, the last the oldest among them."""
        last = min(last, chain.num_blocks(self.index))
        if first >= last:
            return
        kernels.touch_blocks(self.slots, self.index, chain.hashes, self.hashes_per_block, first, last)


@dataclass(frozen=True, eq=False)
class Orphaning:
    """When a page of `dense` goes, pages of `other` that end inside its block go too."""

    dense: GroupIndex
    other: GroupIndex
    inner: int
    after: int

    def apply(self, lost: IntArray) -> IntArray:
        """Free what the loss of these slots of the dense group orphans; the slots of the pages that went."""
        gone = np.empty(lost.size * (self.inner + 1), dtype=np.int64)
        count = kernels.withdraw_orphans(
            self.dense.slots,
            lost,
            self.inner,
            self.dense.span_step,
            self.other.slots,
            self.other.index,
            self.after,
            gone,
        )
        return gone[:count]


def span_steps(layout: CacheLayout) -> dict[int, int]:
    """Dense group index -> distance in hashes between the possible ends of other groups' pages."""
    others = [layout.hashes_per_block(g) for g in layout.cacheable_groups if not g.dense and g.page_bytes > 0]
    return {
        i: math.gcd(layout.hashes_per_block(g), *others) if others else 0
        for i, g in enumerate(layout.groups)
        if g.cacheable and g.dense and g.page_bytes > 0
    }


def orphaning_rules(views: list[GroupIndex], optional: Collection[str]) -> dict[int, list[Orphaning]]:
    """For each dense group's index, what its losses orphan.

    A page that ends inside a lost dense block can serve no boundary any more, as every boundary
    at or after its end needs that block. Exceptions: a draft group's page may be the peek block
    of a boundary before the lost block's start, and an optional dense group orphans pages of
    optional groups only, since a hit may do without all of them.
    """
    rules: dict[int, list[Orphaning]] = {}
    for dense in views:
        if not dense.group.dense or not dense.span_step:
            continue
        inner = dense.hashes_per_block // dense.span_step - 1
        rules[dense.index] = [
            Orphaning(dense, other, inner, other.hashes_per_block if other.group.draft else 0)
            for other in views
            if not other.group.dense and (other.group.name in optional or dense.group.name not in optional)
        ]
    return rules
