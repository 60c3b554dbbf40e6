"""The engine's configuration objects for a list of group shapes."""

from __future__ import annotations

import copy
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvquilt.testing.sim_shapes import NUM_TARGET_LAYERS, VOCAB_SIZE, GroupShape

__all__ = ["EngineConfig", "MemoryLayout", "Speculation"]

MemoryLayout = Literal["auto", "LBHNC", "BLHNC"]
Speculation = Literal["draft_model", "eagle", "mtp"]


@functools.cache
def _model_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory with the smallest config.json that the engine accepts; gone when the process ends."""
    directory = tempfile.TemporaryDirectory(prefix="kvquilt-harness-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": NUM_TARGET_LAYERS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1 << 20,
        "dtype": "float32",
    }
    (Path(directory.name) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@functools.cache
def _model_config(max_model_len: int) -> Any:
    """Cached: the engine starts a process to look at a model class, which takes seconds."""
    from vllm.config import ModelConfig

    return ModelConfig(
        model=_model_directory().name,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_model_len,
        seed=0,
    )


@functools.cache
def _draft_model_config(max_model_len: int) -> Any:
    from vllm.config import ParallelConfig, SpeculativeConfig

    return SpeculativeConfig(
        method="draft_model",
        model=_model_directory().name,
        num_speculative_tokens=1,
        target_model_config=_model_config(max_model_len),
        target_parallel_config=ParallelConfig(),
    )


def _speculative_config(max_model_len: int, method: Speculation, num_tokens: int) -> Any:
    """A draft model's, whatever the method: the scheduler asks for no more than its name."""
    config = copy.copy(_draft_model_config(max_model_len))
    object.__setattr__(config, "method", method)
    object.__setattr__(config, "num_speculative_tokens", num_tokens)
    return config


@dataclass
class EngineConfig:
    """The engine's configuration for a list of groups.

    After construction: `vllm`, the VllmConfig; `kv_cache`, the scheduler's KVCacheConfig with tensors,
    hash unit and alignment filled in as the engine core does it, and `worker_kv_cache`, the
    workers'; `scheduler_block_size` and `hash_block_size`,
    in tokens.
    """

    groups: Sequence[GroupShape]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_transfer: Mapping[str, Any] | None
    enable_prefix_caching: bool
    retention_interval: int | None
    num_ranks: int
    async_scheduling: bool
    memory_layout: MemoryLayout
    hash_algorithm: str
    scheduler_options: Mapping[str, Any]
    speculation: Speculation | None
    num_draft_tokens: int
    kv_events: Mapping[str, Any] | None = None
    vllm: Any = field(init=False)
    kv_cache: Any = field(init=False)
    worker_kv_cache: Any = field(init=False)
    scheduler_block_size: int = field(init=False)
    hash_block_size: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups: at least one is needed")
        self._states = [group.tokens_per_block for group in self.groups if group.kind == "recurrent"]
        if self._states and not self.enable_prefix_caching:
            raise ValueError("enable_prefix_caching=False: recurrent groups keep no blocks then")
        if self.speculation:
            if any(group.state_mode == "all" for group in self.groups if group.kind == "recurrent"):
                raise ValueError(f"speculation={self.speculation!r}: not simulated for state_mode 'all'")
            self.groups = [
                replace(group, spare_states=self.num_draft_tokens) if group.kind == "recurrent" else group
                for group in self.groups
            ]
        self.vllm = self._vllm_config()
        self.worker_kv_cache = self._kv_cache_config()
        self.kv_cache = self._scheduler_kv_cache_config()
        self._resolve_units()

    def for_rank(self, rank: int) -> tuple[Any, Any]:
        """(VllmConfig, KVCacheConfig) of one worker: its own copies, as in its own process."""
        if self.num_ranks == 1:
            return self.vllm, copy.deepcopy(self.worker_kv_cache)
        config = copy.copy(self.vllm)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        return config, copy.deepcopy(self.worker_kv_cache)

    def _vllm_config(self) -> Any:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVEventsConfig,
            KVTransferConfig,
            SchedulerConfig,
            VllmConfig,
        )

        scheduler_options = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "is_encoder_decoder": False,
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "disable_hybrid_kv_cache_manager": False,
        }
        config = VllmConfig(
            model_config=copy.copy(_model_config(self.max_model_len)),
            scheduler_config=SchedulerConfig(**{**scheduler_options, **self.scheduler_options}),
            cache_config=CacheConfig(
                # With states, prefill is cut at this unit.
                block_size=max(self._states, default=min(group.tokens_per_block for group in self.groups)),
                enable_prefix_caching=self.enable_prefix_caching,
                prefix_cache_retention_interval=self.retention_interval,
                prefix_caching_hash_algo=self.hash_algorithm,
                num_gpu_blocks_override=self.num_blocks,
            ),
            kv_transfer_config=KVTransferConfig(**self.kv_transfer) if self.kv_transfer else None,
            kv_events_config=KVEventsConfig(**self.kv_events) if self.kv_events else None,
            device_config=DeviceConfig("cpu"),
        )
        # Set afterwards: the CPU platform turns the first off, and several ranks would be checked
        # against the machine.
        config.scheduler_config.async_scheduling = self.async_scheduling
        config.parallel_config.tensor_parallel_size = self.num_ranks
        config.parallel_config.world_size = self.num_ranks
        config.cache_config.num_gpu_blocks = self.num_blocks
        config.cache_config.kv_cache_layout = self._layout_name()
        modes = {group.state_mode for group in self.groups if group.kind == "recurrent"}
        config.cache_config.mamba_cache_mode = min(modes, default="none")
        if self.speculation is not None:
            config.speculative_config = _speculative_config(
                self.max_model_len, self.speculation, self.num_draft_tokens
            )
        return config

    def _layout_name(self) -> str:
        sizes = {
            group.padded_bytes or group.layer_page_bytes(layer)
            for group in self.groups
            for layer in range(group.num_layers)
        }
        uniform = len(sizes) == 1
        if self.memory_layout == "auto":
            return "LBHNC" if uniform else "BLHNC"
        if self.memory_layout == "LBHNC" and not uniform:
            raise ValueError("memory_layout='LBHNC': pages of different sizes need 'BLHNC' (or 'auto')")
        return self.memory_layout

    def _kv_cache_config(self) -> Any:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec

        specs = []
        for index, group in enumerate(self.groups):
            names = group.layer_names(index)
            specs.append(KVCacheGroupSpec(names, group.spec(index), is_eagle_group=group.draft))
        config = get_kv_cache_config_from_groups(self.vllm, specs, available_memory=0)
        config.kv_cache_layout = self.vllm.cache_config.kv_cache_layout
        return config

    def _scheduler_kv_cache_config(self) -> Any:
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

        return generate_scheduler_kv_cache_config([self.worker_kv_cache])

    def _resolve_units(self) -> None:
        from vllm.v1.core.kv_cache_utils import (
            resolve_cache_hit_alignment_tokens,
            resolve_kv_cache_block_sizes,
        )

        block, unit = resolve_kv_cache_block_sizes(self.kv_cache, self.vllm)
        assert block == math.lcm(*(group.tokens_per_block for group in self.groups))
        self.scheduler_block_size, self.hash_block_size = block, unit
        for config in (self.kv_cache, self.worker_kv_cache):
            config.hash_block_size = unit
            config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
                self.kv_cache, self.vllm, block, unit
            )
