"""The catalogue's grouping against the engine's own, on random mixes of layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog.grouping import group_layers
from kvquilt.layout.catalog.spec import LayerSpec

torch = pytest.importorskip("torch")
engine = pytest.importorskip("vllm.v1.core.kv_cache_utils")
specs = pytest.importorskip("vllm.v1.kv_cache_interface")


def engine_spec(spec: LayerSpec) -> Any:
    """The engine's spec of the same layer: one head of single bytes."""
    if spec.kind == "recurrent":
        return specs.MambaSpec(
            block_size=spec.tokens_per_block,
            shapes=((spec.state_bytes,),),
            dtypes=(torch.uint8,),
            page_size_padded=spec.padded_bytes,
            mamba_cache_mode="align",
        )
    shared = {
        "block_size": spec.tokens_per_block,
        "num_kv_heads": 1,
        "head_size": spec.state_bytes if spec.mla else spec.state_bytes // 2,
        "dtype": torch.uint8,
    }
    if spec.mla:
        shared |= {"alignment": spec.alignment if spec.alignment > 1 else None}
        if spec.kind == "sliding":
            # The engine's merge of these looks at the cache format but not at the width.
            shared |= {"cache_dtype_str": spec.role}
            return specs.SlidingWindowMLASpec(**shared, sliding_window=spec.window)
        return specs.MLAAttentionSpec(**shared, tokens_per_state=spec.tokens_per_state)
    if spec.kind == "sliding":
        return specs.SlidingWindowSpec(**shared, sliding_window=spec.window)
    if spec.kind == "chunked":
        return specs.ChunkedLocalAttentionSpec(**shared, attention_chunk_size=spec.chunk)
    return specs.FullAttentionSpec(**shared)


def engine_groups(layers: list[LayerSpec], block_outermost: bool) -> list[tuple[int, int, list[str]]]:
    layout = SimpleNamespace(is_block_outermost=block_outermost)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        speculative_config=None,
        additional_config={},
        attention_config=None,
    )
    groups = engine.get_kv_cache_groups(config, {s.name: engine_spec(s) for s in layers})
    out = []
    for group in groups:
        each = list(specs.iter_layer_specs(group.kv_cache_spec))
        pages = sum(s.page_size_bytes for s in each)
        count = len(group.layer_names) if len(each) == 1 else 1
        out.append((each[0].block_size, pages * count, list(group.layer_names)))
    return out


def random_layers(rng: np.random.Generator, mla: bool, aligned: bool) -> list[LayerSpec]:
    menu = []
    for number in range(int(rng.integers(1, 5))):
        kinds = ["full", "sliding"] if mla else ["full", "sliding", "chunked", "recurrent"]
        kind = str(rng.choice(kinds))
        menu.append(
            {
                "kind": kind,
                "tokens_per_block": 16 if not mla else int(rng.choice([4, 16])),
                "state_bytes": int(rng.choice([128, 256, 512, 192, 640]))
                * (20 if kind == "recurrent" else 1),
                "window": int(rng.choice([64, 128])) if kind == "sliding" else None,
                "chunk": int(rng.choice([64, 128])) if kind == "chunked" else None,
                "mla": mla,
                "role": str(number) if mla and kind == "sliding" else "",
                "alignment": 96 if aligned and rng.random() < 0.5 else 1,
                "tokens_per_state": int(rng.choice([1, 4])) if mla and kind == "full" else 1,
            }
        )
    picks = rng.integers(0, len(menu), size=int(rng.integers(1, 24)))
    return [LayerSpec(f"layer.{i}", **menu[int(p)]) for i, p in enumerate(picks)]  # type: ignore[arg-type]


def engine_fails(layers: list[LayerSpec], block_outermost: bool) -> bool:
    """Does the engine refuse this mix, or lose layers of it without a word?"""
    try:
        groups = engine_groups(layers, block_outermost)
    except (NotImplementedError, StopIteration, AssertionError):
        return True
    return sum(len(names) for _, _, names in groups) < len(layers)


@pytest.mark.parametrize("block_outermost", [False, True])
@pytest.mark.parametrize("mla", [False, True])
def test_groups_blocks_and_pages_are_the_engines(mla: bool, block_outermost: bool) -> None:
    """Aligned pages come only with the block outermost, as in the engine's own models."""
    rng = np.random.default_rng([3, mla, block_outermost])
    compared = refused = 0
    for _ in range(200):
        layers = random_layers(rng, mla, aligned=mla and block_outermost)
        try:
            ours = group_layers(layers, block_outermost=block_outermost)
        except ConfigError:
            refused += 1
            assert engine_fails(layers, block_outermost), layers
            continue
        got = [(g[0].tokens_per_block, sum(s.engine_bytes for s in g), [s.name for s in g]) for g in ours]
        assert got == engine_groups(layers, block_outermost), layers
        compared += 1
    assert compared > 80
    assert (refused > 0) == (mla or block_outermost)
