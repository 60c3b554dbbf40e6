"""Layouts from config.json: groups, blocks and pages as vLLM 0.32 makes them.

The tables were read off a running engine on a CPU, with random weights at these sizes.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog import build as catalog_build
from kvquilt.layout.catalog import known_model_types, layout_from_config

TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "dtype": "bfloat16"}
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]

GEMMA3 = {
    **TINY,
    "model_type": "gemma3_text",
    "head_dim": 32,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
GEMMA4 = {
    **GEMMA3,
    "model_type": "gemma4_text",
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": False,
}
GPT_OSS = {**TINY, "model_type": "gpt_oss", "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 128}
LLAMA4 = {
    **TINY,
    "model_type": "llama4_text",
    "head_dim": 32,
    "num_hidden_layers": 4,
    "attention_chunk_size": 256,
}
QWEN3_NEXT = {
    **TINY,
    "model_type": "qwen3_next",
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
GRANITE = {
    **TINY,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
FALCON_H1 = {
    **GRANITE,
    "model_type": "falcon_h1",
    "head_dim": 32,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 256,
    "layer_types": None,
}
NEMOTRON_H = {
    **TINY,
    "model_type": "nemotron_h",
    "head_dim": 32,
    "hybrid_override_pattern": "M-M*",
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 1,
    "conv_kernel": 4,
}
DEEPSEEK = {
    **TINY,
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
MIMO = {
    **TINY,
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "v_head_dim": 32,
    "swa_head_dim": 64,
    "swa_v_head_dim": 32,
    "swa_num_key_value_heads": 4,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
}

SLIDING5 = [f"sliding.{i}" for i in range(5)]


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are of a CPU with these instruction sets; layouts must not vary with the tester's."""
    monkeypatch.setattr(catalog_build, "_cpu_flags", lambda: frozenset({"avx512_bf16", "amx_tile"}))


def row(config: dict[str, Any], **options: Any) -> list[tuple[str, int, int, int]]:
    """(name, layers, tokens per block, page bytes) of each group."""
    made = layout_from_config(config, device=options.pop("device", "cpu"), **options)
    return [
        (g.name, f.num_layers, g.tokens_per_block, g.page_bytes)
        for g, f in zip(made.layout.groups, made.facts, strict=True)
    ]


ENGINE_TABLE: list[tuple[str, dict[str, Any], dict[str, Any], list[tuple[str, int, int, int]]]] = [
    ("gemma3", GEMMA3, {}, [*((n, 1, 128, 32_768) for n in SLIDING5), ("full", 1, 128, 32_768)]),
    (
        "gemma3, blocks of 16 become 32",
        GEMMA3,
        {"block_size": 16},
        [*((n, 1, 32, 8192) for n in SLIDING5), ("full", 1, 32, 8192)],
    ),
    ("gemma4", GEMMA4, {}, [*((n, 1, 256, 65_536) for n in SLIDING5), ("full", 1, 128, 65_536)]),
    (
        "gemma4, blocks of 32",
        GEMMA4,
        {"block_size": 32},
        [*((n, 1, 64, 16_384) for n in SLIDING5), ("full", 1, 32, 16_384)],
    ),
    (
        "gemma4 in float32",
        GEMMA4,
        {"block_size": 32, "dtype": "float32"},
        [*((n, 1, 64, 32_768) for n in SLIDING5), ("full", 1, 32, 32_768)],
    ),
    ("gpt-oss", GPT_OSS, {}, [("sliding", 2, 128, 65_536), ("full", 2, 128, 65_536)]),
    ("llama4", LLAMA4, {}, [*((f"chunked.{i}", 1, 128, 32_768) for i in range(3)), ("full", 1, 128, 32_768)]),
    (
        "qwen3-next",
        QWEN3_NEXT,
        {},
        [*((f"recurrent.{i}", 1, 640, 268_288) for i in range(3)), ("full", 1, 640, 327_680)],
    ),
    (
        "granite hybrid",
        GRANITE,
        {},
        [*((f"recurrent.{i}", 1, 128, 18_112) for i in range(3)), ("full", 1, 128, 32_768)],
    ),
    (
        "granite hybrid in float32",
        GRANITE,
        {"dtype": "float32"},
        [*((f"recurrent.{i}", 1, 128, 19_840) for i in range(3)), ("full", 1, 128, 65_536)],
    ),
    ("falcon-h1", FALCON_H1, {}, [("full", 2, 128, 65_536), ("recurrent", 2, 128, 36_224)]),
    (
        "nemotron-h",
        NEMOTRON_H,
        {},
        [("recurrent.0", 1, 128, 18_112), ("recurrent.1", 1, 128, 18_112), ("full", 1, 128, 32_768)],
    ),
    ("deepseek-v2", DEEPSEEK, {}, [("full", 3, 128, 442_368)]),
    (
        "mimo-v2",
        MIMO,
        {},
        [
            ("full", 2, 256, 2 * 256 * 2 * 96 * 2),
            ("sliding.0", 2, 128, 2 * 128 * 4 * 96 * 2),
            ("sliding.1", 2, 128, 2 * 128 * 4 * 96 * 2),
        ],
    ),
    *(
        (
            kind,
            {
                **TINY,
                "model_type": kind,
                "num_hidden_layers": 4,
                "sliding_window": 64,
                "layer_types": THREE_TO_ONE,
            },
            {},
            [*((f"sliding.{i}", 1, 128, 32_768) for i in range(3)), ("full", 1, 128, 32_768)],
        )
        for kind in ("olmo3", "exaone4", "cohere2")
    ),
]


@pytest.mark.parametrize(
    ("config", "options", "expected"), [c[1:] for c in ENGINE_TABLE], ids=[c[0] for c in ENGINE_TABLE]
)
def test_groups_are_the_engines(
    config: dict[str, Any], options: dict[str, Any], expected: list[tuple[str, int, int, int]]
) -> None:
    assert row(config, **options) == expected


def test_layer_names_are_the_engines() -> None:
    names = [
        layout_from_config(c, device="cpu").layout.groups[0].layers for c in (GEMMA3, GPT_OSS, FALCON_H1)
    ]
    assert names == [
        ("model.layers.0.self_attn.attn",),
        ("model.layers.0.attn.attn", "model.layers.2.attn.attn"),
        ("model.layers.0.attn", "model.layers.1.attn"),
    ]
    assert layout_from_config(FALCON_H1, device="cpu").layout.groups[1].layers == (
        "model.2.mixer",
        "model.3.mixer",
    )


def test_windows_and_chunks() -> None:
    assert layout_from_config(GEMMA3).layout.groups[0].window == 64
    assert layout_from_config(LLAMA4).layout.groups[0].chunk == 256
    cohere = {**TINY, "model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 64}
    assert layout_from_config(cohere).layout.groups[0].window == 65, "its window leaves the token itself out"


def test_a_gpu_starts_from_blocks_of_16() -> None:
    assert row(GEMMA3, device="cuda")[0] == ("sliding.0", 1, 16, 4096)
    assert row(GEMMA4, device="cuda") == [*((n, 1, 32, 8192) for n in SLIDING5), ("full", 1, 16, 8192)]


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "kv_dtype", "blocks"),
    [(4, "float32", "auto", 528), (4, "float32", "fp8", 1056), (2, "bfloat16", "auto", 544)],
)
def test_block_sizes_seen_in_the_field(kv_heads: int, dtype: str, kv_dtype: str, blocks: int) -> None:
    """Qwen3.5-4B: 528, 1,056 with an fp8 cache; Qwen3-Next with 16-bit states: 544."""
    config = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "dtype": "bfloat16",
    }
    made = layout_from_config(config, state_dtype=dtype, kv_dtype=kv_dtype)
    assert {g.tokens_per_block for g in made.layout.groups} == {blocks}
    assert [g.kind for g in made.layout.groups] == ["recurrent"] * 3 + ["full"]


def test_pages_of_one_rank_shrink_until_heads_are_replicated() -> None:
    pages = [row(GEMMA3, tp=tp, device="cuda")[-1][3] for tp in (1, 2, 4)]
    assert pages == [4096, 2048, 2048]
    facts = layout_from_config(GEMMA3, tp=4).facts
    assert {f.copies for f in facts} == {2}
    assert layout_from_config(DEEPSEEK, tp=4).facts[0].copies == 4
    states = [row(QWEN3_NEXT, tp=tp, device="cuda")[0][3] for tp in (1, 2)]
    assert states[1] * 2 == states[0]


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3: the 2 KV heads"):
        layout_from_config(GEMMA3, tp=3)


def test_quantised_caches() -> None:
    assert row(GEMMA3, kv_dtype="fp8", device="cuda")[0][3] == 2048
    wide = {**GEMMA3, "num_key_value_heads": 16, "head_dim": 256}
    made = layout_from_config(wide, kv_dtype="int8_per_token_head")
    assert made.layout.groups[0].page_bytes == 16 * 8320, "a float32 scale for each head's K and V"


def test_b77_layers_that_read_anothers_kv_own_nothing() -> None:
    config = {
        **GEMMA4,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    }
    made = layout_from_config(config)
    owned = [name for g in made.layout.groups for name in g.layers]
    assert len(owned) == 15
    assert sum(f.num_layers for f, g in zip(made.facts, made.layout.groups, strict=True) if g.dense) == 3
    assert any("20 layers read the KV of earlier layers" in note for note in made.notes)
    gemma3n = {"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_attention_heads": 8}
    groups = layout_from_config({**gemma3n, "dtype": "bfloat16"}).layout.groups
    assert sum(len(g.layers) for g in groups) == 20


def test_b76_gemma3_at_full_size_has_the_full_group_last() -> None:
    config = {**GEMMA3, "num_hidden_layers": 48, "layer_types": None, "sliding_window_pattern": 6}
    made = layout_from_config(config)
    assert [g.kind for g in made.layout.groups] == ["sliding"] * 5 + ["full"]
    assert [f.num_layers for f in made.facts] == [8] * 6


def test_nearly_equal_counts_make_groups_of_the_larger() -> None:
    """12 window and 13 full layers: two groups, not three."""
    types = ["sliding_attention", "full_attention"] * 12 + ["full_attention"]
    config = {**GEMMA3, "num_hidden_layers": 25, "layer_types": types}
    assert [f.num_layers for f in layout_from_config(config).facts] == [12, 13]


def test_plain_models_are_one_group() -> None:
    llama = {**TINY, "model_type": "llama", "num_hidden_layers": 4}
    assert row(llama, device="cuda") == [("full", 4, 16, 16_384)]
    swa = {**llama, "model_type": "mistral", "sliding_window": 256}
    assert [g.kind for g in layout_from_config(swa).layout.groups] == ["sliding"]
    unused = {**llama, "model_type": "qwen2", "sliding_window": 256, "use_sliding_window": False}
    assert [g.kind for g in layout_from_config(unused).layout.groups] == ["full"]


def test_a_text_part_inside_a_wrapper_is_found() -> None:
    wrapped = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"hidden_size": 9}}
    assert row(wrapped) == row(GEMMA3)
    assert layout_from_config(wrapped).layout.groups[0].layers[0].startswith("language_model.model.layers.0.")
    bare = {k: v for k, v in GEMMA3.items() if k not in ("model_type", "dtype")}
    assert row({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": bare}) == row(GEMMA3)
    thinker = {"model_type": "x", "thinker_config": {"text_config": GEMMA3}}
    assert row(thinker) == row(GEMMA3)


def test_sparse_latents_keep_their_index_keys_in_the_same_group() -> None:
    config = {**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
    assert row(config, device="cuda", block_size=64) == [("full", 6, 64, 3 * 64 * (576 * 2 + 132))]
    assert row(config, device="cuda", block_size=64, kv_dtype="fp8")[0][3] == 3 * 64 * (656 + 132)


def test_deepseek_v4_has_windows_compressed_latents_and_compressor_states() -> None:
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "compress_ratios": [0, 4, 128, 4],
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        "dtype": "bfloat16",
    }
    made = layout_from_config(config)
    kinds = {(g.kind, g.tokens_per_block, g.window) for g in made.layout.groups}
    assert kinds == {("full", 256, None), ("sliding", 64, 128), ("sliding", 4, 8), ("sliding", 8, 128)}
    assert made.layout.lattice_tokens == 256
    full = next(g for g in made.layout.groups if g.dense)
    assert full.page_bytes == 2 * 64 * (584 + 132) + 2 * 584
    window = [g for g in made.layout.groups if g.tokens_per_block == 64]
    assert sum(g.page_bytes for g in window) == 4 * 64 * 584
    with pytest.raises(ConfigError, match="laid out for fp8 only"):
        layout_from_config(config, kv_dtype="bfloat16")


def test_float32_checkpoints_run_in_16_bits_unless_asked() -> None:
    config = {**GEMMA3, "dtype": "float32"}
    made = layout_from_config(config)
    assert made.dtype == "bfloat16"
    assert any("float32 checkpoint" in note for note in made.notes)
    assert layout_from_config(config, dtype="float32").layout.groups[0].page_bytes == 8192


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({"model_type": "martian"}, {}, "unknown architecture: model_type='martian'"),
        ({}, {}, "unknown architecture: model_type=None"),
        ({"architectures": ["MarsForCausalLM"]}, {}, "architectures='MarsForCausalLM'"),
        ({"model_type": "llama"}, {}, "num_hidden_layers is missing"),
        ({**GEMMA3, "num_hidden_layers": "six"}, {}, "num_hidden_layers='six' must be an integer"),
        ({**GEMMA3, "num_hidden_layers": 0}, {}, "num_hidden_layers=0 must be at least 1"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, {}, "layer_types=.* one entry for each of 6"),
        ({**GEMMA3, "layer_types": ["dilated"] * 6}, {}, "layer_types='dilated' allowed are"),
        ({**DEEPSEEK, "kv_lora_rank": None}, {}, "kv_lora_rank is missing"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?*"}, {}, "unknown letters"),
        ({**NEMOTRON_H, "hybrid_override_pattern": None}, {}, "hybrid_override_pattern is missing"),
        (GEMMA3, {"tp": 0}, "tp=0"),
        (GEMMA3, {"block_size": 0}, "block_size=0"),
        (GEMMA3, {"kv_dtype": "fp3"}, "kv_dtype='fp3': allowed are auto"),
        (GEMMA3, {"device": "tpu"}, "device='tpu'"),
        (GEMMA3, {"engine": "other"}, "engine='other'"),
        ({**TINY, "model_type": "llama", "num_hidden_layers": 2}, {"block_size": 24}, "multiples of 16"),
        (QWEN3_NEXT, {"tp": 3}, "tp=3"),
    ],
)
def test_bad_input_is_told(config: dict[str, Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        layout_from_config(config, **options)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        layout_from_config(["gemma3"])  # type: ignore[arg-type]


def test_known_types_are_listed() -> None:
    known = known_model_types()
    assert known == sorted(known)
    assert {"gemma3n", "gpt_oss", "qwen3_5_moe", "deepseek_v4", "mimo_v2_flash", "phi3", "glm4"} <= set(known)
