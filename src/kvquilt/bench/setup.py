"""Everything that is decided before an engine starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from kvquilt.bench.config import BenchConfig
from kvquilt.bench.expect import Expectation, default_ram_bytes, expect, plan_for
from kvquilt.bench.model import BenchModel, bench_model
from kvquilt.bench.workload import Workload, make_workload
from kvquilt.config import Options
from kvquilt.errors import ConfigError, SizingError
from kvquilt.layout import CacheLayout
from kvquilt.sizing import SlotPlan
from kvquilt.store.memory import available_memory
from kvquilt.testing.workload import kv_cache_memory_for, pool_blocks_for
from kvquilt.units import format_bytes

__all__ = ["BATCH_TOKENS", "BenchSetup", "set_up"]

BATCH_TOKENS = 2048
"""Tokens that an engine computes in one step."""
# The connector pins at most this share of the engine's blocks.
PIN_CAP_SHARE = 0.02
# A copy that begins after one step is reported at the end of the next, on a busy machine later.
_STEPS_UNDER_WAY = 3


@dataclass(frozen=True)
class BenchSetup:
    """pool_blocks: blocks of the engine's pool, enough to keep every prompt's prefix.
    ram_bytes: kvquilt's budget; ram_chosen: nobody gave one, so it is what holds the working set.
    options, plan: what the connector will make of it. expected: what has to come out."""

    config: BenchConfig
    model: BenchModel
    work: Workload
    pool_blocks: int
    ram_bytes: int
    ram_chosen: bool
    options: Options
    plan: SlotPlan
    expected: Expectation

    @property
    def pool_bytes(self) -> int:
        """Bytes of the engine's pool."""
        return kv_cache_memory_for(self.model.layout, self.pool_blocks)

    def tokens_covered(self, retention: str) -> int:
        """Tokens that the same budget covers under another retention; 0 if it is too small for it."""
        config = msgspec.structs.replace(self.config, retention=retention)
        try:
            return plan_for(self.model.layout, config.parsed(self.ram_bytes), self.ram_bytes).tokens
        except SizingError:
            return 0


def set_up(config: BenchConfig) -> BenchSetup:
    """Check `config` against its model and this machine, and draw the prompts.

    Raises ConfigError, LayoutError or SizingError with what to change.
    """
    model = bench_model(config.model)
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            f"--prompt-tokens={config.prompt_tokens} and --output-tokens={config.output_tokens}: "
            f"{config.model} takes at most {model.max_positions} tokens"
        )
    layout = model.layout
    given = config.ram_bytes
    options = config.parsed(default_ram_bytes(layout, config) if given is None else given)
    plan = plan_for(layout, options, options.budget_bytes)
    setup = BenchSetup(
        config=config,
        model=model,
        work=make_workload(
            requests=config.requests,
            prompt_tokens=config.prompt_tokens,
            vocab_size=model.vocab_size,
            seed=config.seed,
        ),
        pool_blocks=_pool_blocks(layout, config),
        ram_bytes=options.budget_bytes,
        ram_chosen=given is None,
        options=options,
        plan=plan,
        expected=expect(layout, config, plan, options),
    )
    _check_memory(setup)
    return setup


def _pool_blocks(layout: CacheLayout, config: BenchConfig) -> int:
    """Blocks that keep every prompt's prefix, and of which kvquilt's pins are a small share: windows
    slide on while their blocks are copied, and pins above their cap would be saves that are skipped."""
    per_step = sum(-(-BATCH_TOKENS // g.tokens_per_block) for g in layout.cacheable_groups if not g.dense)
    prefixes = pool_blocks_for(
        layout,
        [config.prompt_tokens] * config.requests,
        output_tokens=config.output_tokens,
        concurrency=config.concurrency,
    )
    return max(prefixes, math.ceil(_STEPS_UNDER_WAY * per_step / PIN_CAP_SHARE))


def _check_memory(setup: BenchSetup) -> None:
    limits = available_memory()
    if not limits:
        return
    source, available = min(limits.items(), key=lambda item: item[1])
    if setup.pool_bytes + setup.ram_bytes > available:
        raise ConfigError(
            f"--requests={setup.config.requests}: the engine's pool takes {format_bytes(setup.pool_bytes)} "
            f"and kvquilt {format_bytes(setup.ram_bytes)}, but {source} leaves {format_bytes(available)}: "
            "lower --requests, --prompt-tokens or --ram-bytes"
        )
