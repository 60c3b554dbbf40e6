"""Models whose layers attend to a window or a chunk, with some full layers between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvquilt.layout import CacheGroup
from kvquilt.testing.specs.base import (
    VOCABULARY,
    ModelSpec,
    WeightScale,
    base_config,
    planned_groups,
    rope,
)

__all__ = ["FAMILY"]

_SLIDING_TO_FULL = 5
_WINDOW = 64


def _group_layers(count: int) -> list[str]:
    return ["sliding_attention"] * (count - 1) + ["full_attention"]


def _ropes(**by_layer_type: float) -> dict[str, Any]:
    return {name: rope(theta) for name, theta in by_layer_type.items()}


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
    config = base_config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_hidden_layers=6,
        head_dim=32,
        # Scores unscaled, as in Gemma 4: sharp attention, which a zeroed group visibly upsets.
        query_pre_attn_scalar=1,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attention_dropout=0.0,
        sliding_window=_WINDOW,
        layer_types=_group_layers(6),
        rope_parameters=_ropes(sliding_attention=1e4, full_attention=1e6),
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
    config = base_config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        num_hidden_layers=6,
        head_dim=32,
        num_global_key_value_heads=1,
        global_head_dim=64,
        attention_k_eq_v=False,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=_WINDOW,
        layer_types=_group_layers(6),
        rope_parameters=_ropes(sliding_attention=1e4, full_attention=1e6),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
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


def _gemma4_draft() -> ModelSpec:
    target = _gemma4()
    drafter = base_config(
        "Qwen3ForCausalLM",
        "qwen3",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        hidden_act="silu",
        rope_parameters=rope(),
        tie_word_embeddings=True,
    )
    page = 2 * 32 * 4 * 128
    draft = CacheGroup(
        "draft.full",
        kind="full",
        tokens_per_block=128,
        page_bytes=page,
        layers=("draft_model.model.layers.0.self_attn.attn",),
    )
    return replace(
        target,
        groups=(*target.groups, draft),
        # Both models repeat their last token every other time: without that, random models never
        # agree, and no draft would be accepted.
        weights=replace(target.weights, embedding=0.09),
        drafter=ModelSpec(
            drafter, {}, (), WeightScale(embedding=0.3, matrix=0.1, norm_mean=1.0), "drafts for Gemma 4"
        ),
        # vLLM 0.32 lets the drafter write through the block table of group 0, over the first blocks of
        # each prompt there. What a prompt is computed from must be later ones: so one prompt in one
        # step, and hits in the second half (docs/matrix.md).
        concurrency=1,
        notes="Gemma 4 with a draft model: blocks of 64, 32 and 128 tokens",
    )


def _gpt_oss() -> ModelSpec:
    config = base_config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=4,
        head_dim=32,
        hidden_act="silu",
        attention_bias=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=7.0,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=rope(
            rope_type="yarn",
            factor=2.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=16384,
            truncate=False,
        ),
        tie_word_embeddings=False,
    )
    engine = {"dtype": "float32", "block_size": 32}
    return ModelSpec(
        config=config,
        engine=engine,
        groups=planned_groups(config, engine),
        weights=WeightScale(norm_mean=1.0, matrix=0.1),
        concurrency=1,  # its log-probs move by a last bit more or less from batch to batch
        notes="gpt-oss: sliding and full layers in turn, two of each, with sinks and experts",
    )


def _olmo3() -> ModelSpec:
    config = base_config(
        "Olmo3ForCausalLM",
        "olmo3",
        num_hidden_layers=4,
        hidden_act="silu",
        attention_bias=False,
        sliding_window=_WINDOW,
        layer_types=_group_layers(4),
        rope_parameters=rope(),
        tie_word_embeddings=False,
    )
    engine = {"dtype": "float32", "block_size": 32}
    return ModelSpec(
        config=config,
        engine=engine,
        groups=planned_groups(config, engine),
        weights=WeightScale(norm_mean=1.0),
        concurrency=1,  # its log-probs move by a last bit more or less from batch to batch
        notes="OLMo 3: three sliding layers for each full one",
    )


def _llama4() -> ModelSpec:
    config = base_config(
        "Llama4ForCausalLM",
        "llama4_text",
        num_hidden_layers=4,
        head_dim=32,
        hidden_act="silu",
        attention_bias=False,
        attention_chunk_size=256,
        attn_temperature_tuning=False,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
        interleave_moe_layer_step=0,
        moe_layers=[],
        intermediate_size_mlp=256,
        num_experts_per_tok=1,
        num_local_experts=2,
        rope_parameters=rope(),
        tie_word_embeddings=True,
    )
    engine = {"dtype": "float32", "block_size": 32}
    return ModelSpec(
        config=config,
        engine=engine,
        groups=planned_groups(config, engine),
        weights=WeightScale(norm_mean=1.0),
        notes="Llama 4: three layers that attend within chunks of 256 tokens, and one full layer",
    )


FAMILY = {
    "gemma3-mini": _gemma3(),
    "gemma4-mini": _gemma4(),
    "gemma4-draft-mini": _gemma4_draft(),
    "gpt-oss-mini": _gpt_oss(),
    "olmo3-mini": _olmo3(),
    "llama4-mini": _llama4(),
}
"""Tiny models by name."""
