"""A layout and a plan -> arenas, their slots, and one index per cacheable group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvquilt.errors import SizingError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.sizing import Partition, arena_indices
from kvquilt.store.index import GroupIndex, new_slots, span_steps
from kvquilt.store.kernels import Slots
from kvquilt.store.pool import Arena, SlotSpace
from kvquilt.store.records import SlotPlanLike

__all__ = ["ArenaMaker", "Arenas", "arena_span_keys", "build_arenas"]

ArenaMaker = Callable[[int, str, int, int], SlotSpace]
"""(index, name, number of slots, slot stride) -> an arena."""


@dataclass(frozen=True, eq=False)
class Arenas:
    """arena_of: group index -> arena index, -1 for a group that keeps no pages. views: by group index."""

    arenas: tuple[SlotSpace, ...]
    slots: tuple[Slots, ...]
    arena_of: tuple[int, ...]
    views: dict[int, GroupIndex]


def build_arenas(
    layout: CacheLayout, plan: SlotPlanLike, num_ranks: int, make_arena: ArenaMaker = Arena
) -> Arenas:
    """One arena per group that keeps pages ("solved"), or one that all share ("shared_rows").

    Raises SizingError, with the group, for a plan that does not fit the layout or the ranks;
    arenas that were made before are closed.
    """
    kept = [i for i, g in enumerate(layout.groups) if g.cacheable and g.page_bytes > 0]
    if plan.num_ranks != num_ranks:
        raise SizingError(f"the plan is for {plan.num_ranks} ranks, the store for {num_ranks}")
    for i in kept:
        _check_group(layout.groups[i], plan, num_ranks)
    if plan.partition == "solved":
        sizes = [
            (g.name, plan.slots[g.name], plan.slot_bytes[g.name]) for g in (layout.groups[i] for i in kept)
        ]
        members = [[i] for i in kept]
    elif plan.partition == "shared_rows":
        rows = sum(plan.slots[layout.groups[i].name] for i in kept)
        stride = max((plan.slot_bytes[layout.groups[i].name] for i in kept), default=0)
        sizes = [("rows", rows, stride)] if kept else []
        members = [kept] if kept else []
    else:
        raise SizingError(f'partition {plan.partition!r}: allowed are "solved", "shared_rows"')
    arenas: list[SlotSpace] = []
    try:
        for index, (name, num_slots, stride) in enumerate(sizes):
            arenas.append(make_arena(index, name, num_slots, stride))
    except BaseException:
        for arena in arenas:
            arena.close()
        raise
    return _with_indexes(layout, tuple(arenas), members)


def _with_indexes(layout: CacheLayout, arenas: tuple[SlotSpace, ...], members: list[list[int]]) -> Arenas:
    clock = np.zeros(1, dtype=np.int64)
    pages = np.zeros(len(layout.groups), dtype=np.int64)
    steps = span_steps(layout)
    arena_of = [-1] * len(layout.groups)
    views: dict[int, GroupIndex] = {}
    slots: list[Slots] = []
    for arena, inside in zip(arenas, members, strict=True):
        per_block = {i: layout.hashes_per_block(layout.groups[i]) for i in inside}
        span_keys = _span_keys(layout, steps, inside)
        slots.append(new_slots(arena.num_slots, span_keys, clock, pages))
        for i in inside:
            arena_of[i] = arena.index
            views[i] = GroupIndex(layout.groups[i], i, arena.index, slots[-1], per_block[i], steps.get(i, 0))
    return Arenas(arenas, tuple(slots), tuple(arena_of), dict(sorted(views.items())))


def _span_keys(layout: CacheLayout, steps: dict[int, int], inside: Iterable[int]) -> int:
    return max(
        (layout.hashes_per_block(layout.groups[i]) // steps[i] - 1 for i in inside if steps.get(i)), default=0
    )


def arena_span_keys(layout: CacheLayout, partition: Partition) -> dict[int, int]:
    """Arena index -> hashes kept of the inside of a slot's block."""
    arena_of = arena_indices(layout, partition)
    steps = span_steps(layout)
    return {
        arena: _span_keys(layout, steps, [i for i, own in enumerate(arena_of) if own == arena])
        for arena in set(arena_of) - {-1}
    }


def _check_group(group: CacheGroup, plan: SlotPlanLike, num_ranks: int) -> None:
    slots, stride = plan.slots.get(group.name, 0), plan.slot_bytes.get(group.name, 0)
    if slots < 1:
        raise SizingError(f"cache group {group.name!r}: the plan has {slots} slots, at least one is needed")
    if stride < group.slot_content_bytes(num_ranks):
        raise SizingError(
            f"cache group {group.name!r}: slots of {stride} bytes can't hold {num_ranks} pages "
            f"of {group.page_bytes} bytes"
        )
