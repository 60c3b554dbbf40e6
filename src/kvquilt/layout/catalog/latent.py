"""Layers of models that keep one latent for K and V (MLA), with the sparse and compressed kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog.reader import ModelConfig, Settings, dtype_bytes
from kvquilt.layout.catalog.spec import LayerSpec

__all__ = ["BLOCK_OUTERMOST", "FAMILIES"]

# Caches of an indexer exist only in layouts with the block outermost.
BLOCK_OUTERMOST = frozenset({"deepseek_v32", "deepseek_v4", "glm_moe_dsa"})

_DS_MLA_BYTES = 656  # fp8 latent with its scales and a 16-bit rotary part, as one opaque row
_INDEXER_SCALE_TOKENS = 128  # values per float32 scale of an fp8 index key
_V4_ROW_BYTES = 584
_V4_ALIGNMENT = 576
_V4_BLOCK = 256


def _indexer_bytes(config: ModelConfig) -> int:
    dim = config.integer("index_head_dim", 128)
    return dim + dim // _INDEXER_SCALE_TOKENS * 4


def mla(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """DeepSeek V2, V3 and kin: one latent and a rotary part a token, the same on every rank."""
    if config.values.get("kv_lora_rank") is None:
        raise config.error("kv_lora_rank", None, "is missing: without a latent this model is not known here")
    width = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim", 64)
    sparse = config.get("index_topk") is not None
    if settings.kv_dtype.endswith("_per_token_head"):
        raise ConfigError(f"kv_dtype={settings.kv_dtype!r}: not for latent (MLA) caches")
    row = width * dtype_bytes(settings.kv_dtype)
    if sparse and settings.kv_dtype.startswith("fp8"):
        row = _DS_MLA_BYTES
    block = settings.mla_block or settings.block
    layers = []
    for i in range(config.num_layers):
        name = f"{config.prefix}model.layers.{i}.self_attn"
        if sparse:
            key = f"{name}.indexer.k_cache"
            layers.append(
                LayerSpec(
                    key, "full", block, _indexer_bytes(config), mla=True, role="indexer", copies=settings.tp
                )
            )
        layers.append(LayerSpec(f"{name}.attn", "full", block, row, mla=True, copies=settings.tp))
    return layers


def deepseek_v4(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Per layer a window of raw latents, a compressed latent, and the state of its compressor.

    Only the fp8 row format of the FlashMLA kernels (584 bytes a token) is laid out here.
    """
    if settings.kv_dtype_given and not settings.kv_dtype.startswith("fp8"):
        raise ConfigError(f"kv_dtype={settings.kv_dtype!r}: DeepSeek V4 caches are laid out for fp8 only")
    layers: list[LayerSpec] = []
    for i, ratio in enumerate(_ratios(config)):
        layers += _v4_layer(config, f"{config.prefix}model.layers.{i}.attn", ratio)
    return [replace(spec, copies=settings.tp) for spec in layers]


def _v4_layer(config: ModelConfig, name: str, ratio: int) -> list[LayerSpec]:
    head, index = config.integer("head_dim", 512), config.integer("index_head_dim", 128)
    window = config.integer("sliding_window", 128)
    specs = []
    if ratio == 4:
        row = _indexer_bytes(config)
        specs.append(_v4_full(f"{name}.indexer.k_cache", row, ratio, role="indexer"))
        specs.append(_v4_state(f"{name}.indexer.compressor.state_cache", index, ratio))
    specs.append(_v4_window(f"{name}.swa_cache", 64, _V4_ROW_BYTES, window, role="latent"))
    if ratio > 1:
        specs.append(_v4_full(name, _V4_ROW_BYTES, ratio))
        specs.append(_v4_state(f"{name}.compressor.state_cache", head, ratio))
    return specs


def _v4_full(name: str, row: int, ratio: int, role: str = "") -> LayerSpec:
    return LayerSpec(
        name, "full", _V4_BLOCK, row, tokens_per_state=ratio, alignment=_V4_ALIGNMENT, mla=True, role=role
    )


def _v4_window(name: str, block: int, row: int, window: int, role: str) -> LayerSpec:
    return LayerSpec(name, "sliding", block, row, window=window, alignment=_V4_ALIGNMENT, mla=True, role=role)


def _v4_state(name: str, head: int, ratio: int) -> LayerSpec:
    """Open compression windows: two overlapping ones at ratio 4; K and score, float32."""
    overlap = 2 if ratio == 4 else 1
    row = 2 * overlap * head * 4
    return _v4_window(name, 4 if ratio == 4 else 8, row, overlap * ratio, role="compressor")


def _ratios(config: ModelConfig) -> list[int]:
    count = config.num_layers
    given = config.sequence("compress_ratios", count)
    if given is None:
        named = {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 128,
            "sliding_attention": 1,
        }
        types = config.sequence("layer_types", count)
        if types is None:
            return [128 if i < 2 or i % 2 == 0 else 4 for i in range(count)]
        given = [named.get(str(t), t) for t in types]
    for ratio in given[:count]:
        if ratio not in (0, 1, 4, 128):
            raise config.error("compress_ratios", ratio, "allowed are 0, 1, 4 and 128")
    return [max(1, int(ratio)) for ratio in given[:count]]


FAMILIES: dict[str, Callable[[ModelConfig, Settings], list[LayerSpec]]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite"), mla
    ),
    "deepseek_v4": deepseek_v4,
}
