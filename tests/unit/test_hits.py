"""The longest hit: named cases from the field, each with its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvquilt.hits import Hit, boundaries, longest_hit, num_probed_blocks, valid_at
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks


def full(block: int = 16, name: str = "full", **more: Any) -> CacheGroup:
    return CacheGroup(name, kind="full", tokens_per_block=block, page_bytes=1, **more)


def win(window: int, block: int = 16, name: str = "win", **more: Any) -> CacheGroup:
    return CacheGroup(name, kind="sliding", window=window, tokens_per_block=block, page_bytes=1, **more)


def state(block: int, name: str = "state") -> CacheGroup:
    return CacheGroup(name, kind="recurrent", tokens_per_block=block, page_bytes=1)


def tokens(groups: list[CacheGroup], presence: Mapping[str, Any], num_tokens: int, **more: Any) -> int:
    return longest_hit(CacheLayout(groups), presence, num_tokens, **more).tokens


@pytest.mark.parametrize(
    ("windows", "first", "second", "expected"),
    [
        ((3, 4), {3, 4}, {1, 2, 3}, 0),
        ((3, 4), {2, 3, 4}, {1, 2, 3}, 4),
        ((2, 3), {3, 4}, {1, 2, 3}, 4),
        ((2, 3), {3, 4}, {0, 1}, 0),
    ],
)
def test_b1_two_windows_and_no_monotonic_hits(
    windows: tuple[int, int], first: set[int], second: set[int], expected: int
) -> None:
    groups = [full(1), win(windows[0], 1, "a"), win(windows[1], 1, "b")]
    assert tokens(groups, {"full": set(range(5)), "a": first, "b": second}, 6) == expected


def test_b3_the_peek_block_is_checked_with_the_window() -> None:
    groups = [full(2), win(4, 2, draft=True)]
    have = {"full": {0, 1, 2, 3}}
    assert tokens(groups, have | {"win": {2, 3}}, 9) == 0
    assert tokens(groups, have | {"win": {1, 2, 3}}, 9) == 6


def test_b4_the_draft_block_is_given_up_once() -> None:
    groups = [full(1), win(3, 1, "a"), win(5, 1, "b", draft=True)]
    assert tokens(groups, {g.name: set(range(10)) for g in groups}, 11) == 9


def test_b5_a_writer_must_keep_what_the_reader_asks_for() -> None:
    groups = [full(256), win(128, 64, draft=True)]
    have = {"full": set(range(4))}
    tails = {2, 3, 6, 7, 10, 11, 14, 15}
    peeks = {4, 8, 12}
    assert tokens(groups, have | {"win": tails}, 1025) == 0
    assert tokens(groups, have | {"win": tails | peeks}, 1025) == 768
    assert tokens(groups, have | {"win": tails | peeks | {16}}, 1100) == 1024


def test_b7_a_state_that_holds_the_last_token_is_not_replayed() -> None:
    groups = [full(256), state(256)]
    have = {"full": {0, 1}, "state": {0, 1}}
    assert tokens(groups, have, 512) == 256
    assert tokens(groups, have, 513) == 512


def test_b8_only_real_snapshots_count() -> None:
    groups = [full(256), state(256)]
    assert tokens(groups, {"full": {0, 1, 2}, "state": set()}, 1000) == 0
    assert tokens(groups, {"full": {0, 1, 2, 3}, "state": {3}}, 1025) == 1024
    coarse = [full(256), state(2048)]
    have = {"full": set(range(32)), "state": {0, 1, 2, 3}}
    assert tokens(coarse, have, 8192) == 6144
    assert tokens(coarse, have, 8193) == 8192


def test_b9_attention_without_its_state_is_no_hit() -> None:
    layout = CacheLayout([full(16), state(16)])
    assert longest_hit(layout, {"full": set(range(8))}, 200) == Hit(0, "state")


def test_b14_a_hole_ends_a_run() -> None:
    live = {0, 1, 2, 3, 6, 7, 8, 10, 11}  # the last four tokens must be live: a window of five
    assert tokens([full(1), win(5, 1)], {"full": set(range(12)), "win": live}, 13) == 4


def test_b19_a_window_cuts_all_full_groups() -> None:
    groups = [full(512, "a"), full(2048, "b"), win(512, 512)]
    have = {"a": set(range(8)), "b": {0, 1}, "win": {3}}
    assert tokens(groups, have, 5000) == 2048
    assert needed_blocks(groups[0], 2048) == (0, 4)
    assert needed_blocks(groups[1], 2048) == (0, 1)


def test_b31_one_dropped_draft_block_on_a_coarse_grid() -> None:
    groups = [full(128, draft=True), state(16384)]
    have = {"full": set(range(256)), "state": {0, 1}}
    assert tokens(groups, have, 40_000) == 16_384  # 32,640 rounded down to the grid
    assert tokens(groups, have | {"full": set(range(257))}, 40_000) == 32_768


@pytest.mark.parametrize(
    ("evicted", "expected"), [({0, 1, 2, 3}, 96), ({0, 1, 5}, 80), ({4, 5}, 64), ({2, 3, 4, 5}, 32)]
)
def test_b37_what_evicted_window_blocks_cost(evicted: set[int], expected: int) -> None:
    have = {"full": set(range(6)), "win": set(range(6)) - evicted}
    assert tokens([full(), win(33)], have, 97) == expected


def test_b71_chunked_needs_its_own_chunk_only() -> None:
    local = CacheGroup("local", kind="chunked", chunk=8, tokens_per_block=2, page_bytes=1)
    groups = [full(2), local]
    assert tokens(groups, {"full": set(range(7)), "local": {4}}, 14) == 10
    assert tokens(groups, {"full": set(range(7))}, 14) == 8
    as_window = [full(2), win(8, 2, "local")]
    assert tokens(as_window, {"full": set(range(7)), "local": {4}}, 14) == 0


def test_b76_window_groups_first_full_last_and_nulls_before_the_tail() -> None:
    """Invariant 14: a saved tail alone serves the whole hit."""
    groups = [*(win(33, name=f"w{i}") for i in range(5)), full()]
    have = {f"w{i}": {4, 5} for i in range(5)} | {"full": set(range(6))}
    assert tokens(groups, have, 97) == 96


def test_b86_one_dropped_block_of_a_giant_one() -> None:
    groups = [full(1536, draft=True), state(1536)]
    have = {"full": {0, 1, 2}}
    assert tokens(groups, have | {"state": {2}}, 4609) == 0
    assert tokens(groups, have | {"state": {1, 2}}, 4609) == 3072
    apart = [full(1536), state(1536), win(128, 64, "draft", draft=True)]
    have |= {"state": {1, 2}, "draft": set(range(72))}
    assert tokens(apart, have, 4700) == 3072
    assert tokens(apart, have | {"draft": set(range(73))}, 4700) == 4608


def test_b87_hits_are_as_fine_as_the_lattice() -> None:
    """A tail entry inside the coarse group's block is not a block: 3,968, not 4,000."""
    groups = [full(16), state(16), win(2048, 64)]
    have = {"full": set(range(250)), "state": set(range(250)), "win": set(range(62))}
    assert tokens(groups, have, 4001) == 3968
    fine = [full(16), state(16), win(2048, 16)]
    have["win"] = set(range(1953 // 16, 250))
    assert tokens(fine, have, 4001) == 4000


def test_invariant_13_only_what_the_engine_lacks_of_a_window() -> None:
    groups = [full(32), win(96, 16)]
    hit = longest_hit(CacheLayout(groups), {"full": {2}, "win": {4, 5}}, 97, local_tokens=64)
    assert hit.tokens == 96
    lo, hi = needed_blocks(groups[1], 96)
    assert [i for i in range(lo, hi) if (i + 1) * 16 > 64] == [4, 5]


def test_invariant_15_partial_hit_shrinks_to_the_last_common_boundary() -> None:
    groups = [full(32), win(32, 16)]
    dense = {"full": {0, 1, 2, 3}}
    assert tokens(groups, dense | {"win": {6, 7}}, 129) == 128
    assert tokens(groups, dense | {"win": {4, 5, 6}}, 129) == 96
    two = [state(1, "a"), state(1, "b")]
    assert tokens(two, {"a": {3, 1}, "b": {2, 1}}, 6) == 2


def test_invariant_12_probes_end_with_the_boundary() -> None:
    assert num_probed_blocks(full(32), 96) == 3
    assert num_probed_blocks(full(32, draft=True), 96) == 4
    scratch = CacheGroup("s", kind="scratch", tokens_per_block=7, page_bytes=1)
    assert num_probed_blocks(scratch, 96) == 0


def test_invariant_16_never_the_whole_prompt() -> None:
    have = {"full": set(range(10))}
    assert [tokens([full(16)], have, n) for n in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 16, 16, 32]


def test_invariant_10_asking_twice_answers_the_same() -> None:
    layout = CacheLayout([full(32), win(32, 16)])
    have = {"full": {0, 1, 2}, "win": {4, 5}}
    assert longest_hit(layout, have, 97) == longest_hit(layout, have, 97) == Hit(96, None)


def test_the_limiting_group_is_named() -> None:
    layout = CacheLayout([full(), win(33)])
    assert longest_hit(layout, {"full": {0, 1}, "win": set(range(6))}, 97) == Hit(32, "full")
    assert longest_hit(layout, {"full": set(range(6)), "win": {2, 3}}, 97) == Hit(64, "win")
    assert longest_hit(layout, {}, 97).tokens == 0


def test_zero_byte_and_scratch_groups_never_limit() -> None:
    empty = CacheGroup("empty", kind="full", tokens_per_block=16, page_bytes=0)
    scratch = CacheGroup("scratch", kind="scratch", tokens_per_block=5, page_bytes=9)
    assert tokens([empty, scratch, full()], {"full": {0, 1}}, 40) == 32


def test_boundaries_and_validity_of_each() -> None:
    layout = CacheLayout([full(), win(17)])
    ends = boundaries(layout, 65)
    assert ends.tolist() == [16, 32, 48, 64]
    assert valid_at(layout.groups[1], {0, 2}, ends).tolist() == [True, False, True, False]
    mask = np.array([True, False, True])
    assert valid_at(layout.groups[1], mask, ends).tolist() == [True, False, True, False]
    assert valid_at(layout.groups[1], {2}, ends, local_tokens=31).tolist() == [True, False, True, False]
    assert boundaries(layout, 16).size == 0
