"""The namespace of an engine's KV, from the engine's own configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.layout.namespace import (
    GroupFactors,
    LayerFactors,
    NamespaceFactors,
    canonical_dtype,
    config_digest,
    weight_fingerprint,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["engine_namespace"]

_SHAPE_FIELDS = ("num_kv_heads", "block_size", "head_size", "head_size_v")


def engine_namespace(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: CacheLayout, *, salt: str
) -> NamespaceFactors:
    """Everything that gives the stored bytes their meaning, as the engine resolved it.

    Raises ConfigError if the model's files are there but cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    groups = tuple(
        _group_factors(group, engine_group.kv_cache_spec)
        for group, engine_group in zip(layout.groups, kv_cache_config.kv_cache_groups, strict=True)
    )
    return NamespaceFactors(
        model=str(model.model),
        revision=str(model.revision or ""),
        config=_config(model),
        weights=_weights(vllm_config),
        groups=groups,
        tokens_per_hash=layout.tokens_per_hash,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=_hash_seed(str(cache.prefix_caching_hash_algo)),
        cache_layout=str(kv_cache_config.kv_cache_layout or ""),
        cache_quantisation=str(model.quantization or "none"),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        ranks=tuple(range(parallel.world_size)),
        salt=salt,
    )


def _group_factors(group: CacheGroup, spec: Any) -> GroupFactors:
    shape = tuple(int(getattr(spec, name)) for name in _SHAPE_FIELDS if getattr(spec, name, None) is not None)
    for part in getattr(spec, "shapes", ()):  # of a recurrent state
        shape += (len(part), *(int(size) for size in part))
    dtypes = getattr(spec, "dtypes", None) or (getattr(spec, "dtype", "none"),)
    return GroupFactors(
        name=group.name,
        kind=group.kind,
        tokens_per_block=group.tokens_per_block,
        page_bytes=group.page_bytes,
        dtype="+".join(canonical_dtype(str(dtype)) for dtype in dtypes),
        layers=tuple(LayerFactors(name, shape=shape) for name in group.layers),
        window=group.window,
        chunk=group.chunk,
        extra_tokens=group.extra_tokens,
        draft=group.draft,
        cacheable=group.cacheable,
    )


def _config(model: Any) -> str:
    path = Path(str(model.model))
    if (path / "config.json").is_file() and model.hf_config_path is None:
        return config_digest(path)
    return config_digest(json.loads(model.hf_config.to_json_string(use_diff=False)))


def _weights(vllm_config: VllmConfig) -> str:
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy, seed {vllm_config.model_config.seed}"
    path = Path(str(vllm_config.model_config.model))
    # A model of the hub is named by its resolved revision.
    return (weight_fingerprint(path) if path.is_dir() else None) or f"{load_format}, not read"


def _hash_seed(algorithm: str) -> str | None:
    """The engine's own rule: a seed given from outside, a fixed one, or for hashes that are not
    collision-proof one drawn per process."""
    given = os.environ.get("PYTHONHASHSEED")
    if given is not None:
        return given
    return None if algorithm.startswith("xxhash") else "default"
