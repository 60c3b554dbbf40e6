"""Shapes of cache groups for the harness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvquilt.errors import KVQuiltError

__all__ = ["NUM_TARGET_LAYERS", "VOCAB_SIZE", "Drafter", "GroupShape", "HarnessError"]

ShapeKind = Literal["full", "sliding", "chunked", "recurrent", "ring", "replay"]
Drafter = Literal["draft_model", "mtp", "numbered"]
"""Where a drafter's layers are: under a prefix of their own, or numbered past the target's last."""

NUM_TARGET_LAYERS = 64

VOCAB_SIZE = 32_000


class HarnessError(KVQuiltError, AssertionError):
    """The engine, or the connector in it, did what must never happen."""


@dataclass(frozen=True)
class GroupShape:
    """One cache group of a model that need not exist.

    kind: "ring" and "replay" are scratch to the engine (one block per request; a window that it
    computes anew after each hit).
    tokens_per_block: tokens of one block.
    num_layers: layers of the group.
    bytes_per_token: bytes of one token in one layer on one rank, a multiple of 8; so a block's page
    has num_layers * tokens_per_block * bytes_per_token bytes.
    layer_bytes: the same for each layer, where layers differ; it replaces the two before.
    window, chunk: tokens, for the kinds "sliding" (and "replay") and "chunked".
    state_bytes: for the kind "recurrent", bytes of a block's state in one layer, a multiple of 8;
    bytes_per_token has no meaning there. padded_bytes: what the engine pads such a page to.
    state_mode: the engine's `mamba_cache_mode`. spare_states: its `num_speculative_blocks`: drafted
    tokens whose states a request keeps until they are verified. The harness sets it.
    extra_tokens: sliding: tokens that the engine retains beyond the window.
    draft: the engine's "eagle" flag.
    drafter: these are layers of a drafter; the target's output does not depend on them.
    replicated: latent KV: every rank holds the same bytes.
    beside: index of the group whose layers these are the second cache of.

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
    layer_bytes: tuple[int, ...] = ()
    padded_bytes: int | None = None
    state_mode: Literal["align", "all"] = "align"
    spare_states: int = 0
    drafter: Drafter | None = None
    replicated: bool = False
    beside: int | None = None

    def __post_init__(self) -> None:
        if self.layer_bytes:
            object.__setattr__(self, "num_layers", len(self.layer_bytes))
            object.__setattr__(self, "bytes_per_token", self.layer_bytes[0])
        for size in (self.bytes_per_token, *self.layer_bytes):
            if size < 8 or size % 8:
                raise ValueError(f"bytes_per_token={size}: must be a positive multiple of 8")
        if self.tokens_per_block < 1 or self.num_layers < 1:
            raise ValueError(f"{self}: tokens_per_block and num_layers must be at least 1")
        if self.state_bytes is not None and (self.state_bytes < 8 or self.state_bytes % 8):
            raise ValueError(f"state_bytes={self.state_bytes}: must be a positive multiple of 8")
        for name, kinds in (
            ("window", ("sliding", "replay")),
            ("chunk", ("chunked",)),
            ("state_bytes", ("recurrent",)),
        ):
            value = getattr(self, name)
            if (value is not None) != (self.kind in kinds):
                raise ValueError(f"{name}={value}: the {kinds[0]} kind, and no other, has one")

    @property
    def spare_blocks(self) -> int:
        """Blocks that a request may hold beside those of its tokens: old states and new ones."""
        return 2 + self.spare_states if self.kind == "recurrent" else 0

    @property
    def cacheable(self) -> bool:
        """Does the engine's prefix cache know this group?"""
        return self.kind not in ("ring", "replay")

    def layer_page_bytes(self, layer: int) -> int:
        """Bytes of one block in one layer, padding excluded."""
        if self.state_bytes is not None:
            return self.state_bytes
        return self.tokens_per_block * self.layer_token_bytes(layer)

    def layer_token_bytes(self, layer: int) -> int:
        """Bytes of one token in one layer."""
        return self.layer_bytes[layer] if self.layer_bytes else self.bytes_per_token

    def layer_entry_bytes(self, layer: int) -> int:
        """Bytes of one entry of a layer: a token's KV, or a state."""
        return self.layer_token_bytes(layer) if self.state_bytes is None else self.state_bytes

    def layer_names(self, index: int) -> list[str]:
        """Names as the engine has them, for the group with this index."""
        layers = range(self.num_layers)
        if self.drafter == "numbered":
            return [f"model.layers.{NUM_TARGET_LAYERS + layer}.g{index}.attn" for layer in layers]
        if self.drafter is not None:
            prefix = "draft_model.model" if self.drafter == "draft_model" else "mtp"
            return [f"{prefix}.layers.{layer}.g{index}.attn" for layer in layers]
        if self.beside is not None:
            return [f"model.layers.{self.beside}.{layer}.indexer.k_cache" for layer in layers]
        return [f"model.layers.{index}.{layer}.attn" for layer in layers]

    def first_read(self, position: int) -> int:
        """First token that attention reads when it computes the token at `position`.

        For a recurrent group, the token whose state is read (-1: none). This is the model's own
        rule, deliberately not the product's: the two check each other.
        """
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.kind == "ring":
            return position - position % self.tokens_per_block
        if self.kind == "chunked":
            assert self.chunk is not None
            return position - position % self.chunk
        return position - 1 if self.kind == "recurrent" else 0

    def spec(self, index: int) -> Any:
        """The engine's own spec of this group, which has that index, as a worker sees it."""
        if not self.layer_bytes:
            return self._layer_spec(self.bytes_per_token)
        from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

        names = self.layer_names(index)
        return UniformTypeKVCacheSpecs(
            block_size=self.tokens_per_block,
            kv_cache_specs={
                name: self._layer_spec(size) for name, size in zip(names, self.layer_bytes, strict=True)
            },
        )

    def _layer_spec(self, bytes_per_token: int) -> Any:
        import torch
        from vllm.v1 import kv_cache_interface as engine

        if self.state_bytes is not None:
            # Two parts, as real ones have: floats of half of it each.
            parts = ((self.state_bytes // 8,),) * 2
            return engine.MambaSpec(
                block_size=self.tokens_per_block,
                shapes=parts,
                dtypes=(torch.float32, torch.float32),
                mamba_cache_mode=self.state_mode,
                page_size_padded=self.padded_bytes,
                num_speculative_blocks=self.spare_states,
            )
        # One head; K and V of bytes_per_token / 8 floats each.
        common: dict[str, Any] = {
            "block_size": self.tokens_per_block,
            "num_kv_heads": 1,
            "head_size": bytes_per_token // 8,
            "dtype": torch.float32,
        }
        latent = {**common, "head_size": bytes_per_token // 4}
        if self.kind == "replay":
            return engine.SlidingWindowMLASpec(**latent, sliding_window=self.window, bounded_replay=True)
        if self.kind == "ring":
            return engine.CircularBufferSpec(**common)
        if self.kind == "sliding":
            assert self.window is not None
            return engine.SlidingWindowSpec(
                **common, sliding_window=self.window, extra_retained_tokens=self.extra_tokens
            )
        if self.kind == "chunked":
            assert self.chunk is not None
            return engine.ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.chunk)
        if self.replicated:
            return engine.MLAAttentionSpec(**latent, max_tp_shards=1)
        return engine.FullAttentionSpec(**common)
