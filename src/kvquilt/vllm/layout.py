"""The engine's KVCacheConfig -> CacheLayout. The only file that reads vLLM's cache specs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvquilt.errors import LayoutError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.layout.names import group_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EngineGroups", "engine_groups", "engine_layout", "layer_page_bytes"]

# Exact types: a subclass may free, share or replay blocks by other rules.
_KINDS: dict[type[KVCacheSpec], str] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "sliding",
    SlidingWindowMLASpec: "sliding",
    ChunkedLocalAttentionSpec: "chunked",
    MambaSpec: "recurrent",
}
_LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT_PREFIXES = ("draft_model.", "mtp.", "model.mtp.")


@dataclass(frozen=True)
class EngineGroups:
    """The layout, and what else of the engine's groups matters to the scheduler side.

    handed_over: indices of recurrent groups whose blocks only the engine's hand-off names; their
    block tables move. drafters: names of the groups that hold layers of the drafter alone, so
    that the target model's output does not depend on them. state_interval: tokens between the
    states that the engine hands over; 0: one per prompt and junction; None: all.
    """

    layout: CacheLayout
    handed_over: frozenset[int]
    drafters: frozenset[str]
    state_interval: int | None


def engine_layout(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> CacheLayout:
    """The cache groups as the engine resolved them, in its order. Raises as `engine_groups`."""
    return engine_groups(kv_cache_config, vllm_config).layout


def engine_groups(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> EngineGroups:
    """The cache groups as the engine resolved them, in its order.

    Raises LayoutError with the group's name for a kind that is not served: it is never
    half-served, and nothing is silently treated as another kind.
    """
    specs = [_representative(group) for group in kv_cache_config.kv_cache_groups]
    target_layers = _target_layers(vllm_config)
    drafters = [
        bool(group.layer_names) and all(_is_draft_layer(name, target_layers) for name in group.layer_names)
        for group in kv_cache_config.kv_cache_groups
    ]
    names = group_names([_kind(spec) for spec in specs], drafters)
    peeks = _peek_groups(kv_cache_config, vllm_config, specs)
    groups = [
        _cache_group(name, kv_cache_config, index, spec, draft=index in peeks)
        for index, (name, spec) in enumerate(zip(names, specs, strict=True))
    ]
    handed_over = frozenset(
        i for i, spec in enumerate(specs) if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
    )
    for index, spec in enumerate(specs):
        if isinstance(spec, MambaSpec):
            _check_recurrent(names[index], spec, vllm_config)
    if vllm_config.parallel_config.world_size > 1:
        for name, group in zip(names, kv_cache_config.kv_cache_groups, strict=True):
            _check_replicas(name, group.kv_cache_spec)
    return EngineGroups(
        CacheLayout(groups, tokens_per_hash=kv_cache_config.hash_block_size),
        handed_over,
        frozenset(name for name, drafter in zip(names, drafters, strict=True) if drafter),
        # Only what is handed over is thinned out; tables that keep every state are read as they are.
        kv_cache_config.prefix_cache_retention_interval if handed_over else None,
    )


def layer_page_bytes(group: KVCacheGroupSpec) -> dict[str, int]:
    """Content bytes of one block of each layer, padding excluded, on one rank (a worker's view)."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: _content_bytes(spec.kv_cache_specs[name]) for name in group.layer_names}
    return {name: _content_bytes(spec) for name in group.layer_names}


def _content_bytes(spec: KVCacheSpec) -> int:
    name = "unpadded_page_size_bytes" if not isinstance(spec, MambaSpec) else "real_page_size_bytes"
    return int(getattr(spec, name, spec.page_size_bytes))


def _representative(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The one spec that stands for the group, as the engine picks it for its scheduler."""
    spec = group.kv_cache_spec
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    kinds = {_kind(inner) for inner in spec.kv_cache_specs.values()}
    if len(kinds) > 1:
        raise LayoutError(f"a cache group with layers of several kinds is not served: {sorted(kinds)}")
    return spec.first_spec


def _kind(spec: KVCacheSpec) -> str:
    if not spec.prefix_cacheable:
        return "scratch"
    return _KINDS.get(type(spec), type(spec).__name__)


def _page_bytes(config: KVCacheConfig, group: KVCacheGroupSpec, spec: KVCacheSpec) -> int:
    """Bytes of one block over the group's layers, the same in workers and in the scheduler.

    The scheduler sees one layer's spec even where layers differ, but both see where the engine
    put each layer; there the size of a page includes the engine's own padding.
    """
    layers = set(group.layer_names)
    tensors = [t for t in config.kv_cache_tensors if layers & set(t.layers)]
    if len(tensors) > 1:
        return sum(min(t.layer_stride, t.block_stride) * len(t.layers) for t in tensors)
    return _content_bytes(spec) * len(group.layer_names)


def _cache_group(
    name: str, config: KVCacheConfig, index: int, spec: KVCacheSpec, *, draft: bool
) -> CacheGroup:
    group = config.kv_cache_groups[index]
    layers = tuple(group.layer_names)
    if _kind(spec) == "scratch":
        return CacheGroup(name, kind="scratch", tokens_per_block=spec.block_size, page_bytes=0, layers=layers)
    if not group.enable_kv_transfer or group.host_resident:
        raise LayoutError(f"cache group {name!r}: the engine does not let connectors transfer it")
    more: dict[str, Any] = {}
    kind = type(spec)
    if isinstance(spec, SlidingWindowSpec):
        more = {"window": spec.sliding_window, "extra_tokens": spec.extra_retained_tokens}
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        more = {"chunk": _chunk(name, spec)}
    if kind not in _KINDS:
        raise LayoutError(
            f"cache group {name!r}: kind {kind.__name__} (layers {', '.join(layers[:3])}"
            f"{', ...' if len(layers) > 3 else ''}) is not served; served are {', '.join(_KIND_WORDS)}. "
            "Run this model without kvquilt"
        )
    return CacheGroup(
        name,
        kind=_KINDS[kind],  # type: ignore[arg-type]
        tokens_per_block=spec.block_size,
        page_bytes=_page_bytes(config, group, spec),
        draft=draft and not isinstance(spec, MambaSpec),
        layers=layers,
        replicated=_replicated(spec),
        **more,
    )


_KIND_WORDS = (
    "full attention",
    "latent (MLA) attention",
    "sliding windows",
    "chunked attention",
    "recurrent states",
)


def _replicated(spec: KVCacheSpec) -> bool:
    """Does every tensor-parallel rank hold the same bytes?"""
    return getattr(spec, "max_tp_shards", None) == 1 or bool(getattr(spec, "tp_replicated", False))


def _check_replicas(name: str, spec: KVCacheSpec) -> None:
    """Layers of one group are all split over the ranks, or all held by every rank.

    Only workers see each layer's spec; the engine's scheduler has the first one's.
    """
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return
    if len({_replicated(inner) for inner in spec.kv_cache_specs.values()}) > 1:
        raise LayoutError(
            f"cache group {name!r}: some of its layers hold the same KV on all ranks (latent attention), "
            "others a share each: that is not served with tensor parallelism"
        )


def _chunk(name: str, spec: ChunkedLocalAttentionSpec) -> int:
    chunk = int(spec.attention_chunk_size)
    if chunk % spec.block_size:
        raise LayoutError(
            f"cache group {name!r}: attention_chunk_size={chunk}: not a multiple of its block of "
            f"{spec.block_size} tokens; the engine then frees blocks that a chunk still reads. Choose a "
            "block size that divides it"
        )
    return chunk


def _check_recurrent(name: str, spec: MambaSpec, vllm_config: VllmConfig) -> None:
    mode = spec.mamba_cache_mode
    if not vllm_config.cache_config.enable_prefix_caching or mode not in ("align", "all"):
        raise LayoutError(
            f"cache group {name!r}: a recurrent group needs the engine's prefix caching (mamba_cache_mode "
            f"'align' or 'all', not {mode!r}): without it no state survives at a block boundary"
        )
    if mode == "all" and spec.num_speculative_blocks:
        raise LayoutError(
            f"cache group {name!r}: mamba_cache_mode 'all' with speculative decoding is not served: use "
            "'align'"
        )


def _target_layers(vllm_config: VllmConfig) -> int | None:
    """Layers of the target model, where there is a drafter with KV of its own."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def _is_draft_layer(name: str, target_layers: int | None) -> bool:
    """Drafters' layers have a prefix of their own, or are numbered past the target's last layer."""
    if target_layers is None:
        return False
    if name.startswith(_DRAFT_PREFIXES):
        return True
    index = _LAYER_INDEX.search(name)
    return index is not None and int(index.group(1)) >= target_layers


def _peek_groups(
    config: KVCacheConfig, vllm_config: VllmConfig, specs: Sequence[KVCacheSpec]
) -> frozenset[int]:
    """Groups that the engine calls eagle groups: all attention groups if it flags none."""
    speculative = vllm_config.speculative_config
    flagged = frozenset(i for i, group in enumerate(config.kv_cache_groups) if group.is_eagle_group)
    if flagged or speculative is None or not speculative.use_eagle_block_drop():
        return flagged
    return frozenset(i for i, spec in enumerate(specs) if not isinstance(spec, MambaSpec))
