"""The table of tiny models: what each looks like and what the engine needs to run it.

The shapes are chosen so that a laptop prefills 2,000 tokens in tens of milliseconds, while the
cache groups have the structure of the full-size model: the same kinds, several groups, block sizes
that differ where the real model's differ. A new model is one more entry in `SPECS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvquilt.layout import CacheGroup, CacheLayout

__all__ = ["SPECS", "ModelSpec", "WeightScale"]

_VOCABULARY = 2048
_MAX_POSITIONS = 32768
_SLIDING_TO_FULL = 5
_WINDOW = 64


@dataclass(frozen=True)
class WeightScale:
    """How random weights are drawn, so that attention decides what the model says.

    A tied embedding of standard deviation 1 makes a model echo its last token, and weights near
    zero make it say one token for ever; neither would notice a wrong cache.

    embedding, matrix, vector: standard deviations of embeddings, other matrices, and vectors.
    norm_mean: mean of the vectors that scale a normalised input (1 where the model does not add 1).
    by_name: standard deviations for parameters whose name contains the key; the first match wins.
    """

    embedding: float = 0.05
    matrix: float = 0.2
    vector: float = 0.1
    norm_mean: float = 0.0
    by_name: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """One tiny model.

    config: its `config.json`.
    engine: engine arguments that it cannot run without (`dtype`, `block_size`, ...).
    groups: the cache groups that vLLM makes of it with those arguments, in the engine's order.
    weights: how its weights are drawn.
    notes: what is worth knowing about it, for tables and docs.
    """

    config: Mapping[str, Any]
    engine: Mapping[str, Any]
    groups: tuple[CacheGroup, ...]
    weights: WeightScale
    notes: str

    @property
    def layout(self) -> CacheLayout:
        """The layout that the engine's groups make."""
        return CacheLayout(self.groups)


def _group_layers(count: int) -> list[str]:
    return ["sliding_attention"] * (count - 1) + ["full_attention"]


def _rope(**by_layer_type: float) -> dict[str, Any]:
    return {name: {"rope_type": "default", "rope_theta": theta} for name, theta in by_layer_type.items()}


def _base(architecture: str, model_type: str, **config: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": _MAX_POSITIONS,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "float32",
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        **config,
    }


def _layer(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def _sliding_groups(tokens_per_block: int, page_bytes: int) -> list[CacheGroup]:
    return [
        CacheGroup(
            f"sliding.{i}",
            kind="sliding",
            tokens_per_block=tokens_per_block,
            page_bytes=page_bytes,
            window=_WINDOW,
            layers=(_layer(i),),
        )
        for i in range(_SLIDING_TO_FULL)
    ]


def _full_group(tokens_per_block: int, page_bytes: int, *layers: int) -> CacheGroup:
    return CacheGroup(
        "full",
        kind="full",
        tokens_per_block=tokens_per_block,
        page_bytes=page_bytes,
        layers=tuple(_layer(i) for i in layers),
    )


def _gemma3() -> ModelSpec:
    config = _base(
        "Gemma3ForCausalLM",
        "gemma3_text",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        # Scores unscaled, as in Gemma 4: sharp attention, which a zeroed group visibly upsets.
        query_pre_attn_scalar=1,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attention_dropout=0.0,
        sliding_window=_WINDOW,
        layer_types=_group_layers(6),
        rope_parameters=_rope(sliding_attention=1e4, full_attention=1e6),
        tie_word_embeddings=True,
    )
    page = 2 * 2 * 32 * 4 * 32
    return ModelSpec(
        config=config,
        engine={"dtype": "float32", "block_size": 32},
        groups=(*_sliding_groups(32, page), _full_group(32, page, 5)),
        weights=WeightScale(),
        notes="Gemma 3: five sliding layers for each full one, equal blocks",
    )


def _gemma4() -> ModelSpec:
    config = _base(
        "Gemma4ForCausalLM",
        "gemma4_text",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_global_key_value_heads=1,
        global_head_dim=64,
        attention_k_eq_v=False,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=_WINDOW,
        layer_types=_group_layers(6),
        rope_parameters=_rope(sliding_attention=1e4, full_attention=1e6),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=_VOCABULARY,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        tie_word_embeddings=True,
    )
    page = 2 * 2 * 32 * 4 * 64
    return ModelSpec(
        config=config,
        engine={"dtype": "float32", "block_size": 32},
        groups=(*_sliding_groups(64, page), _full_group(32, page, 5)),
        weights=WeightScale(norm_mean=1.0),
        notes="Gemma 4: full layers have wider heads, so sliding blocks hold 64 tokens and full ones 32",
    )


def _plain() -> ModelSpec:
    config = _base(
        "Qwen3ForCausalLM",
        "qwen3",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    )
    return ModelSpec(
        config=config,
        engine={"dtype": "float32", "block_size": 32},
        groups=(_full_group(32, 4 * 2 * 2 * 32 * 4 * 32, 0, 1, 2, 3),),
        weights=WeightScale(norm_mean=1.0),
        notes="Qwen 3: one full group, the case without any hybrid",
    )


SPECS: Mapping[str, ModelSpec] = {
    "gemma3-mini": _gemma3(),
    "gemma4-mini": _gemma4(),
    "plain-mini": _plain(),
}
"""Tiny models by name."""
