"""Groups that a hit may do without: what they lack costs the others nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvquilt.layout import CacheGroup, CacheLayout
from unit.store.store_support import chain_of, make_store, present, save_all

LAYOUT = CacheLayout(
    [
        CacheGroup("full", kind="full", tokens_per_block=2, page_bytes=4096),
        CacheGroup("win", kind="sliding", tokens_per_block=1, window=3, page_bytes=4096),
        CacheGroup("drafter", kind="full", tokens_per_block=2, page_bytes=4096),
        CacheGroup("drafter win", kind="sliding", tokens_per_block=1, window=3, page_bytes=4096),
    ]
)
DRAFTERS = ("drafter", "drafter win")


@pytest.mark.parametrize(("optional", "kept"), [(DRAFTERS, range(8)), ((), (0, 1, 2, 3, 6, 7))])
def test_a_lost_page_of_an_optional_group_takes_only_pages_like_it_along(
    optional: tuple[str, ...], kept: range | tuple[int, ...]
) -> None:
    with make_store(LAYOUT, 8, optional=optional) as store:
        chain = chain_of(LAYOUT, "abcdefgh")
        save_all(store, chain)
        store.withdraw(chain, 2, np.array([2]))
        assert present(store, chain, 1) == list(kept)
        assert present(store, chain, 3) == [0, 1, 2, 3, 6, 7]
        hit = store.lookup("me", chain, 9, ignore=optional)
        assert hit.tokens == (8 if optional else 4)


def test_a_full_arena_of_an_optional_group_refuses_nothing_of_the_others() -> None:
    slots = {"full": 4, "win": 8, "drafter": 1, "drafter win": 8}
    with make_store(LAYOUT, slots, optional=DRAFTERS) as store:
        chain = chain_of(LAYOUT, "abcdefgh")
        save_all(store, chain)
        assert present(store, chain, 1) == list(range(8))
        assert len(present(store, chain, 3)) < 8
