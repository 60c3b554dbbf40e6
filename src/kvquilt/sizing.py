"""Byte budget -> slots per group, so that every group covers the same tokens.

Exact: integers and rationals only, and a binary search for the largest number of tokens whose
slots fit. Hits need every group, so a slot beyond the common coverage would be waste.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from kvquilt.errors import SizingError
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.units import format_bytes

__all__ = ["SLOT_ALIGNMENT", "Partition", "SlotPlan", "arena_indices", "plan_slots"]

SLOT_ALIGNMENT = 4096  # direct disk I/O needs offsets and sizes in whole disk blocks
Partition = Literal["solved", "shared_rows"]
_MAX_CHECKPOINTS_TRIED = 1 << 16


@dataclass(frozen=True)
class SlotPlan:
    """How many slots each group gets.

    tokens: tokens that every group covers. slots, slot_bytes: by group name; groups that store
    nothing have 0 of both. slot_bytes: pages of all local ranks, rounded up to the alignment;
    under "shared_rows" that of the one common row. bytes_used <= the budget.
    """

    tokens: int
    slots: dict[str, int]
    slot_bytes: dict[str, int]
    bytes_used: int
    partition: Partition
    num_ranks: int


def arena_indices(layout: CacheLayout, partition: Partition) -> tuple[int, ...]:
    """Arena of each group by index; -1 for groups that store nothing.

    "solved": an arena for each group that stores pages, in order; "shared_rows": one for all.
    """
    indices: list[int] = []
    for group in layout.groups:
        stores = group.cacheable and group.page_bytes > 0
        used = 0 if partition == "shared_rows" else sum(i >= 0 for i in indices)
        indices.append(used if stores else -1)
    return tuple(indices)


@dataclass(frozen=True)
class _Demand:
    """Slots that a group takes to cover T tokens: max(least, ceil(T * density))."""

    group: CacheGroup
    least: int
    density: Fraction
    slot_bytes: int  # of the budget, so with what a slot takes beside its pages

    def slots(self, tokens: int) -> int:
        return max(self.least, -(-tokens * self.density.numerator // self.density.denominator))


def plan_slots(
    layout: CacheLayout,
    budget_bytes: int,
    checkpoint_interval: int | None = None,
    *,
    num_ranks: int = 1,
    partition: Partition = "solved",
    slot_alignment: int = SLOT_ALIGNMENT,
    state_interval: int | None = None,
    slot_overhead_bytes: int = 0,
) -> SlotPlan:
    """Split `budget_bytes` over the groups of `layout`.

    checkpoint_interval: tokens between the checkpoints that are kept; None keeps every block.
    state_interval: the same for recurrent groups, if other than `checkpoint_interval`.
    num_ranks: ranks whose pages one slot holds. partition: "solved" gives each group slots of
    its own size; "shared_rows" makes every slot one row as wide as the widest group's.

    Formula: the largest integer T with sum(S_g(T) * slot_bytes_g) <= budget, where
    S_g(T) = max(min_g, ceil(T * d_g)) (DESIGN.md section 5).

    >>> full = CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=1 << 20)
    >>> win = CacheGroup("win", kind="sliding", tokens_per_block=16, window=32, page_bytes=1 << 19)
    >>> plan = plan_slots(CacheLayout([full, win]), 1 << 30, checkpoint_interval=8192)
    >>> plan.tokens, plan.slots
    (32576, {'full': 1018, 'win': 12})

    Raises SizingError for a bad argument, and for a budget that cannot hold one boundary, with
    the group that takes the most and the least budget that works.
    """
    _check(budget_bytes, checkpoint_interval, state_interval, num_ranks, partition, slot_alignment)
    own = {g.name: _slot_bytes(g, num_ranks, slot_alignment) for g in layout.groups}
    row = max(own.values())
    sizes = own if partition == "solved" else {name: row if size else 0 for name, size in own.items()}
    intervals = {"recurrent": state_interval or checkpoint_interval}
    demands = [
        _demand(g, layout, intervals.get(g.kind, checkpoint_interval), sizes[g.name] + slot_overhead_bytes)
        for g in layout.groups
        if sizes[g.name]
    ]
    if not any(d.density for d in demands):
        raise SizingError("no cache group stores more bytes for more tokens: there is nothing to size")
    _check_least(demands, budget_bytes)
    tokens = _most_tokens(demands, budget_bytes)
    slots = {g.name: 0 for g in layout.groups} | {d.group.name: d.slots(tokens) for d in demands}
    return SlotPlan(tokens, slots, sizes, _bytes_for(demands, tokens), partition, num_ranks)


def _slot_bytes(group: CacheGroup, num_ranks: int, alignment: int) -> int:
    if not group.cacheable:
        return 0
    return -(-group.slot_content_bytes(num_ranks) // alignment) * alignment


def _demand(group: CacheGroup, layout: CacheLayout, interval: int | None, slot_bytes: int) -> _Demand:
    per_block = Fraction(1, group.tokens_per_block)
    peek = int(group.draft)
    if group.dense:
        least = layout.lattice_tokens // group.tokens_per_block + peek
        return _Demand(group, least, per_block, slot_bytes)
    need = _most_needed(group, layout.lattice_tokens) + peek
    if group.kind == "chunked" and not need:  # every boundary starts a chunk; no arena without a slot
        return _Demand(group, 1, Fraction(0), slot_bytes)
    if interval is None:
        return _Demand(group, need, per_block, slot_bytes)
    # A window that starts inside a block, or a checkpoint kept beside the newest one, takes one more.
    slack = int(group.kind == "sliding")
    return _Demand(group, need, min(per_block, Fraction(need + slack, interval)), slot_bytes)


def _most_needed(group: CacheGroup, step: int) -> int:
    """The most blocks that a boundary at a multiple of `step` tokens needs."""
    block = group.tokens_per_block
    if group.kind == "chunked":
        chunk = group.chunk or 1
        if step % chunk == 0:
            return 0
        period = math.lcm(chunk, block)
        count = min(period // math.gcd(step, period), _MAX_CHECKPOINTS_TRIED)
        ends = np.arange(1, count + 1, dtype=np.int64) * step // block * block
    else:
        reach = (group.window or 0) + group.extra_tokens + block
        ends = np.asarray([-(-reach // block) * block], dtype=np.int64)
    lo, hi = needed_blocks(group, ends)
    return int(np.max(hi - lo))


def _check_least(demands: list[_Demand], budget_bytes: int) -> None:
    least = _bytes_for(demands, 0)
    if least <= budget_bytes:
        return
    worst = max(demands, key=lambda d: d.least * d.slot_bytes)
    raise SizingError(
        f"a budget of {format_bytes(budget_bytes)} cannot hold one boundary: cache group "
        f"{worst.group.name!r} alone needs {worst.least} slots of {worst.slot_bytes} bytes; "
        f"the least budget that works is {least} bytes ({format_bytes(least)})",
        least_bytes=least,
    )


def _most_tokens(demands: list[_Demand], budget_bytes: int) -> int:
    low, high = 0, 1
    while _bytes_for(demands, high) <= budget_bytes:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if _bytes_for(demands, middle) <= budget_bytes:
            low = middle
        else:
            high = middle
    return low


def _bytes_for(demands: list[_Demand], tokens: int) -> int:
    return sum(d.slots(tokens) * d.slot_bytes for d in demands)


def _check(
    budget_bytes: int,
    interval: int | None,
    state_interval: int | None,
    num_ranks: int,
    partition: str,
    slot_alignment: int,
) -> None:
    values = {"budget_bytes": budget_bytes, "num_ranks": num_ranks, "slot_alignment": slot_alignment}
    intervals = {"checkpoint_interval": interval, "state_interval": state_interval}
    values |= {name: value for name, value in intervals.items() if value is not None}
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SizingError(f"{name}={value!r}: must be a positive integer")
    if partition not in get_args(Partition):
        raise SizingError(f"partition={partition!r}: allowed are {', '.join(get_args(Partition))}")
