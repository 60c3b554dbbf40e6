"""Layers of models that keep only attention KV, family by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog.reader import ModelConfig, Settings, dtype_bytes
from kvquilt.layout.catalog.spec import LayerSpec

__all__ = ["FAMILIES", "attention_layer", "heads_per_rank", "token_bytes"]

_SLIDING = ("sliding_attention", "sliding")
_SCALE_BYTES = 4  # one float32 for K and one for V, per head and token


def heads_per_rank(config: ModelConfig, heads: int, tp: int) -> int:
    """KV heads of one rank: split over the ranks, or replicated where there are fewer heads."""
    if max(heads, tp) % min(heads, tp):
        raise ConfigError(
            f"tp={tp}: the {heads} KV heads of this {config.model_type} model neither divide into nor "
            f"replicate over {tp} ranks"
        )
    return max(1, heads // tp)


def token_bytes(config: ModelConfig, settings: Settings, heads: int, k_dim: int, v_dim: int) -> int:
    """Bytes of one token in one layer on one rank: K and V of all its heads, with their scales."""
    scales = 2 * _SCALE_BYTES if settings.kv_dtype.endswith("_per_token_head") else 0
    cell = (k_dim + v_dim) * dtype_bytes(settings.kv_dtype) + scales
    return heads_per_rank(config, heads, settings.tp) * cell


def attention_layer(
    config: ModelConfig,
    settings: Settings,
    name: str,
    *,
    heads: int,
    k_dim: int,
    v_dim: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> LayerSpec:
    """Spec of one attention layer; a window or a chunk makes it sliding or chunked."""
    block = settings.block
    if window is not None:
        # The engine gives windowed layers a block that its kernels can run unsplit.
        block = max(settings.kernel_tokens, block // settings.kernel_tokens * settings.kernel_tokens)
    size = token_bytes(config, settings, heads, k_dim, k_dim if v_dim is None else v_dim)
    kind: Literal["full", "sliding", "chunked"] = "full"
    if window is not None or chunk is not None:
        kind = "sliding" if window is not None else "chunked"
    copies = max(1, settings.tp // heads)
    return LayerSpec(name, kind, block, size, window=window, chunk=chunk, copies=copies)


def _layers(
    config: ModelConfig,
    settings: Settings,
    windows: Sequence[int | None],
    *,
    module: str = "self_attn",
) -> list[LayerSpec]:
    heads, dim = config.kv_heads, config.head_dim
    return [
        attention_layer(config, settings, _name(config, i, module), heads=heads, k_dim=dim, window=w)
        for i, w in enumerate(windows)
    ]


def _name(config: ModelConfig, index: int, module: str = "self_attn") -> str:
    return f"{config.prefix}model.layers.{index}.{module}.attn"


def _types(config: ModelConfig, sliding: Callable[[int], bool]) -> list[bool]:
    """Per layer: is it a sliding one? From layer_types, else from the family's own rule."""
    count = config.num_layers
    types = config.sequence("layer_types", count)
    if types is None:
        return [sliding(i) for i in range(count)]
    allowed = (*_SLIDING, "full_attention", "attention", "global")
    for kind in types[:count]:
        if kind not in allowed:
            raise config.error("layer_types", kind, f"allowed are {', '.join(allowed)}")
    return [kind in _SLIDING for kind in types[:count]]


def _pattern(config: ModelConfig, default: int) -> Callable[[int], bool]:
    """Every n-th layer is full, the others slide."""
    raw = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", default))
    if isinstance(raw, str):  # such as "LLLG": L local, G global
        return lambda i: raw[i % len(raw)] == "L"
    every = config.integer(
        "sliding_window_pattern", config.integer("_sliding_window_pattern", default), low=0
    )
    return lambda i: every > 0 and (i + 1) % every != 0


def _windowed(config: ModelConfig, sliding: Sequence[bool], default: int, extra: int = 0) -> list[int | None]:
    if not any(sliding):
        return [None for _ in sliding]
    window = config.integer("sliding_window", default) + extra
    return [window if slides else None for slides in sliding]


def plain(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Llama-like: all layers full, unless the config says that all or some of them slide."""
    window = config.integer("sliding_window", 0, low=0)
    types = _types(config, lambda _: window > 0)
    if window == 0:
        types = [False for _ in types]
    return _layers(config, settings, _windowed(config, types, window))


def qwen(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Qwen2, Qwen3: their window counts only with use_sliding_window, from max_window_layers on."""
    if not config.get("use_sliding_window", False) or not config.get("sliding_window"):
        return _layers(config, settings, [None] * config.num_layers)
    first = config.integer("max_window_layers", 28, low=0)
    types = _types(config, lambda i: i >= first)
    return _layers(config, settings, _windowed(config, types, 0))


def full_only(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    return _layers(config, settings, [None] * config.num_layers)


def gemma2(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    types = _types(config, lambda i: i % 2 == 0)
    return _gemma(config, settings, _windowed(config, types, 4096))


def gemma3(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    types = _types(config, _pattern(config, 6))
    return _gemma(config, settings, _windowed(config, types, 4096))


def _gemma(config: ModelConfig, settings: Settings, windows: Sequence[int | None]) -> list[LayerSpec]:
    heads, dim = config.integer("num_key_value_heads", 4), config.integer("head_dim", 256)
    return [
        attention_layer(config, settings, _name(config, i), heads=heads, k_dim=dim, window=w)
        for i, w in enumerate(windows)
    ]


def gemma3n(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """The last num_kv_shared_layers layers read the KV of earlier ones and own nothing."""
    types = _types(config, lambda i: (i + 1) % 5 != 0)
    own = config.num_layers - config.integer("num_kv_shared_layers", 15, low=0)
    heads, dim = config.integer("num_key_value_heads", 2), config.integer("head_dim", 256)
    windows = _windowed(config, types, 512)[: max(own, 0)]
    return [
        attention_layer(
            config,
            settings,
            _name(config, i),
            heads=heads,
            k_dim=dim,
            window=w,
        )
        for i, w in enumerate(windows)
    ]


def gemma4(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Full layers have their own head width, and their own KV heads where K is also V."""
    types = _types(config, lambda i: (i + 1) % 6 != 0)
    types[-1] = False  # the model forces its last layer to full attention
    heads, dim = config.integer("num_key_value_heads", 4), config.integer("head_dim", 256)
    wide = config.integer("global_head_dim", 512)
    full_heads = (
        config.integer("num_global_key_value_heads", heads) if config.get("attention_k_eq_v") else heads
    )
    shared = config.integer("num_kv_shared_layers", 0, low=0)
    windows = _windowed(config, types, 512)
    if config.get("use_bidirectional_attention") == "all":
        windows = [None if w is None else w // 2 + 1 for w in windows]
    return [
        attention_layer(
            config,
            settings,
            _name(config, i),
            heads=heads if w is not None else full_heads,
            k_dim=dim if w is not None else wide,
            window=w,
        )
        for i, w in enumerate(windows[: len(windows) - shared] if shared else windows)
    ]


def gpt_oss(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """The engine alternates by index, a window first, whatever layer_types say."""
    heads, dim = config.integer("num_key_value_heads", 8), config.integer("head_dim", 64)
    window = config.integer("sliding_window", 128)
    return [
        attention_layer(
            config,
            settings,
            _name(config, i, "attn"),
            heads=heads,
            k_dim=dim,
            window=window if i % 2 == 0 else None,
        )
        for i in range(config.num_layers)
    ]


def llama4(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Layers with rotary positions attend within chunks, those without are full."""
    count = config.num_layers
    every = config.integer("no_rope_layer_interval", 4)
    rope = config.sequence("no_rope_layers", count) if config.get("no_rope_layers") else None
    rope = rope or [int((i + 1) % every != 0) for i in range(count)]
    chunk = (
        config.integer("attention_chunk_size", 8192)
        if config.values.get("attention_chunk_size", 8192)
        else None
    )
    return [
        attention_layer(
            config,
            settings,
            _name(config, i),
            heads=config.kv_heads,
            k_dim=config.head_dim,
            chunk=chunk if rope[i] else None,
        )
        for i in range(count)
    ]


def cohere2(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """A Cohere 2 window leaves the token itself out: the engine's window is one larger."""
    types = _types(config, _pattern(config, 4))
    return _layers(config, settings, _windowed(config, types, 4096, extra=1))


def three_to_one(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """Exaone 4, OLMo 3: three sliding layers, one full one."""
    types = _types(config, _pattern(config, 4))
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        types = [False for _ in types]
    return _layers(config, settings, _windowed(config, types, 4096))


def mimo_v2(config: ModelConfig, settings: Settings) -> list[LayerSpec]:
    """V narrower than K; windowed layers have their own heads and widths."""
    count = config.num_layers
    pattern = config.sequence("hybrid_layer_pattern", count)
    slides = [bool(p) for p in pattern[:count]] if pattern else _types(config, lambda i: i % 6 != 0 and i > 0)
    window = config.integer("sliding_window_size", config.integer("sliding_window", 128))
    heads, dim, v_dim = config.kv_heads, config.head_dim, config.integer("v_head_dim", config.head_dim)
    swa_heads = config.integer("swa_num_key_value_heads", heads)
    swa_dim = config.integer("swa_head_dim", dim)
    swa_v_dim = config.integer("swa_v_head_dim", config.integer("v_head_dim", swa_dim))
    return [
        attention_layer(
            config,
            settings,
            _name(config, i),
            heads=swa_heads if s else heads,
            k_dim=swa_dim if s else dim,
            v_dim=swa_v_dim if s else v_dim,
            window=window if s else None,
        )
        for i, s in enumerate(slides)
    ]


# fmt: off
_PLAIN = (
    "llama", "mistral", "mixtral", "ministral", "ministral3", "phi", "phi3", "phimoe", "glm", "glm4",
    "glm4_moe", "gemma", "olmo", "olmo2", "olmoe", "starcoder2", "stablelm",
    "cohere", "granite", "granitemoe", "granitemoeshared",
    "exaone", "nemotron", "minimax_m2", "ernie4_5", "ernie4_5_moe", "seed_oss", "smollm3",
    "apertus", "arcee", "mimo", "hunyuan_v1_dense", "hunyuan_v1_moe", "cwm", "solar",
    "glm4v_text", "glm4v_moe_text", "hyperclovax",
)
_QWEN = (
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
    "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_omni_text", "qwen3_omni_moe_text",
)
# fmt: on

FAMILIES: dict[str, Callable[[ModelConfig, Settings], list[LayerSpec]]] = {
    **dict.fromkeys(_PLAIN, plain),
    **dict.fromkeys(_QWEN, qwen),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma3n": gemma3n,
    "gemma3n_text": gemma3n,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "llama4_text": llama4,
    "cohere2": cohere2,
    "exaone4": three_to_one,
    "olmo3": three_to_one,
    "mimo_v2": mimo_v2,
    "mimo_v2_flash": mimo_v2,
}
