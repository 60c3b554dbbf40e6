"""Layers of models that mix attention with recurrent states (GDN, Mamba-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog.attention import attention_layer
from kvquilt.layout.catalog.reader import ModelConfig, Settings, dtype_bytes
from kvquilt.layout.catalog.spec import LayerSpec

__all__ = ["FAMILIES"]

_RECURRENT = ("linear_attention", "mamba")
_FULL = ("full_attention", "attention")


def _mamba2_bytes(
    config: ModelConfig,
    settings: Settings,
    *,
    inner: int,
    heads: int,
    head_dim: int,
    state: int,
    groups: int,
    kernel: int,
    default_state_dtype: str = "auto",
) -> int:
    """One Mamba-2 checkpoint of one layer on one rank: convolution inputs and the state."""
    tp = settings.tp
    if groups % tp:
        groups = tp  # each rank keeps the groups that its heads read
    width = _divide(config, inner + 2 * groups * state, tp, "convolution channels")
    conv = (kernel - 1) * width
    ssm = _divide(config, heads, tp, "state heads") * head_dim * state
    return conv * _conv_bytes(settings) + ssm * _state_bytes(settings, default_state_dtype)


def _gdn_bytes(config: ModelConfig, settings: Settings, default_state_dtype: str) -> int:
    """One gated-delta-net checkpoint of one layer on one rank."""
    k_heads, v_heads = (
        config.integer("linear_num_key_heads", 16),
        config.integer("linear_num_value_heads", 32),
    )
    k_dim, v_dim = config.integer("linear_key_head_dim", 128), config.integer("linear_value_head_dim", 128)
    kernel = config.integer("linear_conv_kernel_dim", 4)
    width = _divide(config, 2 * k_heads * k_dim + v_heads * v_dim, settings.tp, "convolution channels")
    state = _divide(config, v_heads, settings.tp, "value heads") * v_dim * k_dim
    return (kernel - 1) * width * _conv_bytes(settings) + state * _state_bytes(settings, default_state_dtype)


def _conv_bytes(settings: Settings) -> int:
    return dtype_bytes(settings.dtype, "dtype")


def _state_bytes(settings: Settings, default: str) -> int:
    if settings.state_dtype != "auto":
        return dtype_bytes(settings.state_dtype, "state_dtype")
    if settings.float32_states:
        return 4
    return dtype_bytes(settings.dtype if default == "auto" else default, "state_dtype")


def _divide(config: ModelConfig, value: int, tp: int, what: str) -> int:
    if value % tp:
        raise ConfigError(f"tp={tp}: {value} {what} of this {config.model_type} model do not divide by it")
    return value // tp


def _align(settings: Settings, attention: LayerSpec, state_bytes: int) -> tuple[LayerSpec, LayerSpec]:
    """Attention and recurrent spec with one block size, at which an attention page holds a state.

    Source: `_align_hybrid_block_size` (vllm/platforms/interface.py).
    """
    unit = max(settings.kernel_tokens, settings.block)
    block = unit * -(-state_bytes // (unit * attention.state_bytes))
    block = -(-block // settings.kernel_tokens) * settings.kernel_tokens
    block = max(block, settings.block)
    attention = replace(attention, tokens_per_block=block)
    recurrent = LayerSpec("", "recurrent", block, state_bytes, padded_bytes=attention.content_bytes)
    return attention, recurrent


def _hybrid(
    config: ModelConfig, settings: Settings, state_bytes: int, rows: list[list[str]]
) -> list[LayerSpec]:
    """Layers in the order of `rows`: per model layer the names of its caches; "*...attn" is attention."""
    template = attention_layer(config, settings, "", heads=config.kv_heads, k_dim=config.head_dim)
    attention, recurrent = _align(settings, template, state_bytes)
    names = [f"{config.prefix}{name}" for row in rows for name in row]
    return [replace(attention if n.endswith(".attn") else recurrent, name=n) for n in names]


def _rows(config: ModelConfig, types: list[str], attention: str, recurrent: str) -> list[list[str]]:
    rows = []
    for i, kind in enumerate(types):
        if kind in _FULL:
            rows.append([f"model.layers.{i}.{attention}.attn"])
        elif kind in _RECURRENT:
            rows.append([f"model.layers.{i}.{recurrent}"])
        elif kind not in ("mlp", "moe"):
            raise config.error("layer_types", kind, f"allowed are {', '.join((*_FULL, *_RECURRENT))}")
    return rows


def _layer_types(config: ModelConfig, default: Callable[[int], str]) -> list[str]:
    count = config.num_layers
    types = config.sequence("layer_types", count) or config.sequence("layers_block_type", count)
    return [str(t) for t in types[:count]] if types else [default(i) for i in range(count)]


def qwen_next(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Qwen3-Next, Qwen3.5 and their mixtures: three gated delta nets, one full layer."""
    every = config.integer("full_attention_interval", 4)
    types = _layer_types(config, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    state = _gdn_bytes(config, settings, str(config.get("mamba_ssm_dtype", "auto")))
    return _hybrid(config, settings, state, _rows(config, types, "self_attn", "linear_attn"))


def granite_hybrid(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    types = _layer_types(config, lambda _: "mamba")
    state = _mamba2_bytes(
        config,
        settings,
        inner=config.integer("mamba_expand", 2) * config.integer("hidden_size"),
        heads=config.integer("mamba_n_heads", 128),
        head_dim=_mamba_head_dim(config),
        state=config.integer("mamba_d_state", 256),
        groups=config.integer("mamba_n_groups", 1),
        kernel=config.integer("mamba_d_conv", 4),
    )
    return _hybrid(config, settings, state, _rows(config, types, "self_attn", "mixer"))


def _mamba_head_dim(config: ModelConfig) -> int:
    if isinstance(config.get("mamba_d_head"), int):
        return config.integer("mamba_d_head")
    inner = config.integer("mamba_expand", 2) * config.integer("hidden_size")  # "auto" in some configs
    return inner // config.integer("mamba_n_heads", 128)


def falcon_h1(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Every layer has attention and Mamba-2; the engine numbers the mixers on after the layers."""
    count = config.num_layers
    inner = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * config.integer("hidden_size"))
    heads = config.integer("mamba_n_heads", 128)
    state = _mamba2_bytes(
        config,
        settings,
        inner=inner,
        heads=heads,
        head_dim=config.integer("mamba_d_head")
        if isinstance(config.get("mamba_d_head"), int)
        else inner // heads,
        state=config.integer("mamba_d_state", 256),
        groups=config.integer("mamba_n_groups", 1),
        kernel=config.integer("mamba_d_conv", 4),
    )
    rows = [[f"model.layers.{i}.attn", f"model.{count + i}.mixer"] for i in range(count)]
    return _hybrid(config, settings, state, rows)


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Mamba-2, attention and MLP layers, as the pattern says; states in float32 by default."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        unknown = set(pattern) - set(_NEMOTRON_LETTERS)
        if unknown:
            raise config.error("hybrid_override_pattern", pattern, f"has unknown letters {sorted(unknown)}")
        types = [_NEMOTRON_LETTERS[c] for c in pattern]
    else:
        listed = config.get("layers_block_type", config.get("layer_types"))
        if not isinstance(listed, (list, tuple)):
            raise config.error("hybrid_override_pattern", None, "is missing, and so is layers_block_type")
        types = [str(t) for t in listed]
    heads, head_dim = config.integer("mamba_num_heads", 128), config.integer("mamba_head_dim", 64)
    state = _mamba2_bytes(
        config,
        settings,
        inner=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        state=config.integer("ssm_state_size", 128),
        groups=config.integer("n_groups", config.integer("mamba_n_groups", 8)),
        kernel=config.integer("conv_kernel", config.integer("mamba_d_conv", 4)),
        default_state_dtype=str(config.get("mamba_ssm_cache_dtype", "float32")),
    )
    return _hybrid(config, settings, state, _rows(config, types, "mixer", "mixer"))


FAMILIES: dict[str, Callable[[ModelConfig, Settings], list[LayerSpec]]] = {
    "qwen3_next": qwen_next,
    "qwen3_5": qwen_next,
    "qwen3_5_text": qwen_next,
    "qwen3_5_moe": qwen_next,
    "qwen3_5_moe_text": qwen_next,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
}
