"""How vLLM 0.32 puts layers into cache groups, redone on `LayerSpec`s.

Follows `get_kv_cache_groups` (vllm/v1/core/kv_cache_utils.py): one group if all layers agree, else
packed groups in block-outermost cache layouts, else pages made equal and groups of equal size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog.spec import LayerSpec

__all__ = ["group_layers"]

Group = list[LayerSpec]


def group_layers(layers: Sequence[LayerSpec], *, block_outermost: bool = False) -> list[Group]:
    """Groups of `layers`, in the engine's order. Raises ConfigError if the engine would refuse."""
    if not layers:
        return []
    if _one_type(layers):
        return [list(layers)]
    if block_outermost and len({s.engine_bytes for s in layers}) > 1:
        return _packed(layers)
    return _equal_size(_equal_pages(layers))


def _one_type(layers: Sequence[LayerSpec]) -> bool:
    """Do all layers need the same number of blocks at any time?"""
    first = layers[0]
    for spec in layers:
        same = (spec.kind, spec.tokens_per_block) == (first.kind, first.tokens_per_block)
        if not same or (spec.window, spec.chunk) != (first.window, first.chunk):
            return False
        if first.kind == "recurrent" and spec.engine_bytes != first.engine_bytes:
            return False
        if first.kind == "sliding" and spec.mla != first.mla:
            return False
    return True


def _equal_pages(layers: Sequence[LayerSpec]) -> Group:
    """Every layer with the widest page: more tokens per block where that divides, else padding."""
    widest = max(s.engine_bytes for s in layers)
    out = []
    for spec in layers:
        if spec.engine_bytes == widest:
            out.append(spec)
        elif spec.kind == "recurrent":
            out.append(replace(spec, padded_bytes=widest))
        elif widest % spec.engine_bytes == 0:
            ratio = widest // spec.engine_bytes
            padded = None if spec.padded_bytes is None else spec.padded_bytes * ratio
            out.append(replace(spec, tokens_per_block=spec.tokens_per_block * ratio, padded_bytes=padded))
        elif spec.mla and spec.kind == "full":
            raise ConfigError(
                f"layer {spec.name}: its page of {spec.engine_bytes} bytes neither divides the widest "
                f"page of {widest} bytes nor may be padded to it: the engine refuses this model"
            )
        else:
            out.append(replace(spec, padded_bytes=widest))
    for spec in out:
        if spec.engine_bytes != widest:  # its alignment does not scale with the block
            raise ConfigError(
                f"layer {spec.name}: its page cannot be made {widest} bytes: the engine refuses this model"
            )
    return out


def _equal_size(layers: Sequence[LayerSpec]) -> list[Group]:
    """Groups of about as many layers as the rarest spec has, interleaved."""
    buckets: dict[tuple[object, ...], Group] = defaultdict(list)
    for spec in layers:
        buckets[spec.key].append(spec)
    fewest = min(map(len, buckets.values()))
    most = max(map(len, buckets.values()))
    # A few padding layers are better than twice the groups (12 sliding + 13 full: two groups of 13).
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for bucket in buckets.values():
        count = -(-len(bucket) // size)
        groups += [bucket[i::count] for i in range(count)]
    return groups


def _packed(layers: Sequence[LayerSpec]) -> list[Group]:
    """Block-outermost caches: buckets of one type; those that repeat a pattern are split evenly."""
    buckets: list[Group] = []
    for spec in layers:
        for bucket in buckets:
            if _one_type([*bucket, spec]):
                bucket.append(spec)
                break
        else:
            buckets.append([spec])
    repeats = _repeats_per_group(buckets)
    counts = [_split_count(bucket, repeats) for bucket in buckets]
    # State-like buckets may not widen the block that the others already need.
    anchor = max(
        _widest(b, len(b) if _like_state(b, repeats) else n) for b, n in zip(buckets, counts, strict=True)
    )
    groups = []
    for bucket, count in zip(buckets, counts, strict=True):
        if _like_state(bucket, repeats):
            per_block = max(anchor // bucket[0].engine_bytes, 1)
            count = max(count, -(-len(bucket) // per_block))
        if count == 1:
            groups.append(bucket)
            continue
        if not _balanced(bucket):
            raise ConfigError(
                f"layer {bucket[0].name}: the engine cannot split this layer's group evenly: its pages "
                "differ and no pattern of them repeats"
            )
        pattern = list(zip(*_by_page(bucket).values(), strict=True))
        groups += [[spec for row in pattern[i::count] for spec in row] for i in range(count)]
    return groups


def _by_page(bucket: Group) -> dict[int, Group]:
    out: dict[int, Group] = defaultdict(list)
    for spec in bucket:
        out[spec.engine_bytes].append(spec)
    return out


def _balanced(bucket: Group) -> bool:
    return len({len(specs) for specs in _by_page(bucket).values()}) == 1


def _repeats(bucket: Group) -> int:
    return max(len(specs) for specs in _by_page(bucket).values())


def _repeats_per_group(buckets: list[Group]) -> int | None:
    """Pattern repeats of one group: the number that pads least; None if no bucket mixes pages."""
    balanced = [b for b in buckets if _balanced(b)]
    floor = max((_repeats(b) for b in balanced if len(_by_page(b)) > 1), default=0)
    if not floor:
        return None
    sizes = [_repeats(b) for b in balanced]
    padding = {d: sum(-n % d for n in sizes) for d in range(floor, max(sizes) + 1)}
    return min(padding, key=lambda d: (padding[d], -d))


def _split_count(bucket: Group, repeats: int | None) -> int:
    return -(-_repeats(bucket) // repeats) if repeats is not None and _balanced(bucket) else 1


def _like_state(bucket: Group, repeats: int | None) -> bool:
    return bucket[0].kind == "recurrent" or (repeats is None and bucket[0].kind == "sliding")


def _widest(bucket: Group, count: int) -> int:
    return sum(-(-len(specs) // count) * page for page, specs in _by_page(bucket).items())
