"""What a run must know of its model before an engine starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquilt.errors import ConfigError
from kvquilt.layout import CacheLayout
from kvquilt.layout.catalog import layout_from_config
from kvquilt.testing.specs import SPECS

__all__ = ["BenchModel", "bench_model"]


@dataclass(frozen=True)
class BenchModel:
    """layout: its cache groups. vocab_size, max_positions: tokens. engine: arguments it needs.
    draft_groups: groups that hold a drafter's layers alone."""

    layout: CacheLayout
    vocab_size: int
    max_positions: int
    engine: Mapping[str, Any]
    draft_groups: frozenset[str] = frozenset()


def bench_model(name: str) -> BenchModel:
    """The tiny model called `name`, or the one in the directory `name`.

    Raises ConfigError for neither, and for a config.json that the catalogue does not know.
    """
    if name in SPECS:
        spec = SPECS[name]
        sizes = spec.config
        return BenchModel(
            spec.layout, sizes["vocab_size"], sizes["max_position_embeddings"], {}, spec.draft_groups
        )
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"--model={name!r}: neither a tiny model ({', '.join(SPECS)}) nor a directory with a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model={name!r}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model={name!r}: config.json holds no object")
    # Spelled out, so that the engine and the catalogue start from the same: the engine would run
    # float32 in 16 bits, and the CPU default of 128-token blocks hides short hits.
    dtype = _text_value(config, "dtype", _text_value(config, "torch_dtype", "bfloat16"))
    engine = {"dtype": dtype, "block_size": 32}
    layout = layout_from_config(config, dtype=dtype, block_size=32, device="cpu").layout
    return BenchModel(
        layout,
        _number(config, "vocab_size", name),
        _number(config, "max_position_embeddings", name),
        engine,
    )


def _text_value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    text = config.get("text_config")
    nested = text.get(key) if isinstance(text, dict) else None
    return config.get(key, nested) or default


def _number(config: Mapping[str, Any], key: str, name: str) -> int:
    value = _text_value(config, key, None)
    if not isinstance(value, int):
        raise ConfigError(f"--model={name!r}: {key}={value!r} in config.json: must be an integer")
    return value
