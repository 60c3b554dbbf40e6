"""Layouts: what is accepted, what is refused and why; hash unit and lattice."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.errors import LayoutError
from kvquilt.layout import CacheGroup, CacheLayout


def full(name: str = "full", block: int = 32, **more: Any) -> CacheGroup:
    return CacheGroup(
        name, kind="full", tokens_per_block=block, page_bytes=more.pop("page_bytes", 64), **more
    )


def win(name: str = "win", block: int = 16, window: int = 32, **more: Any) -> CacheGroup:
    return CacheGroup(
        name,
        kind="sliding",
        tokens_per_block=block,
        window=window,
        page_bytes=more.pop("page_bytes", 64),
        **more,
    )


def state(name: str = "state", block: int = 64) -> CacheGroup:
    return CacheGroup(name, kind="recurrent", tokens_per_block=block, page_bytes=64)


def scratch(name: str = "scratch", block: int = 5) -> CacheGroup:
    return CacheGroup(name, kind="scratch", tokens_per_block=block, page_bytes=64)


def chunked(name: str = "chunked", block: int = 16) -> CacheGroup:
    return CacheGroup(name, kind="chunked", chunk=256, tokens_per_block=block, page_bytes=64)


@pytest.mark.parametrize("groups", [[], [scratch()], [full(cacheable=False)]])
def test_invariant_1_nothing_cacheable_is_refused(groups: list[CacheGroup]) -> None:
    with pytest.raises(LayoutError, match="no cacheable cache group"):
        CacheLayout(groups)


@pytest.mark.parametrize("group", [full(), win(), chunked(), state()])
def test_invariant_1_one_group_of_any_cacheable_kind_is_served(group: CacheGroup) -> None:
    layout = CacheLayout([group])
    assert layout.lattice_tokens == layout.tokens_per_hash == group.tokens_per_block


def test_invariant_2_the_hash_unit_divides_every_cacheable_block() -> None:
    with pytest.raises(
        LayoutError, match=r"'win': tokens_per_block=24: not a multiple of the hash unit of 16"
    ):
        CacheLayout([full(), win(block=24)], tokens_per_hash=16)
    layout = CacheLayout([full(), scratch(block=4), win()], tokens_per_hash=16)
    assert layout.index("win") == 2, "a scratch group keeps its index"
    assert layout.cacheable_groups == (layout.groups[0], layout.groups[2])
    assert layout.lattice_tokens == 32


@pytest.mark.parametrize("unit", [0, -16, 16.0, True, "16"])
def test_a_hash_unit_is_a_positive_integer(unit: Any) -> None:
    with pytest.raises(LayoutError, match="tokens_per_hash"):
        CacheLayout([full()], tokens_per_hash=unit)


def test_invariant_3_dense_groups_anywhere_several_or_none() -> None:
    CacheLayout([win("a"), win("b", window=64), full()])
    CacheLayout([full("a", 32), win(), full("b", 48)])
    CacheLayout([win(), state()])
    CacheLayout([win(f"w{i}", window=16 * (i + 1)) for i in range(8)])


def test_invariant_4_names_and_layers_are_unique() -> None:
    with pytest.raises(LayoutError, match="'full': the name is used twice"):
        CacheLayout([full(), full()])
    with pytest.raises(LayoutError, match=r"'win': layer 'l\.3' already belongs to group 'full'"):
        CacheLayout([full(layers=("l.0", "l.3")), win(layers=("l.3",))])


def test_the_hash_unit_defaults_to_the_gcd_and_the_lattice_is_the_lcm() -> None:
    layout = CacheLayout([full(block=48), win(block=32), state(block=80), scratch()])
    assert layout.tokens_per_hash == 16
    assert layout.lattice_tokens == 480


def test_sliding_blocks_may_be_smaller_or_larger_than_dense_ones() -> None:
    assert CacheLayout([full(block=32), win(block=16)]).lattice_tokens == 32
    assert CacheLayout([full(block=32), win(block=64)]).lattice_tokens == 64


def test_b31_the_coarsest_group_sets_the_grid() -> None:
    groups = [full(f"g{b}", b) for b in (128, 4096, 32, 2, 8)]
    assert CacheLayout(groups).lattice_tokens == 4096
    assert CacheLayout(groups).max_boundary(2048) == 0
    assert CacheLayout([full("a", 128), state(block=128)]).max_boundary(2048) == 1920


def test_invariant_16_one_token_is_left_to_compute() -> None:
    layout = CacheLayout([full(block=32)])
    assert [layout.max_boundary(n) for n in (0, 1, 32, 33, 64, 65)] == [0, 0, 0, 32, 32, 64]


def test_invariant_7_the_hash_that_closes_a_block_names_it() -> None:
    layout = CacheLayout([full(block=32), win(block=16)], tokens_per_hash=16)
    hashes = [f"h{i}" for i in range(8)]

    def keys(group: CacheGroup) -> list[str]:
        per_block = layout.hashes_per_block(group)
        return [hashes[(i + 1) * per_block - 1] for i in range(len(hashes) // per_block)]

    assert keys(layout.groups[0]) == ["h1", "h3", "h5", "h7"]
    assert keys(layout.groups[1]) == hashes


def test_b69_b72_page_sizes_need_not_divide() -> None:
    """Per-head scales: 8,320 and 4,128 bytes a token; and 1,000 / 1,536 / 4,096 bytes a page."""
    assert 16 * (256 + 256) + 16 * 2 * 4 == 8320
    assert 4 * (512 + 512) + 4 * 2 * 4 == 4128
    layout = CacheLayout([win(page_bytes=16 * 8320), full(page_bytes=32 * 4128)])
    assert [g.page_bytes for g in layout.groups] == [133_120, 132_096]
    CacheLayout([full("a", page_bytes=1000), win(page_bytes=1536), full("b", page_bytes=4096)])


def test_b74_zero_byte_pages_are_accepted() -> None:
    assert CacheLayout([full(page_bytes=0), win()]).lattice_tokens == 32


def test_index_of_an_unknown_group() -> None:
    with pytest.raises(KeyError):
        CacheLayout([full()]).index("win")
