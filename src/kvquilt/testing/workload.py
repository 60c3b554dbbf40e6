"""How large an engine's block pool must be so that a workload stays in it."""

from __future__ import annotations

from collections.abc import Sequence

from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks

__all__ = ["kv_cache_memory_for", "pool_blocks_for"]

# One tail at the prompt's last boundary; one at a junction that two prompts share; one at the end
# of generation.
_TAILS_PER_PROMPT = 3
_PIN_SHARE = 0.02


def pool_blocks_for(
    layout: CacheLayout,
    prompt_tokens: Sequence[int],
    *,
    output_tokens: int = 0,
    concurrency: int = 8,
    retention: str = "boundaries",
) -> int:
    """Blocks with which every prompt's prefix stays in the engine after all of them have run.

    layout: the engine's groups. prompt_tokens: the length of each prompt, in tokens.
    concurrency: requests that run at once; each needs all of its blocks meanwhile, since a window
    lets go of a block only after the step that left it behind.
    retention: "boundaries": sliding and recurrent groups keep what the prompt's boundaries need (the
    engine's `prefix_cache_retention_interval=0`); "all": every block stays (None).

    The engine reuses blocks without a hash first, so blocks in transit need room only once. A
    fiftieth is added for blocks that a connector pins. Raises ValueError for an unknown retention
    or no prompts.
    """
    if retention not in ("boundaries", "all"):
        raise ValueError(f"retention={retention!r}: allowed are 'boundaries' and 'all'")
    if not prompt_tokens:
        raise ValueError("prompt_tokens is empty: there is no workload to size the pool for")
    if retention == "all":
        kept = sum(_all_blocks(layout, tokens + output_tokens) for tokens in prompt_tokens)
    else:
        kept = sum(_kept_blocks(layout, tokens, output_tokens) for tokens in prompt_tokens)
    running = sorted(prompt_tokens)[-concurrency:]
    transit = sum(_all_blocks(layout, tokens + output_tokens) for tokens in running)
    null_block = 1
    return int((kept + transit) * (1 + _PIN_SHARE)) + 1 + null_block


def kv_cache_memory_for(layout: CacheLayout, num_blocks: int) -> int:
    """Bytes of an engine pool of `num_blocks`: each block has the size of the widest group's page."""
    return num_blocks * max(group.page_bytes for group in layout.groups)


def _all_blocks(layout: CacheLayout, tokens: int) -> int:
    return sum(-(-tokens // group.tokens_per_block) for group in layout.groups)


def _kept_blocks(layout: CacheLayout, prompt_tokens: int, output_tokens: int) -> int:
    boundary = layout.max_boundary(prompt_tokens + output_tokens)
    return sum(_kept(group, boundary, prompt_tokens + output_tokens) for group in layout.groups)


def _kept(group: CacheGroup, boundary: int, tokens: int) -> int:
    every = -(-tokens // group.tokens_per_block)
    if group.dense or group.kind == "chunked":  # the engine keeps every block of a chunked group
        return every
    low, high = needed_blocks(group, boundary)
    # A draft group's peek block is one more than the boundary needs.
    return min(every, _TAILS_PER_PROMPT * (int(high) - int(low) + 1))
