"""Tiny config.json files, one per family of models that the engine runs on a CPU.

They have the structure of the full-size models and their oddities: a last layer that slides, layers
that own no KV, pages that do not divide. Weights are up to the engine: nothing here depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SERVED", "TinyModel"]

VOCABULARY = 512
_S, _F, _C = "sliding_attention", "full_attention", "chunked_attention"
_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class TinyModel:
    """One model and how the engine is asked to run it.

    config: its config.json. dtype, block_size: as the options of the engine and of `kvquilt plan`.
    groups: kind, layers and tokens per block of each cache group, in order; empty where they depend on
    the processor.
    generates: False if the engine starts it here but has no kernels for it, or if its blocks are longer
    than a test's prompt. batch_tokens: the most that the engine may compute in one step.
    """

    config: dict[str, Any]
    groups: tuple[tuple[str, int, int], ...] = ()
    block_size: int | None = 32
    dtype: str = "float32"
    generates: bool = True
    batch_tokens: int = 2048


def _config(architecture: str, model_type: str, num_layers: int, **more: Any) -> dict[str, Any]:
    base = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    return base | more


def _two_ropes() -> dict[str, Any]:
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ((_S, 1e4), (_F, 1e6))}


def _windowed(architecture: str, model_type: str, types: list[str], **more: Any) -> dict[str, Any]:
    more = {"sliding_window": 64, "layer_types": types} | more
    return _config(architecture, model_type, len(types), **more)


def _gemma2() -> dict[str, Any]:
    return _windowed(
        "Gemma2",
        "gemma2",
        [_S, _F, _S, _F],
        head_dim=32,
        hidden_activation=_GELU,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )


def _gemma3(types: list[str]) -> dict[str, Any]:
    return _windowed(
        "Gemma3",
        "gemma3_text",
        types,
        head_dim=32,
        hidden_activation=_GELU,
        query_pre_attn_scalar=32,
        rope_parameters=_two_ropes(),
    )


def _gemma3n(types: list[str], shared: int) -> dict[str, Any]:
    return _windowed(
        "Gemma3n",
        "gemma3n_text",
        types,
        head_dim=32,
        hidden_activation=_GELU,
        rope_parameters=_two_ropes(),
        intermediate_size=[256] * len(types),
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        activation_sparsity_pattern=[0.0] * len(types),
        altup_num_inputs=2,
        laurel_rank=8,
        num_kv_shared_layers=shared,
        final_logit_softcapping=30.0,
    )


def _gemma4(types: list[str], shared: int = 0, **more: Any) -> dict[str, Any]:
    more = {
        "head_dim": 32,
        "global_head_dim": 64,
        "attention_k_eq_v": False,
        "hidden_activation": _GELU,
        "rope_parameters": _two_ropes(),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "num_kv_shared_layers": shared,
        "tie_word_embeddings": True,
    } | more
    return _windowed("Gemma4", "gemma4_text", types, **more)


def _gpt_oss() -> dict[str, Any]:
    return _windowed(
        "GptOss",
        "gpt_oss",
        [_S, _F, _S, _F],
        head_dim=32,
        attention_bias=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=7.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 2048,
            "truncate": False,
        },
    )


def _mimo_v2() -> dict[str, Any]:
    """V narrower than K, and more KV heads in the layers that slide."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return _windowed(
        "MiMoV2Flash",
        "mimo_v2_flash",
        [_F, _S, _S],
        hybrid_layer_pattern=[0, 1, 1],
        head_dim=64,
        v_head_dim=32,
        swa_head_dim=64,
        swa_v_head_dim=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        sliding_window_size=64,
        attention_bias=False,
        attention_value_scale=0.707,
        add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=False,
        layernorm_epsilon=1e-5,
        rope_parameters={_S: rope, _F: rope},
        rope_theta=10000.0,
        swa_rope_theta=10000.0,
        partial_rotary_factor=0.5,
        moe_layer_freq=[0, 0, 0],
        n_routed_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )


def _granite_hybrid() -> dict[str, Any]:
    return _config(
        "GraniteMoeHybrid",
        "granitemoehybrid",
        4,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        attention_multiplier=0.1,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        position_embedding_type="nope",
        num_experts_per_tok=0,
        num_local_experts=0,
        shared_intermediate_size=128,
        tie_word_embeddings=True,
        mamba_chunk_size=4096,
        mamba_d_conv=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=8,
    )


def _falcon_h1() -> dict[str, Any]:
    return _config(
        "FalconH1",
        "falcon_h1",
        2,
        head_dim=32,
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
        tie_word_embeddings=True,
    )


def _nemotron_h() -> dict[str, Any]:
    return _config(
        "NemotronH",
        "nemotron_h",
        4,
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


def _qwen3_next() -> dict[str, Any]:
    return _config(
        "Qwen3Next",
        "qwen3_next",
        4,
        head_dim=64,
        layer_types=["linear_attention"] * 3 + [_F],
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=64,
        partial_rotary_factor=0.25,
        tie_word_embeddings=True,
    )


def _llama4() -> dict[str, Any]:
    return _config(
        "Llama4",
        "llama4_text",
        4,
        head_dim=32,
        layer_types=[_C, _C, _C, _F],
        no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=256,
        attn_temperature_tuning=False,
        attention_bias=False,
        interleave_moe_layer_step=0,
        moe_layers=[],
        intermediate_size_mlp=256,
        num_experts_per_tok=1,
        num_local_experts=2,
        use_qk_norm=True,
        tie_word_embeddings=True,
    )


def _deepseek_v2() -> dict[str, Any]:
    return _config(
        "DeepseekV2",
        "deepseek_v2",
        2,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
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
    )


SERVED: dict[str, TinyModel] = {
    "gemma2": TinyModel(_gemma2(), (("sliding", 2, 32), ("full", 2, 32))),
    "gemma3": TinyModel(_gemma3([_S] * 5 + [_F]), (*(("sliding", 1, 32),) * 5, ("full", 1, 32))),
    "gemma3-last-slides": TinyModel(
        _gemma3([_S, _S, _F, _S, _S, _F, _S]),
        (*(("sliding", 2, 32),) * 2, ("sliding", 1, 32), ("full", 2, 32)),
    ),
    "gemma3n": TinyModel(_gemma3n([_S, _S, _F], 0), (*(("sliding", 1, 32),) * 2, ("full", 1, 32))),
    "gemma3n-shared": TinyModel(
        _gemma3n([_S, _S, _F, _S, _F], 2), (*(("sliding", 1, 32),) * 2, ("full", 1, 32))
    ),
    "gemma4": TinyModel(_gemma4([_S, _S, _F]), (*(("sliding", 1, 64),) * 2, ("full", 1, 32))),
    "gemma4-defaults": TinyModel(
        _gemma4([_S, _S, _F]), (*(("sliding", 1, 256),) * 2, ("full", 1, 128)), block_size=None, dtype="auto"
    ),
    "gemma4-shared": TinyModel(
        _gemma4([_S, _S, _F, _S, _F], 2), (*(("sliding", 1, 64),) * 2, ("full", 1, 32))
    ),
    "gemma4-padded": TinyModel(
        _gemma4(
            [_S, _S, _F],
            hidden_size=192,
            num_attention_heads=6,
            num_key_value_heads=3,
            attention_k_eq_v=True,
            num_global_key_value_heads=2,
        ),
        (*(("sliding", 1, 32),) * 2, ("full", 1, 32)),
    ),
    "gpt-oss": TinyModel(_gpt_oss(), (("sliding", 2, 32), ("full", 2, 32))),
    "cohere2": TinyModel(
        _windowed("Cohere2", "cohere2", [_S, _S, _S, _F], layer_norm_eps=1e-5, logit_scale=0.25),
        (*(("sliding", 1, 32),) * 3, ("full", 1, 32)),
    ),
    "exaone4": TinyModel(
        _windowed("Exaone4", "exaone4", [_S, _S, _S, _F], head_dim=32, sliding_window_pattern="LLLG"),
        (*(("sliding", 1, 32),) * 3, ("full", 1, 32)),
    ),
    "olmo3": TinyModel(
        _windowed("Olmo3", "olmo3", [_S, _S, _S, _F]),
        (*(("sliding", 1, 128),) * 3, ("full", 1, 128)),
        block_size=None,
    ),
    "mimo-v2": TinyModel(_mimo_v2(), (("full", 1, 64), *(("sliding", 1, 32),) * 2), generates=False),
    "llama": TinyModel(_config("Llama", "llama", 2), (("full", 2, 32),)),
    "qwen3": TinyModel(
        _config("Qwen3", "qwen3", 2, head_dim=32), (("full", 2, 128),), block_size=None, dtype="auto"
    ),
    "mistral": TinyModel(_config("Mistral", "mistral", 2, sliding_window=None), (("full", 2, 32),)),
    "mistral-v0.1": TinyModel(_config("Mistral", "mistral", 2, sliding_window=64), (("sliding", 2, 32),)),
    "llama4": TinyModel(_llama4(), (*(("chunked", 1, 32),) * 3, ("full", 1, 32))),
    "granite-hybrid": TinyModel(
        _granite_hybrid(), (*(("recurrent", 1, 64),) * 3, ("full", 1, 64)), batch_tokens=64
    ),
    "falcon-h1": TinyModel(_falcon_h1(), (("full", 2, 64), ("recurrent", 2, 64)), batch_tokens=64),
    "nemotron-h": TinyModel(_nemotron_h(), (*(("recurrent", 1, 64),) * 2, ("full", 1, 64)), batch_tokens=64),
    "qwen3-next": TinyModel(_qwen3_next(), dtype="bfloat16", generates=False),
    "deepseek-v2": TinyModel(_deepseek_v2(), dtype="bfloat16"),
}
"""Models by name."""
