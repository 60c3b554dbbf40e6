"""Pages that lie in slots already are taken over with their recency."""

from __future__ import annotations

import numpy as np

from kvquilt.store import Chain, KnownPages, Store
from unit.store.store_support import Plan, chain_of, full32_window16, present, save


def known(chain: Chain, group: int, blocks: list[int]) -> KnownPages:
    count = len(blocks)
    return KnownPages(
        np.arange(count, dtype=np.int64),
        np.ascontiguousarray(chain.keys(group)[blocks]),
        np.zeros((count, 1 if group == 0 else 0, 4), dtype=np.uint64),
        np.full(count, group, dtype=np.int32),
    )


def test_the_clock_never_goes_back_behind_pages_of_another_arena() -> None:
    """All groups share one clock. Taking over an arena whose pages are old must not set it back, or new
    pages of the others would be older than old ones."""
    layout = full32_window16()
    old, new = chain_of(layout, "abcdefgh"), chain_of(layout, "stuvwxyz")
    with Store(layout, Plan({"full": 8, "win": 8}), prefault="later") as store:
        assert store.adopt(0, known(old, 0, [0, 1]), np.asarray([900, 1000])) == 2
        assert store.adopt(1, known(old, 1, [2, 3]), np.asarray([9, 10])) == 2
        store.provide_memory()
        assert store.now > 1000
        save(store, new, {0: range(4), 1: range(8)})
        store.audit()
        assert (present(store, old, 0), present(store, old, 1)) == ([0, 1], [])
        assert store.stamps(0)[:2].max() < store.stamps(0)[2:6].min()
