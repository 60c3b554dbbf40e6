"""Shapes of cache groups for the harness, and the engine's configuration objects made of them."""

from __future__ import annotations

import copy
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvquilt.errors import KVQuiltError

__all__ = ["EngineConfig", "GroupShape", "HarnessError", "MemoryLayout"]

ShapeKind = Literal["full", "sliding", "chunked", "recurrent"]
MemoryLayout = Literal["auto", "LBHNC", "BLHNC"]

VOCAB_SIZE = 32_000


class HarnessError(KVQuiltError, AssertionError):
    """The engine, or the connector in it, did what must never happen."""


@dataclass(frozen=True)
class GroupShape:
    """One cache group of a model that need not exist.

    tokens_per_block: tokens of one block.
    num_layers: layers of the group.
    bytes_per_token: bytes of one token in one layer on one rank, a multiple of 8; so a block's page
    has num_layers * tokens_per_block * bytes_per_token bytes.
    window, chunk: tokens, for the kinds "sliding" and "chunked".
    state_bytes: for the kind "recurrent", bytes of a block's state in one layer, a multiple of 8;
    bytes_per_token has no meaning there.
    extra_tokens: sliding: tokens that the engine retains beyond the window.
    draft: the engine's "eagle" flag.

    Raises ValueError for a shape that no engine could have.
    """

    kind: ShapeKind
    tokens_per_block: int
    window: int | None = None
    chunk: int | None = None
    num_layers: int = 1
    bytes_per_token: int = 8
    extra_tokens: int = 0
    draft: bool = False
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_token < 8 or self.bytes_per_token % 8:
            raise ValueError(f"bytes_per_token={self.bytes_per_token}: must be a positive multiple of 8")
        if self.tokens_per_block < 1 or self.num_layers < 1:
            raise ValueError(f"{self}: tokens_per_block and num_layers must be at least 1")
        if self.state_bytes is not None and (self.state_bytes < 8 or self.state_bytes % 8):
            raise ValueError(f"state_bytes={self.state_bytes}: must be a positive multiple of 8")
        for name, kind in (("window", "sliding"), ("chunk", "chunked"), ("state_bytes", "recurrent")):
            value = getattr(self, name)
            if (value is not None) != (self.kind == kind):
                raise ValueError(f"{name}={value}: the {kind} kind, and no other, has one")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.tokens_per_block * self.bytes_per_token if self.state_bytes is None else self.state_bytes

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: a token's KV, or a state."""
        return self.bytes_per_token if self.state_bytes is None else self.state_bytes

    def first_read(self, position: int) -> int:
        """First token that attention reads when it computes the token at `position`.

        For a recurrent group, the token whose state is read (-1: none). This is the model's own
        rule, deliberately not the product's: the two check each other.
        """
        if self.kind == "sliding":
            assert self.window is not None
            return max(0, position - self.window + 1)
        if self.kind == "chunked":
            assert self.chunk is not None
            return position - position % self.chunk
        return position - 1 if self.kind == "recurrent" else 0

    def spec(self) -> Any:
        """The engine's own spec of this group."""
        import torch
        from vllm.v1.kv_cache_interface import (
            ChunkedLocalAttentionSpec,
            FullAttentionSpec,
            MambaSpec,
            SlidingWindowSpec,
        )

        if self.state_bytes is not None:
            # Two parts, as real ones have: floats of half of it each.
            parts = ((self.state_bytes // 8,),) * 2
            return MambaSpec(
                block_size=self.tokens_per_block,
                shapes=parts,
                dtypes=(torch.float32, torch.float32),
                mamba_cache_mode="align",
            )

        # One head; K and V of bytes_per_token / 8 floats each.
        common: dict[str, Any] = {
            "block_size": self.tokens_per_block,
            "num_kv_heads": 1,
            "head_size": self.bytes_per_token // 8,
            "dtype": torch.float32,
        }
        if self.kind == "sliding":
            assert self.window is not None
            return SlidingWindowSpec(
                **common, sliding_window=self.window, extra_retained_tokens=self.extra_tokens
            )
        if self.kind == "chunked":
            assert self.chunk is not None
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.chunk)
        return FullAttentionSpec(**common)


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
        "num_hidden_layers": 1,
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


@dataclass
class EngineConfig:
    """The engine's configuration for a list of groups.

    After construction: `vllm`, the VllmConfig; `kv_cache`, the KVCacheConfig with tensors, hash unit
    and alignment filled in as the engine core does it; `scheduler_block_size` and `hash_block_size`,
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
    kv_events: Mapping[str, Any] | None = None
    vllm: Any = field(init=False)
    kv_cache: Any = field(init=False)
    scheduler_block_size: int = field(init=False)
    hash_block_size: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups: at least one is needed")
        self._states = [group.tokens_per_block for group in self.groups if group.kind == "recurrent"]
        if self._states and not self.enable_prefix_caching:
            raise ValueError("enable_prefix_caching=False: recurrent groups keep no blocks then")
        self.vllm = self._vllm_config()
        self.kv_cache = self._kv_cache_config()
        self._resolve_units()

    def for_rank(self, rank: int) -> tuple[Any, Any]:
        """(VllmConfig, KVCacheConfig) of one worker: its own copies, as in its own process."""
        if self.num_ranks == 1:
            return self.vllm, copy.deepcopy(self.kv_cache)
        config = copy.copy(self.vllm)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        return config, copy.deepcopy(self.kv_cache)

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
        config.cache_config.mamba_cache_mode = "align" if self._states else "none"
        return config

    def _layout_name(self) -> str:
        uniform = len({group.page_bytes for group in self.groups}) == 1
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
            names = [f"model.layers.{index}.{layer}.attn" for layer in range(group.num_layers)]
            specs.append(KVCacheGroupSpec(names, group.spec(), is_eagle_group=group.draft))
        config = get_kv_cache_config_from_groups(self.vllm, specs, available_memory=0)
        config.kv_cache_layout = self.vllm.cache_config.kv_cache_layout
        return config

    def _resolve_units(self) -> None:
        from vllm.v1.core.kv_cache_utils import (
            resolve_cache_hit_alignment_tokens,
            resolve_kv_cache_block_sizes,
        )

        block, unit = resolve_kv_cache_block_sizes(self.kv_cache, self.vllm)
        assert block == math.lcm(*(group.tokens_per_block for group in self.groups))
        self.scheduler_block_size, self.hash_block_size = block, unit
        self.kv_cache.hash_block_size = unit
        self.kv_cache.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            self.kv_cache, self.vllm, block, unit
        )
