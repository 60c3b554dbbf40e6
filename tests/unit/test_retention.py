"""Retention against brute force: what is kept is what some boundary needs, and nothing else."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvquilt import CacheGroup, CacheLayout, longest_hit
from kvquilt.retention import checkpoint_range, prompt_boundaries, wanted_blocks

UNIT = 4


def group(name: str, kind: str, blocks: int, reach: int, extra: int, draft: bool) -> CacheGroup:
    tokens = UNIT * blocks
    if kind == "recurrent":
        return CacheGroup(name, kind="recurrent", tokens_per_block=tokens, page_bytes=1)
    more: dict[str, Any] = {"draft": draft}
    if kind == "sliding":
        more |= {"window": reach, "extra_tokens": extra}
    elif kind == "chunked":
        more |= {"chunk": max(1, reach)}
    return CacheGroup(name, kind=kind, tokens_per_block=tokens, page_bytes=1, **more)


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    kinds = draw(
        st.lists(st.sampled_from(["full", "sliding", "chunked", "recurrent"]), min_size=1, max_size=4)
    )
    return CacheLayout(
        [
            group(
                f"{kind}.{i}",
                kind,
                draw(st.sampled_from([1, 2, 3, 4])),
                draw(st.integers(1, 60)),
                draw(st.integers(0, 9)),
                draw(st.booleans()),
            )
            for i, kind in enumerate(kinds)
        ],
        tokens_per_hash=UNIT,
    )


def first_needed(group: CacheGroup, tokens: int) -> int:
    """The rule in words, written down a second time on purpose."""
    if group.kind == "full":
        return 0
    if group.kind == "sliding":
        assert group.window is not None
        return max(0, tokens - (group.window - 1) - group.extra_tokens)
    if group.kind == "chunked":
        assert group.chunk is not None
        return tokens // group.chunk * group.chunk
    return tokens - group.tokens_per_block


def needed(group: CacheGroup, tokens: int) -> set[int]:
    """Blocks that meet [first, tokens), and the one after for a draft group."""
    if tokens <= 0:
        return set()
    first, size = first_needed(group, tokens), group.tokens_per_block
    blocks = {i for i in range(tokens // size) if (i + 1) * size > first}
    return blocks | ({tokens // size} if group.draft else set())


def kept(layout: CacheLayout, group: CacheGroup, first: int, last: int, **options: Any) -> set[int]:
    mask = wanted_blocks(layout, group, first, last, **options)
    assert mask.shape == (last - first,)
    return {first + int(i) for i in np.flatnonzero(mask)}


@settings(max_examples=400)
@given(layouts(), st.integers(0, 40), st.integers(0, 40))
def test_dense_keeps_exactly_what_some_boundary_needs(layout: CacheLayout, first: int, count: int) -> None:
    last = first + count
    for one in layout.groups:
        end = last * one.tokens_per_block + 2 * layout.lattice_tokens + 200
        boundaries = range(layout.lattice_tokens, end, layout.lattice_tokens)
        wanted = set().union(*(needed(one, boundary) for boundary in boundaries))
        if one.kind == "full":
            wanted = set(range(last))
        assert kept(layout, one, first, last, retention="dense") == {i for i in wanted if first <= i < last}


@settings(max_examples=400)
@given(layouts(), st.integers(1, 700), st.booleans(), st.data())
def test_prompt_end_keeps_exactly_its_boundaries(
    layout: CacheLayout, num_tokens: int, slack: bool, data: st.DataObject
) -> None:
    step = layout.lattice_tokens
    last = (num_tokens - 1) // step * step
    boundaries = prompt_boundaries(layout, num_tokens, slack=slack)
    assert set(boundaries) == {b for b in ((last, last - step) if slack else (last,)) if b > 0}
    first = data.draw(st.integers(0, 40))
    end = first + data.draw(st.integers(0, 60))
    for one in layout.groups:
        wanted = set().union(*(needed(one, b) for b in boundaries)) if one.kind != "full" else set(range(end))
        got = kept(layout, one, first, end, retention="prompt_end", boundaries=boundaries)
        assert got == {i for i in wanted if first <= i < end}


@settings(max_examples=300)
@given(layouts(), st.integers(2, 500), st.booleans())
def test_what_the_writer_keeps_the_reader_finds(layout: CacheLayout, num_tokens: int, slack: bool) -> None:
    """Save one prompt; the same prompt, and with slack one that differs near the end, hit in full."""
    boundaries = prompt_boundaries(layout, num_tokens, slack=slack)
    present = {}
    for one in layout.groups:
        written = num_tokens // one.tokens_per_block
        present[one.name] = kept(layout, one, 0, written, retention="prompt_end", boundaries=boundaries)
    drafts = any(one.draft for one in layout.groups)
    for boundary in boundaries:
        if drafts and boundary + max(g.tokens_per_block for g in layout.groups) > num_tokens:
            continue  # the block that a draft group looks at beyond the boundary is not full yet
        assert longest_hit(layout, present, num_tokens=boundary + 1).tokens == boundary


@settings(max_examples=200)
@given(layouts(), st.sampled_from(["dense", "prompt_end"]), st.integers(0, 500), st.integers(0, 30))
def test_nothing_past_the_end_is_kept(layout: CacheLayout, retention: str, end: int, count: int) -> None:
    """Generated tokens that are not retained: a block that reaches into them is not wanted."""
    boundaries = prompt_boundaries(layout, end, slack=True)
    for one in layout.groups:
        options: dict[str, Any] = {"retention": retention, "boundaries": boundaries}
        every = kept(layout, one, 0, count, **options)
        got = kept(layout, one, 0, count, end_tokens=end, **options)
        assert got == {i for i in every if (i + 1) * one.tokens_per_block <= end}


def test_checkpoint_has_the_peek_block_of_a_draft_group() -> None:
    for draft in (False, True):
        one = CacheGroup("w", kind="sliding", tokens_per_block=16, window=33, page_bytes=1, draft=draft)
        assert checkpoint_range(one, 96) == (4, 6 + draft)


def test_window_blocks_off_the_lattice_are_not_kept() -> None:
    """Full 256, window 128 in blocks of 64: two of four window blocks before each boundary."""
    layout = CacheLayout(
        [
            CacheGroup("full", kind="full", tokens_per_block=256, page_bytes=1),
            CacheGroup("w", kind="sliding", tokens_per_block=64, window=128, page_bytes=1),
        ]
    )
    assert kept(layout, layout.groups[1], 0, 16, retention="dense") == {2, 3, 6, 7, 10, 11, 14, 15}


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_prompt_without_a_boundary_keeps_no_checkpoint(num_tokens: int) -> None:
    layout = CacheLayout([CacheGroup("w", kind="sliding", tokens_per_block=64, window=64, page_bytes=1)])
    assert prompt_boundaries(layout, num_tokens, slack=True) == ()
