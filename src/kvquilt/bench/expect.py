"""What a run must reach: hits by layout and retention, and the bytes that hold its working set.

Pure logic over the layout, `wanted_blocks` and `longest_hit`: no engine, no measurement.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvquilt.bench.config import BenchConfig
from kvquilt.bench.workload import PRACTICE_PROMPTS, shared_tokens
from kvquilt.config import Options
from kvquilt.errors import ConfigError, SizingError
from kvquilt.hits import longest_hit
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.retention import checkpoint_range, prompt_boundaries, wanted_blocks
from kvquilt.sizing import SlotPlan, plan_slots
from kvquilt.tiers.format import BLOCK_BYTES

__all__ = [
    "ENGINE_INTERVAL",
    "Expectation",
    "RestartExpectation",
    "default_disk_bytes",
    "default_ram_bytes",
    "expect",
    "expect_restart",
    "forks_matter",
    "holds",
    "kept_pages",
    "plan_for",
    "working_set",
]

BoolArray = NDArray[np.bool_]
_MAX_BUDGET = 1 << 50
_DISK_FIXED_BYTES = 4 << 20
ENGINE_INTERVAL = 0
"""The engine's `prefix_cache_retention_interval`: windows and states at prompts' ends and at forks."""


@dataclass(frozen=True)
class Expectation:
    """Tokens over all prompts.

    best_warm, best_branch: every whole lattice block that is shared and leaves a token to compute.
    warm, branch: what the retention can serve if nothing is evicted; second_branch: so, once the
    branches have shown where prompts fork: None if that makes no difference.
    holds_warm, holds_branch: the slots hold all that is saved up to the end of that phase, all
    branches included. pages: group -> pages that those phases load whose hits the slots hold.
    """

    best_warm: int
    best_branch: int
    warm: int
    branch: int
    holds_warm: bool
    holds_branch: bool
    second_branch: int | None = None
    pages: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RestartExpectation:
    """What the second life must reach. hit_tokens: of each prompt. holds: the disk has slots for all that
    the first life saves, and host memory for what runs at once; otherwise hits may be shorter.
    pages: group -> pages that all prompts load."""

    hit_tokens: int
    holds: bool
    pages: Mapping[str, int]


def plan_for(
    layout: CacheLayout, options: Options, budget_bytes: int, *, slot_overhead_bytes: int = 0
) -> SlotPlan:
    """The connector's split of `budget_bytes` in the bench's engine. Raises SizingError."""
    return plan_slots(
        layout,
        budget_bytes,
        options.planned_checkpoint_interval,
        partition=options.group_partition,
        state_interval=options.planned_state_interval(ENGINE_INTERVAL),
        slot_overhead_bytes=slot_overhead_bytes,
    )


def kept_pages(layout: CacheLayout, config: BenchConfig, options: Options) -> dict[str, BoolArray]:
    """Group name -> mask over the blocks of one sequence that are saved."""
    # The last token is sampled but never computed.
    written = config.prompt_tokens + config.output_tokens - 1
    ends = prompt_boundaries(layout, config.prompt_tokens, slack=options.retain_slack)
    end_tokens = None if options.retain_generated else config.prompt_tokens
    checkpoint = written // layout.lattice_tokens * layout.lattice_tokens
    masks: dict[str, BoolArray] = {}
    for group in _stored(layout):
        if group.kind == "recurrent":
            masks[group.name] = _states(layout, group, config, written)
            continue
        mask = wanted_blocks(
            layout,
            group,
            0,
            written // group.tokens_per_block,
            retention=options.retention,
            boundaries=ends,
            end_tokens=end_tokens,
        )
        if not group.dense and options.retention == "prompt_end" and options.retain_generated:
            low, high = checkpoint_range(group, checkpoint)
            mask[low:high] = True
        masks[group.name] = mask
    return masks


def _states(layout: CacheLayout, group: CacheGroup, config: BenchConfig, written: int) -> BoolArray:
    """The engine keeps one state of a prompt: where the same prompt can resume."""
    mask = np.zeros(written // group.tokens_per_block, dtype=np.bool_)
    boundary = layout.max_boundary(config.prompt_tokens)
    if boundary:
        low, high = needed_blocks(group, boundary)
        mask[low:high] = True
    return mask


def forks_matter(layout: CacheLayout) -> bool:
    """Whether a prefix can be resumed from only the second time that prompts fork there."""
    return any(group.kind == "recurrent" for group in _stored(layout))


def working_set(
    layout: CacheLayout, config: BenchConfig, options: Options, *, branches: bool
) -> Counter[str]:
    """Pages per group that are saved by all prompts, and with `branches` by all their branches too."""
    shared = shared_tokens(config.prompt_tokens)
    rounds = (2 if forks_matter(layout) else 1) if branches else 0
    pages: Counter[str] = Counter()
    for name, mask in kept_pages(layout, config, options).items():
        group = layout.groups[layout.index(name)]
        own = int(mask[shared // group.tokens_per_block :].sum())
        fork = int(group.kind == "recurrent" and branches)
        pages[name] = config.requests * (int(mask.sum()) + rounds * own + fork)
    return pages


def holds(plan: SlotPlan, pages: Mapping[str, int]) -> bool:
    """Whether slots for all of `pages` exist; rows of "shared_rows" serve any group."""
    if plan.partition == "shared_rows":
        return sum(plan.slots.values()) >= sum(pages.values())
    return all(plan.slots[name] >= count for name, count in pages.items())


def default_ram_bytes(layout: CacheLayout, config: BenchConfig) -> int:
    """The least budget that holds the working set of all phases under the run's retention."""
    options = config.parsed(_MAX_BUDGET)
    return _least_budget(layout, options, working_set(layout, config, options, branches=True))


def default_disk_bytes(layout: CacheLayout, config: BenchConfig) -> int:
    """A budget of a disk that holds what all prompts save, and those that warm an engine up.

    Somewhat too much: each page is counted with two disk blocks for its header and its table entry.
    """
    options = config.parsed(_MAX_BUDGET)
    more = msgspec.structs.replace(config, requests=config.requests + PRACTICE_PROMPTS)
    pages = working_set(layout, more, options, branches=False)
    return _DISK_FIXED_BYTES + _least_budget(layout, options, pages, 2 * BLOCK_BYTES)


def expect_restart(
    layout: CacheLayout,
    config: BenchConfig,
    options: Options,
    warm_tokens: int,
    *,
    ram: SlotPlan,
    disk_slots: Mapping[str, int],
) -> RestartExpectation:
    """What the second life must reach. warm_tokens: hits of all prompts if nothing is lost, as `expect`
    has them. ram: the split of host memory. disk_slots: group -> slots on disk."""
    more = msgspec.structs.replace(config, requests=config.requests + PRACTICE_PROMPTS)
    at_once = msgspec.structs.replace(config, requests=min(config.requests, config.concurrency))
    disk = dataclasses.replace(ram, slots=dict(disk_slots))
    boundary = warm_tokens // config.requests
    return RestartExpectation(
        hit_tokens=boundary,
        holds=holds(disk, working_set(layout, more, options, branches=False))
        and holds(ram, working_set(layout, at_once, options, branches=False)),
        pages={g.name: config.requests * _loaded(g, boundary) for g in _stored(layout)},
    )


def _least_budget(
    layout: CacheLayout, options: Options, pages: Mapping[str, int], slot_overhead_bytes: int = 0
) -> int:
    low, high = 0, 1 << 20
    while not _fits(layout, options, high, pages, slot_overhead_bytes):
        low, high = high, high * 2
        if high > _MAX_BUDGET:
            raise ConfigError(f"no budget up to {_MAX_BUDGET} bytes holds {sum(pages.values())} pages")
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits(layout, options, middle, pages, slot_overhead_bytes)
        low, high = (low, middle) if fits else (middle, high)
    return high


def expect(layout: CacheLayout, config: BenchConfig, plan: SlotPlan, options: Options) -> Expectation:
    """What the warm and the branch phase must hit. Raises ConfigError if nothing can be hit."""
    tokens = config.prompt_tokens
    if not layout.max_boundary(tokens):
        raise ConfigError(
            f"--prompt-tokens={tokens}: hits end at multiples of {layout.lattice_tokens} tokens and leave "
            f"one to compute, so nothing can be reused below {layout.lattice_tokens + 1}"
        )
    kept = kept_pages(layout, config, options)
    shared = shared_tokens(tokens)
    everything = {g.name: np.ones(len(kept[g.name]), dtype=np.bool_) for g in _stored(layout)}

    def hit(masks: Mapping[str, BoolArray], end: int | None) -> int:
        present = {g.name: masks[g.name][: _blocks(g, end)] for g in _stored(layout)}
        return longest_hit(layout, present, tokens).tokens

    forked = {g.name: everything[g.name] if g.kind == "recurrent" else kept[g.name] for g in _stored(layout)}
    warm, branch = hit(kept, None), hit(kept, shared)
    second = hit(forked, shared) if forks_matter(layout) else None
    holds_warm = holds(plan, working_set(layout, config, options, branches=False))
    holds_branch = holds(plan, working_set(layout, config, options, branches=True))
    hits = [*([warm] if holds_warm else []), *([branch, second or 0] if holds_branch else [])]
    return Expectation(
        best_warm=config.requests * hit(everything, None),
        best_branch=config.requests * hit(everything, shared),
        warm=config.requests * warm,
        branch=config.requests * branch,
        holds_warm=holds_warm,
        holds_branch=holds_branch,
        second_branch=None if second is None else config.requests * second,
        pages={g.name: config.requests * sum(_loaded(g, end) for end in hits) for g in _stored(layout)},
    )


def _loaded(group: CacheGroup, boundary: int) -> int:
    low, high = needed_blocks(group, boundary) if boundary else (0, 0)
    return int(high - low)


def _blocks(group: CacheGroup, end: int | None) -> int | None:
    return None if end is None else end // group.tokens_per_block


def _stored(layout: CacheLayout) -> list[CacheGroup]:
    return [group for group in layout.cacheable_groups if group.page_bytes]


def _fits(
    layout: CacheLayout, options: Options, budget: int, pages: Mapping[str, int], slot_overhead_bytes: int
) -> bool:
    try:
        plan = plan_for(layout, options, budget, slot_overhead_bytes=slot_overhead_bytes)
    except SizingError:
        return False
    return holds(plan, pages)
