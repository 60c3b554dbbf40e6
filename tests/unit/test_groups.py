"""Kinds of cache group, what is refused, and the blocks that a boundary needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvquilt.errors import LayoutError
from kvquilt.layout import CacheGroup, first_needed_token, needed_blocks
from kvquilt.layout.names import group_names


def group(kind: str = "full", block: int = 16, **more: Any) -> CacheGroup:
    return CacheGroup("g", kind=kind, tokens_per_block=block, page_bytes=more.pop("page_bytes", 1), **more)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"block": 0}, "tokens_per_block=0: must be at least 1"),
        ({"block": -16}, "tokens_per_block=-16: must be at least 1"),
        ({"block": 16.0}, r"tokens_per_block=16.0: must be an integer"),
        ({"block": True}, "tokens_per_block=True: must be an integer"),
        ({"page_bytes": -1}, "page_bytes=-1: must be at least 0"),
        ({"kind": "window"}, "kind='window': allowed are full, sliding, chunked, recurrent, scratch"),
        ({"kind": "sliding"}, "window=None: a sliding group needs its window"),
        ({"kind": "sliding", "window": 0}, "window=0: must be at least 1"),
        ({"kind": "chunked"}, "chunk=None: a chunked group needs its chunk"),
        ({"kind": "chunked", "chunk": -8}, "chunk=-8: must be at least 1"),
        ({"kind": "full", "window": 64}, "window=64: only a sliding group has one"),
        ({"kind": "sliding", "window": 64, "chunk": 8}, "chunk=8: only a chunked group has one"),
        ({"kind": "sliding", "window": 64, "extra_tokens": -1}, "extra_tokens=-1: must be at least 0"),
        ({"kind": "full", "extra_tokens": 3}, "extra_tokens=3: only a sliding group"),
        ({"kind": "recurrent", "draft": True}, "draft=True: a recurrent group has no block"),
        ({"kind": "scratch", "draft": True}, "draft=True: a scratch group has no block"),
    ],
)
def test_refused_with_group_value_and_reason(given: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError, match=f"cache group 'g': {told}"):
        group(**given)


def test_scratch_is_never_cacheable() -> None:
    assert not group("scratch", cacheable=True).cacheable


@pytest.mark.parametrize(
    ("made", "boundary", "blocks"),
    [
        (group(), 64, (0, 4)),
        (group("sliding", window=33), 96, (4, 6)),
        (group("sliding", window=32), 96, (4, 6)),
        (group("sliding", window=34), 96, (3, 6)),
        (group("sliding", window=1), 96, (6, 6)),
        (group("sliding", window=2), 96, (5, 6)),
        (group("sliding", window=64), 32, (0, 2)),
        (group("sliding", window=17, extra_tokens=16), 96, (4, 6)),
        (group("sliding", window=17, extra_tokens=17), 96, (3, 6)),
        (group("chunked", chunk=64), 96, (4, 6)),
        (group("chunked", chunk=64), 128, (8, 8)),
        (group("chunked", chunk=24), 32, (1, 2)),
        (group("recurrent"), 96, (5, 6)),
        (group("scratch"), 96, (0, 0)),
        (group(cacheable=False), 96, (0, 0)),
    ],
)
def test_needed_blocks(made: CacheGroup, boundary: int, blocks: tuple[int, int]) -> None:
    assert needed_blocks(made, boundary) == blocks


def test_nothing_is_needed_to_start_from_nothing() -> None:
    for made in (group(), group("sliding", window=9), group("chunked", chunk=9), group("recurrent")):
        assert needed_blocks(made, 0) == (0, 0)


def test_many_boundaries_at_once_equal_one_by_one() -> None:
    ends = np.arange(0, 640, 16, dtype=np.int64)
    for made in (group("sliding", window=100), group("chunked", chunk=48), group("recurrent"), group()):
        lo, hi = needed_blocks(made, ends)
        assert [tuple(x) for x in np.stack([lo, hi], axis=1).tolist()] == [
            needed_blocks(made, int(end)) for end in ends
        ]


def test_draft_does_not_change_the_range() -> None:
    """The peek block is looked up beyond `hi`; it is never restored."""
    assert needed_blocks(group("sliding", window=32, draft=True), 96) == (4, 6)


def test_b25_a_group_needs_what_its_strictest_member_needs() -> None:
    """Invariant 5, field case B25: one windowed and one global layer make a full group."""
    windowed, whole = group("sliding", window=32), group("full")
    assert needed_blocks(windowed, 160) == (8, 10)
    assert needed_blocks(whole, 160) == (0, 10)
    assert first_needed_token(whole, 160) <= first_needed_token(windowed, 160)
    wider = group("sliding", window=64)
    assert first_needed_token(wider, 160) <= first_needed_token(windowed, 160)


def test_b71_a_real_chunk_needs_at_most_its_blocks() -> None:
    ends = np.arange(0, 5 * 8192, 16, dtype=np.int64)
    lo, hi = needed_blocks(group("chunked", chunk=8192), ends)
    assert int(np.max(hi - lo)) == 511
    assert int(np.min(hi - lo)) == 0


def test_b19_every_full_group_is_cut_to_the_joint_length() -> None:
    small, large = group(block=512), group(block=2048)
    assert needed_blocks(small, 2048) == (0, 4)
    assert needed_blocks(large, 2048) == (0, 1)


def test_b32_only_window_tails_before_a_boundary_are_reachable() -> None:
    window, state_like = group("sliding", 64, window=128), group("sliding", 4, window=8)

    def reachable(made: CacheGroup, step: int) -> int:
        found: set[int] = set()
        for end in range(step, 1025, step):
            lo, hi = needed_blocks(made, end)
            found |= set(range(lo, hi + int(made.draft)))
        return len(found)

    assert (reachable(window, 256), reachable(state_like, 256)) == (8, 8)
    assert (reachable(window, 1024), reachable(state_like, 1024)) == (2, 2)
    assert reachable(group("sliding", 64, window=128, draft=True), 256) == 12


def test_names_number_a_kind_only_where_it_repeats() -> None:
    assert group_names([]) == []
    assert group_names(["full"]) == ["full"]
    assert group_names(["full", "chunked", "chunked"]) == ["full", "chunked.0", "chunked.1"]
    assert group_names(["full", "sliding", "full"], [False, True, True]) == [
        "full",
        "draft.sliding",
        "draft.full",
    ]
    assert group_names(["full", "full"], [True, True]) == ["draft.full.0", "draft.full.1"]
