"""Presence of blocks -> the longest boundary that every group can resume from.

Exact for any mix of kinds and block sizes, and linear: a running count of present blocks
per group turns the validity of all boundaries into one comparison per group, then an AND
over the groups (DESIGN.md section 2). No iteration to a fixed point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks

__all__ = ["Hit", "Presence", "boundaries", "longest_hit", "num_probed_blocks", "valid_at"]

Presence = Collection[int] | NDArray[np.bool_]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Hit:
    """tokens: the longest valid boundary. limited_by: the group that kept it from being longer,
    None if it is the longest that the prompt allows."""

    tokens: int
    limited_by: str | None


def boundaries(layout: CacheLayout, num_tokens: int) -> IntArray:
    """All resume lengths > 0 that a prompt of `num_tokens` tokens allows, ascending."""
    step = layout.lattice_tokens
    return np.arange(step, layout.max_boundary(num_tokens) + 1, step, dtype=np.int64)


def num_probed_blocks(group: CacheGroup, tokens: int) -> int:
    """Blocks of `group` whose presence can matter for boundaries up to `tokens` (peek included)."""
    if not group.cacheable:
        return 0
    return tokens // group.tokens_per_block + int(group.draft)


def valid_at(group: CacheGroup, present: Presence, ends: IntArray, local_tokens: int = 0) -> BoolArray:
    """For each boundary in `ends`: are all blocks that `group` needs there present?

    present: block indices, or a bool array by block index (blocks past its end are absent).
    local_tokens: length that the engine holds itself; blocks that end at or before it count
    as present.
    """
    if ends.size == 0 or not group.cacheable or group.page_bytes == 0:
        return np.ones(ends.size, dtype=np.bool_)
    lo, hi = needed_blocks(group, ends)
    hi = hi + int(group.draft)
    # Only blocks that one of the boundaries needs: callers ask about a few late ones of a long prompt.
    base = int(np.min(lo))
    mask = np.zeros(int(np.max(hi)) - base, dtype=np.bool_)
    if isinstance(present, np.ndarray):
        part = present[base : base + mask.size]
        mask[: part.size] = part
    else:
        index = np.fromiter(present, dtype=np.int64) - base
        mask[index[(index >= 0) & (index < mask.size)]] = True
    mask[: max(0, local_tokens // group.tokens_per_block - base)] = True
    count = np.zeros(mask.size + 1, dtype=np.int64)
    np.cumsum(mask, out=count[1:])
    return np.asarray(count[hi - base] - count[lo - base] == hi - lo)


def longest_hit(
    layout: CacheLayout,
    presence: Mapping[str, Presence],
    num_tokens: int,
    *,
    local_tokens: int = 0,
    ignore: Iterable[str] = (),
) -> Hit:
    """The longest boundary <= num_tokens - 1 at which every cacheable group has what it needs.

    presence: group name -> present blocks (see `valid_at`); a missing name means none.
    local_tokens: length that the engine holds itself. ignore: names of groups to leave out
    (draft groups under "best_effort").

    >>> full = CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=1)
    >>> win = CacheGroup("win", kind="sliding", tokens_per_block=16, window=32, page_bytes=1)
    >>> longest_hit(CacheLayout([full, win]), {"full": {0, 1, 2}, "win": {4, 5}}, 97)
    Hit(tokens=96, limited_by=None)
    """
    ends = boundaries(layout, num_tokens)
    skip = set(ignore)
    groups = [g for g in layout.cacheable_groups if g.name not in skip]
    verdicts = [valid_at(g, presence.get(g.name, ()), ends, local_tokens) for g in groups]
    return joint_hit(groups, verdicts, ends)


def joint_hit(groups: list[CacheGroup], verdicts: list[BoolArray], ends: IntArray) -> Hit:
    """Combine per-group validity at `ends` into the joint hit and the group that limits it."""
    if ends.size == 0:
        return Hit(0, None)
    if not verdicts:
        return Hit(int(ends[-1]), None)
    valid = np.array(verdicts, dtype=np.bool_)
    against = len(verdicts) - np.count_nonzero(valid, axis=0)
    best = _last_true(against == 0)
    tokens = int(ends[best]) if best >= 0 else 0
    if best == ends.size - 1:
        return Hit(tokens, None)
    return Hit(tokens, groups[_limiting(valid, against, best)].name)


def _limiting(valid: BoolArray, against: IntArray, best: int) -> int:
    """The group without which the hit would be longest; if no single one lengthens it, the one
    whose own longest hit is shortest. The earlier group wins a tie.

    valid: by group and boundary. against: how many groups are not valid at each boundary.
    best: index of the longest boundary that is valid in all groups.
    """
    alone = np.flatnonzero(against == 1)
    if alone.size and alone[-1] > best:
        return int(np.argmin(valid[:, alone[-1]]))
    return int(np.argmin([_last_true(verdict) for verdict in valid]))


def _last_true(mask: BoolArray) -> int:
    where = np.flatnonzero(mask)
    return int(where[-1]) if where.size else -1
