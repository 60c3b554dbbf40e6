"""Keys come from the engine's hashes, one per whole block, and from nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain
from unit.store.store_support import digests, full32_window16


def as_bytes(keys: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in keys]


def test_invariant_7_a_block_is_named_by_the_hash_that_closes_it() -> None:
    hashes = digests("abcdefgh")
    chain = Chain(full32_window16(), hashes)
    assert as_bytes(chain.keys(0)) == [hashes[1], hashes[3], hashes[5], hashes[7]]
    assert as_bytes(chain.keys(1)) == hashes


def test_invariant_8_hashes_past_the_last_whole_block_name_nothing() -> None:
    chain = Chain(full32_window16(), digests("abcdefg"))
    assert (len(chain), chain.num_blocks(0), chain.num_blocks(1)) == (7, 3, 7)
    assert len(chain.keys(0)) == 3


def test_invariant_9_prompts_that_differ_inside_a_block_do_not_share_it() -> None:
    layout = full32_window16()
    one, two = Chain(layout, digests("aaab")), Chain(layout, digests("aaac"))
    assert as_bytes(one.keys(0))[0] == as_bytes(two.keys(0))[0]
    assert as_bytes(one.keys(0))[1] != as_bytes(two.keys(0))[1]
    assert as_bytes(one.keys(1))[2] == as_bytes(two.keys(1))[2]


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 32))
def test_growing_in_steps_equals_making_at_once(steps: list[int], hash_bytes: int) -> None:
    hashes = [digest[:hash_bytes] for digest in digests("x" * sum(steps))]
    chain, done = Chain(full32_window16()), 0
    for step in steps:
        chain.extend(hashes[done : done + step])
        done += step
    assert as_bytes(chain.hashes) == [digest.ljust(32, b"\0") for digest in hashes]
    for i in range(1, len(hashes) + 1):
        assert chain.hash_at(16 * i) == hashes[i - 1]


def test_keys_handed_out_survive_growth() -> None:
    hashes = digests("y" * 100)
    chain = Chain(full32_window16(), hashes[:4])
    keys = chain.keys(1)
    chain.extend(hashes[4:])
    assert as_bytes(keys) == hashes[:4]


def test_groups_that_are_not_cacheable_have_no_keys() -> None:
    layout = CacheLayout(
        [
            CacheGroup("scratch", kind="scratch", tokens_per_block=3, page_bytes=1),
            CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=1),
        ]
    )
    chain = Chain(layout, digests("abc"))
    assert (chain.num_blocks(0), chain.keys(0).shape) == (0, (0, 4))


@pytest.mark.parametrize("hashes", [[b""], [b"x" * 33], [b"ab", b"abc"], [b"abc", b"a", b"abcde"]])
def test_hashes_of_a_wrong_length_are_refused(hashes: list[bytes]) -> None:
    with pytest.raises(ValueError, match="hash"):
        Chain(full32_window16(), hashes)


def test_a_later_hash_of_another_length_is_refused_and_changes_nothing() -> None:
    chain = Chain(full32_window16(), [b"abcd"])
    with pytest.raises(ValueError, match="4 bytes"):
        chain.extend([b"ab", b"abcdef"])
    assert (len(chain), chain.hash_at(16)) == (1, b"abcd")


@pytest.mark.parametrize("tokens", [0, 8, 48, -16])
def test_no_hash_closes_other_lengths(tokens: int) -> None:
    with pytest.raises(ValueError, match="closes"):
        Chain(full32_window16(), digests("ab")).hash_at(tokens)
