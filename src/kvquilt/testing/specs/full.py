"""Models of full attention alone: keys and values, or one latent for both."""

from __future__ import annotations

from kvquilt.testing.specs.base import ModelSpec, WeightScale, base_config, planned_groups, rope

__all__ = ["FAMILY"]


def _plain() -> ModelSpec:
    config = base_config(
        "Qwen3ForCausalLM",
        "qwen3",
        num_hidden_layers=4,
        head_dim=32,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        rope_parameters=rope(),
        tie_word_embeddings=True,
    )
    engine = {"dtype": "float32", "block_size": 32}
    return ModelSpec(
        config=config,
        engine=engine,
        groups=planned_groups(config, engine),
        weights=WeightScale(norm_mean=1.0),
        notes="Qwen 3: one full group, the case without any hybrid",
    )


def _mla() -> ModelSpec:
    config = base_config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        dtype="bfloat16",
        num_hidden_layers=3,
        num_key_value_heads=4,
        hidden_act="silu",
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=3,
        moe_intermediate_size=64,
        n_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        norm_topk_prob=False,
        num_experts_per_tok=1,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        topk_group=1,
        topk_method="greedy",
        rope_scaling=None,
        rope_parameters=rope(),
        tie_word_embeddings=False,
    )
    # In 16 bits a hit must be computed in the very steps in which a cold prompt is: one block each.
    engine = {"dtype": "bfloat16", "block_size": 32, "max_num_batched_tokens": 32}
    return ModelSpec(
        config=config,
        engine=engine,
        groups=planned_groups(config, engine),
        weights=WeightScale(norm_mean=1.0),
        notes="DeepSeek V2: one latent a token for keys and values (MLA), 16 bits",
        concurrency=1,
    )


FAMILY = {"plain-mini": _plain(), "mla-mini": _mla()}
"""Tiny models by name."""
