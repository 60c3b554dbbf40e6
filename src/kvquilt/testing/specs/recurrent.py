"""Models that mix attention with recurrent states: gated delta nets and Mamba-2."""

from __future__ import annotations

from typing import Any

from kvquilt.testing.specs.base import ModelSpec, WeightScale, base_config, planned_groups, rope

__all__ = ["FAMILY"]

# The CPU kernel of Mamba-2 leaves out the states inside a chunk of prompt, which the engine then
# looks for: no request may get more than one block of tokens in a step.
_MAMBA2_ENGINE = {"dtype": "float32", "block_size": 128, "max_num_batched_tokens": 128}
# States that fade within a few tokens would be forgotten before anything could be read from them.
_SLOW_DECAY = {"A_log": -4.0}
# 16 bits and heads of 128 are what the CPU kernel of gated delta nets takes. In 16 bits near ties are
# common, so a hit must be computed in the very steps in which a cold prompt is: one block each.
_GDN_ENGINE = {"dtype": "bfloat16", "block_size": 32, "max_num_batched_tokens": 160}
# The norms of these models add 1 to their weight, but for the one behind the recurrence.
_GDN_WEIGHTS = WeightScale(mean_by_name={**_SLOW_DECAY, "linear_attn.norm": 1.0})


def _spec(config: dict[str, Any], engine: dict[str, Any], notes: str, **more: Any) -> ModelSpec:
    weights = WeightScale(norm_mean=1.0, mean_by_name=_SLOW_DECAY)
    return ModelSpec(
        config=config,
        engine=engine,
        groups=planned_groups(config, engine),
        weights=more.pop("weights", weights),
        notes=notes,
        **more,
    )


def _gdn_config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return base_config(
        architecture,
        model_type,
        dtype="bfloat16",
        num_hidden_layers=4,
        num_key_value_heads=4,
        head_dim=64,
        hidden_act="silu",
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        partial_rotary_factor=0.25,
        rope_parameters=rope(partial_rotary_factor=0.25),
        **more,
    )


def _qwen3_next() -> ModelSpec:
    config = _gdn_config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        decoder_sparse_step=1,
        mlp_only_layers=[0, 1, 2],
        moe_intermediate_size=64,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=False,
    )
    notes = "Qwen3-Next: three gated delta nets for each full layer, 16 bits"
    return _spec(config, _GDN_ENGINE, notes, weights=_GDN_WEIGHTS, concurrency=1, split_experts=True)


def _qwen35() -> ModelSpec:
    config = _gdn_config("Qwen3_5ForCausalLM", "qwen3_5_text", tie_word_embeddings=True)
    notes = "Qwen 3.5: three gated delta nets for each full layer, 16 bits"
    return _spec(config, _GDN_ENGINE, notes, weights=_GDN_WEIGHTS, concurrency=1, stubs=("torchvision",))


def _granite_hybrid() -> ModelSpec:
    config = base_config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        num_hidden_layers=4,
        hidden_act="silu",
        layer_types=["mamba", "mamba", "mamba", "attention"],
        attention_multiplier=0.1,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        position_embedding_type="nope",
        num_experts_per_tok=0,
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_chunk_size=4096,
        mamba_d_conv=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=8,
        tie_word_embeddings=True,
    )
    return _spec(config, _MAMBA2_ENGINE, "Granite 4 hybrid: three Mamba-2 layers for each full layer")


def _falcon_h1() -> ModelSpec:
    config = base_config(
        "FalconH1ForCausalLM",
        "falcon_h1",
        num_hidden_layers=2,
        head_dim=32,
        hidden_act="silu",
        mamba_chunk_size=4096,
        mamba_d_conv=4,
        mamba_d_head=32,
        mamba_d_ssm=256,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=8,
        mlp_multipliers=[1.0, 1.0],
        ssm_multipliers=[1.0] * 5,
        rope_parameters=rope(),
        tie_word_embeddings=True,
    )
    return _spec(config, _MAMBA2_ENGINE, "Falcon H1: attention and Mamba-2 side by side in every layer")


def _nemotron_h() -> ModelSpec:
    config = base_config(
        "NemotronHForCausalLM",
        "nemotron_h",
        num_hidden_layers=4,
        head_dim=32,
        hybrid_override_pattern="M-M*",
        layers_block_type=["mamba", "mlp", "mamba", "attention"],
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        chunk_size=4096,
        conv_kernel=4,
        expand=2,
        mamba_head_dim=32,
        mamba_num_heads=8,
        n_groups=1,
        ssm_state_size=16,
        tie_word_embeddings=True,
    )
    return _spec(config, _MAMBA2_ENGINE, "Nemotron-H: Mamba-2, MLP and attention as layers of their own")


FAMILY = {
    "qwen3-next-mini": _qwen3_next(),
    "qwen3.5-mini": _qwen35(),
    "granite-hybrid-mini": _granite_hybrid(),
    "falcon-h1-mini": _falcon_h1(),
    "nemotron-h-mini": _nemotron_h(),
}
"""Tiny models by name."""
