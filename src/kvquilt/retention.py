"""Which pages are worth saving: those that make some useful boundary valid, and no others.

Pure logic over `needed_blocks`: the writer keeps what the reader can ask for, by construction.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvquilt.config import Retain
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks

__all__ = ["checkpoint_range", "prompt_boundaries", "wanted_blocks"]

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


def prompt_boundaries(layout: CacheLayout, num_prompt_tokens: int, *, slack: bool) -> tuple[int, ...]:
    """Boundaries where a later prompt can resume in a prompt: its last one, and with `slack`
    the one before it (for a prompt that differs near the end)."""
    last = layout.max_boundary(num_prompt_tokens)
    ends = (last, last - layout.lattice_tokens) if slack else (last,)
    return tuple(end for end in ends if end > 0)


def checkpoint_range(group: CacheGroup, boundary: int) -> tuple[int, int]:
    """Blocks [lo, hi) of `group` to keep for `boundary`, the peek block of a draft group included."""
    lo, hi = needed_blocks(group, boundary)
    return lo, hi + int(group.draft and group.cacheable)


def wanted_blocks(
    layout: CacheLayout,
    group: CacheGroup,
    first: int,
    last: int,
    *,
    retention: Retain,
    boundaries: Iterable[int] = (),
    end_tokens: int | None = None,
) -> BoolArray:
    """Mask over blocks [first, last) of `group`: worth saving?

    boundaries: those that "prompt_end" keeps checkpoints for. end_tokens: blocks that end past
    it are not wanted (generated tokens that are not retained); None for no end.
    """
    if group.dense:
        mask = np.ones(last - first, dtype=np.bool_)
    elif retention == "dense":
        mask = _reachable(layout, group, first, last)
    else:
        mask = np.zeros(last - first, dtype=np.bool_)
        for boundary in boundaries:
            lo, hi = checkpoint_range(group, boundary)
            mask[max(lo - first, 0) : max(hi - first, 0)] = True
    if end_tokens is not None:
        mask[max(end_tokens // group.tokens_per_block - first, 0) :] = False
    return mask


def _reachable(layout: CacheLayout, group: CacheGroup, first: int, last: int) -> BoolArray:
    """Blocks that some lattice boundary needs. Off-lattice window blocks can never be read."""
    step = layout.lattice_tokens
    reach = (group.window or 0) + group.extra_tokens + (group.chunk or 0) + group.tokens_per_block
    start = first * group.tokens_per_block // step * step
    stop = last * group.tokens_per_block + reach + step
    ends: IntArray = np.arange(start, stop + 1, step, dtype=np.int64)
    lo, hi = needed_blocks(group, ends)
    lo, hi = np.asarray(lo), np.asarray(hi) + int(group.draft)
    size = last - first
    edges = np.zeros(size + 1, dtype=np.int64)
    np.add.at(edges, np.clip(lo - first, 0, size), 1)
    np.add.at(edges, np.clip(hi - first, 0, size), -1)
    return np.asarray(np.cumsum(edges[:size]) > 0)
