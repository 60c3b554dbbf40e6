"""The longest boundary that the visible pages of a chain can serve, and the slots to load.

Dense groups are probed first, each up to its first hole; the others only up to the dense hit:
first at that boundary alone, which is the common case; if that fails, through `hits.joint_hit`
over a stretch of boundaries below it, and over longer ones until one holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvquilt.hits import joint_hit, num_probed_blocks
from kvquilt.layout import CacheLayout, needed_blocks
from kvquilt.store.chain import Chain
from kvquilt.store.index import GroupIndex

__all__ = ["Part", "Resolution", "needed_range", "resolve", "resolve_at"]

IntArray = NDArray[np.int64]

_FIRST_STRETCH = 128


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """What the boundary needs of one group: blocks lo.., of which the engine holds those before `first`.

    slots: of blocks first, first + 1, ..., the peek block of a draft group included, which is
    required. loaded: those to load, so without the peek block.
    """

    view: GroupIndex
    lo: int
    first: int
    slots: IntArray
    loaded: IntArray = field(init=False)

    def __post_init__(self) -> None:
        loaded = self.slots[:-1] if self.view.group.draft else self.slots
        object.__setattr__(self, "loaded", loaded)


@dataclass(frozen=True, eq=False, slots=True)
class Resolution:
    """The boundary, the group that limits it, a part per group, and how far the dense groups reach."""

    tokens: int
    limited_by: str | None
    parts: tuple[Part, ...]
    dense_tokens: int = 0


def needed_range(view: GroupIndex, tokens: int) -> tuple[int, int]:
    """Blocks [lo, hi) that must be present at a boundary, the peek block included."""
    lo, hi = needed_blocks(view.group, tokens)
    return int(lo), int(hi) + int(view.group.draft)


def resolve(
    layout: CacheLayout,
    views: Sequence[GroupIndex],
    chain: Chain,
    num_tokens: int,
    local_tokens: int,
    ignore: Collection[str],
) -> Resolution:
    """The longest boundary below `num_tokens` that all groups but the ignored ones can serve.

    Equals `hits.longest_hit` over what is visible. limited_by is the dense group that ends
    first if the hit goes as far as the dense pages do; else it is `joint_hit`'s over the
    boundaries up to there, since the other groups are not asked about later ones.
    """
    asked = [view for view in views if view.group.name not in ignore]
    longest = layout.max_boundary(num_tokens)
    reach, dense, limiting = _dense_reach(layout, asked, chain, longest, local_tokens)
    if reach == 0:
        return Resolution(0, limiting, ())
    others = [view for view in asked if not view.group.dense]
    parts = _parts(others, chain, reach, local_tokens)
    if parts is not None:
        return Resolution(reach, limiting, _in_order(dense, parts, reach), reach)
    tokens, limiting = _search(layout, others, chain, reach, local_tokens)
    parts = _parts(others, chain, tokens, local_tokens) if tokens else []
    if parts is None:  # resolve and probe hold one lock: what was present is present
        raise AssertionError(f"pages of a valid boundary at {tokens} tokens are missing")
    return Resolution(tokens, limiting, _in_order(dense, parts, tokens) if tokens else (), reach)


def _search(
    layout: CacheLayout, views: Sequence[GroupIndex], chain: Chain, reach: int, local_tokens: int
) -> tuple[int, str | None]:
    """Longest boundary up to `reach` that these groups serve, and the group that limits it.

    A stretch that holds a valid boundary decides both exactly: whatever would be longer, with
    or without some group, lies above that boundary and so inside the stretch.
    """
    step = layout.lattice_tokens
    groups = [view.group for view in views]
    size = _FIRST_STRETCH
    while True:
        stretch = np.arange(max(step, reach - (size - 1) * step), reach + 1, step, dtype=np.int64)
        verdicts = [_valid(view, chain, stretch, local_tokens) for view in views]
        hit = joint_hit(groups, verdicts, stretch)
        if hit.tokens or stretch[0] == step:
            return hit.tokens, hit.limited_by
        size *= 8


def resolve_at(
    views: Sequence[GroupIndex], chain: Chain, tokens: int, local_tokens: int, ignore: Collection[str]
) -> Resolution | None:
    """`resolve` for one given boundary; None if some group can't serve it. Boundary 0 needs nothing."""
    if tokens == 0:
        return Resolution(0, None, ())
    parts = _parts([v for v in views if v.group.name not in ignore], chain, tokens, local_tokens)
    return None if parts is None else Resolution(tokens, None, tuple(parts))


def _dense_reach(
    layout: CacheLayout, views: Sequence[GroupIndex], chain: Chain, longest: int, local_tokens: int
) -> tuple[int, list[Part], str | None]:
    """Longest boundary that the dense groups serve, their parts up to it, and who ends first."""
    found: list[tuple[GroupIndex, int, IntArray]] = []
    reach, limiting = longest, None
    for view in views:
        if not view.group.dense:
            continue
        first = local_tokens // view.group.tokens_per_block
        slots = view.prefix(chain, first, num_probed_blocks(view.group, reach))
        found.append((view, first, slots))
        blocks = first + slots.size - int(view.group.draft)
        own = max(0, blocks) * view.group.tokens_per_block // layout.lattice_tokens * layout.lattice_tokens
        if own < reach:
            reach, limiting = own, view.group.name
    parts = [Part(view, 0, first, slots) for view, first, slots in found]
    return reach, parts, limiting


def _parts(views: Sequence[GroupIndex], chain: Chain, tokens: int, local_tokens: int) -> list[Part] | None:
    """What each group needs at a boundary, or None if a page is missing."""
    parts = []
    for view in views:
        lo, end = needed_range(view, tokens)
        first = min(max(lo, local_tokens // view.group.tokens_per_block), end)
        slots, count = view.probe(chain, first, end)
        if count < end - first:
            return None
        parts.append(Part(view, lo, first, slots))
    return parts


def _valid(view: GroupIndex, chain: Chain, ends: IntArray, local_tokens: int) -> NDArray[np.bool_]:
    """`hits.valid_at` over what is visible; ends: ascending."""
    lo, hi = needed_blocks(view.group, ends)
    held = local_tokens // view.group.tokens_per_block
    return view.all_visible(chain, lo, hi + int(view.group.draft), held)


def _in_order(dense: Sequence[Part], others: Sequence[Part], tokens: int) -> tuple[Part, ...]:
    """All parts in group order, the dense ones cut to what `tokens` needs."""
    cut = []
    for part in dense:
        lo, end = needed_range(part.view, tokens)
        first = min(part.first, end)
        cut.append(Part(part.view, lo, first, part.slots[: end - first]))
    return tuple(sorted((*cut, *others), key=lambda part: part.view.index))
