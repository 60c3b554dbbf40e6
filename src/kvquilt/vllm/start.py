"""What is said at start: the groups with their slots, and what in the options does not fit the engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvquilt.layout import CacheLayout
from kvquilt.layout.namespace import NamespaceFactors
from kvquilt.sizing import SlotPlan
from kvquilt.tiers import NVMeTier
from kvquilt.units import format_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvquilt.vllm.layout import EngineGroups

__all__ = ["disk_line", "start_lines", "warn_of_idle_states", "warn_of_lost_keys", "warn_of_stray_drafts"]

logger = logging.getLogger(__name__)


def start_lines(layout: CacheLayout, plan: SlotPlan) -> list[str]:
    """One line per group: kind, layers, tokens per block, page bytes, slots, tokens covered."""
    lines = []
    for group in layout.groups:
        slots, slot_bytes = plan.slots.get(group.name, 0), plan.slot_bytes.get(group.name, 0)
        kind = group.kind if group.window is None else f"{group.kind} {group.window}"
        lines.append(
            f"group {group.name}: {kind}, {len(group.layers)} layers, "
            f"{group.tokens_per_block} tokens per block, page {group.page_bytes} B "
            f"in a slot of {slot_bytes} B, {slots} slots ({format_bytes(slots * slot_bytes)}), "
            f"{plan.tokens} tokens covered"
        )
    return lines


def disk_line(tier: NVMeTier) -> str:
    """One line on the disk tier: where, how much, tokens covered."""
    plan, options = tier.plan, tier.options
    slots = ", ".join(f"{name} {number}" for name, number in plan.slots.items() if number)
    return (
        f"disk {options.path}: {format_bytes(plan.bytes_used)} of {format_bytes(options.num_bytes)} for all, "
        f"slots: {slots}; {plan.tokens} tokens covered, written {options.write}, {tier.state}"
    )


def warn_of_lost_keys(namespace: NamespaceFactors) -> None:
    """Warn if the engine's hashes mean nothing to the next process, so that it will find nothing on disk."""
    if not namespace.keys_survive_restart:
        logger.warning(
            "kvquilt: disk: the engine draws the seed of its block hashes (%s) per process, so pages on disk "
            "are lost at a restart: set PYTHONHASHSEED, or use prefix_caching_hash_algo sha256",
            namespace.hash_algorithm,
        )


def warn_of_idle_states(checkpoint_interval: int | None, groups: EngineGroups) -> None:
    """Warn if the split of memory assumes states that the engine never hands over."""
    wanted, kept = checkpoint_interval, groups.state_interval
    if not groups.handed_over or wanted is None or kept is None or (kept and wanted >= kept):
        return
    what = f"one state in {kept} tokens" if kept else "one state per prompt, and at junctions"
    logger.warning(
        "kvquilt: checkpoint_interval=%d is smaller than what the engine keeps of recurrent groups (%s, its "
        "prefix_cache_retention_interval): slots for more states will stay idle",
        wanted,
        what,
    )


def warn_of_stray_drafts(vllm_config: VllmConfig, num_groups: int) -> None:
    """Warn of an engine that damages its own KV: vLLM 0.32's first model runner gives a separate
    draft model the block table of group 0, so drafts are written over that group's pages."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "draft_model" or num_groups < 2:
        return
    if not vllm_config.use_v2_model_runner:
        logger.warning(
            "kvquilt: this engine lets a separate draft model write over pages of cache group 0 (vLLM 0.32, "
            "first model runner, more than one cache group). Its outputs can be wrong with or without "
            "kvquilt, which keeps what the engine leaves: use another way of speculation, or the second "
            "model runner"
        )
