"""The engine's KVCacheConfig -> CacheLayout. The only file that reads vLLM's cache specs."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

__all__ = ["engine_layout", "layer_page_bytes"]

# For names alone, so that a group that is refused has the name that `kvquilt plan` gives it.
_KINDS: dict[type[KVCacheSpec], str] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "sliding",
    SlidingWindowMLASpec: "sliding",
    ChunkedLocalAttentionSpec: "chunked",
    MambaSpec: "recurrent",
}


def engine_layout(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> CacheLayout:
    """The cache groups as the engine resolved them, in its order.

    Raises LayoutError with the group's name for a kind that is not served: it is never
    half-served, and nothing is silently treated as another kind.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    names = group_names([_kind(spec) for spec in specs])
    _refuse_drafts(kv_cache_config, vllm_config, names)
    groups = [
        _cache_group(name, group) for name, group in zip(names, kv_cache_config.kv_cache_groups, strict=True)
    ]
    return CacheLayout(groups, tokens_per_hash=kv_cache_config.hash_block_size)


def layer_page_bytes(group: KVCacheGroupSpec) -> dict[str, int]:
    """Content bytes of one block of each layer, padding excluded, on one rank."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: _content_bytes(spec.kv_cache_specs[name]) for name in group.layer_names}
    return {name: _content_bytes(spec) for name in group.layer_names}


def _content_bytes(spec: KVCacheSpec) -> int:
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def _kind(spec: KVCacheSpec) -> str:
    return _KINDS.get(type(spec), type(spec).__name__)


def _cache_group(name: str, group: KVCacheGroupSpec) -> CacheGroup:
    spec = group.kv_cache_spec
    if not group.enable_kv_transfer or group.host_resident:
        raise LayoutError(f"cache group {name!r}: the engine does not let connectors transfer it")
    page_bytes = sum(layer_page_bytes(group).values())
    layers = tuple(group.layer_names)
    # Exact types: a subclass may free, share or replay blocks by other rules.
    if type(spec) is FullAttentionSpec:
        return CacheGroup(
            name, kind="full", tokens_per_block=spec.block_size, page_bytes=page_bytes, layers=layers
        )
    if type(spec) is SlidingWindowSpec:
        return CacheGroup(
            name,
            kind="sliding",
            tokens_per_block=spec.block_size,
            page_bytes=page_bytes,
            window=spec.sliding_window,
            extra_tokens=spec.extra_retained_tokens,
            layers=layers,
        )
    raise LayoutError(
        f"cache group {name!r}: kind {type(spec).__name__} (layers {', '.join(layers[:3])}"
        f"{', ...' if len(layers) > 3 else ''}) is not served yet; served are full attention and "
        "sliding windows. Run this model without kvquilt"
    )


def _refuse_drafts(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, names: list[str]) -> None:
    speculative = vllm_config.speculative_config
    drafts = [
        name
        for name, group in zip(names, kv_cache_config.kv_cache_groups, strict=True)
        if group.is_eagle_group
    ]
    if speculative is not None and speculative.method != "ngram" and not drafts:
        drafts = names[-1:]
    if drafts:
        raise LayoutError(
            f"cache group {drafts[0]!r}: draft groups (speculative decoding with method "
            f"{speculative.method if speculative else 'unknown'!r}) are not served yet; "
            "n-gram speculation is"
        )
