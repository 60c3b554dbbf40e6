"""Tiny models whose output depends on their cache, made from a seed.

A test that puts keys and values back into an engine proves nothing with a model that says the same
whatever its cache holds. These do not: zeros in any one cache group change most greedy outputs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvquilt.errors import ConfigError
from kvquilt.testing.specs import SPECS, ModelSpec, WeightScale

if TYPE_CHECKING:
    import torch

__all__ = ["cache_root", "make_model", "model_names", "model_spec"]

# Part of the digest: raise it whenever the same spec and seed would give other files.
_FORMAT = 1


def model_names() -> tuple[str, ...]:
    """Names that `make_model` knows."""
    return tuple(SPECS)


def model_spec(name: str) -> ModelSpec:
    """The spec called `name`. Raises ConfigError with the known names."""
    try:
        return SPECS[name]
    except KeyError:
        raise ConfigError(f"tiny model {name!r} is unknown; known are {', '.join(SPECS)}") from None


def cache_root() -> Path:
    """Where models are kept between runs: `$XDG_CACHE_HOME/kvquilt/models`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvquilt" / "models"


def make_model(name: str, root: str | os.PathLike[str] | None = None, seed: int = 0) -> Path:
    """Write the tiny model `name` and return its directory: `config.json` and `model.safetensors`.

    root: where to keep it (default `cache_root()`); made with mode 0700.
    seed: the weights' seed. Equal name, seed and version of transformers give equal bytes, and a
    model that was written before is used again. Several processes may call this at once.

    Needs torch and transformers the first time. Raises ConfigError for an unknown name or a
    negative seed.
    """
    spec = model_spec(name)
    if seed < 0:
        raise ConfigError(f"seed={seed}: must not be negative")
    folder = Path(root) if root is not None else cache_root()
    target = folder / f"{name}-{_digest(spec, seed)}"
    if target.is_dir():
        return target
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        _write(spec, seed, draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        # Another process was faster: a rename does not replace a folder that holds files, and
        # what that process wrote is the same.
        if not target.is_dir():
            raise


def _digest(spec: ModelSpec, seed: int) -> str:
    weights = {**vars(spec.weights), "by_name": dict(spec.weights.by_name)}
    version = importlib.metadata.version("transformers")
    factors = [_FORMAT, dict(spec.config), weights, seed, version]
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:16]


def _write(spec: ModelSpec, seed: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(dict(spec.config), indent=1, sort_keys=True))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    dtype = getattr(torch, spec.config["dtype"])
    # Each parameter has its own generator, so that one more layer leaves the others as they were.
    tensors = {
        name: _draw(name, tuple(parameter.shape), spec.weights, seed).to(dtype)
        for name, parameter in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _draw(name: str, shape: tuple[int, ...], scale: WeightScale, seed: int) -> torch.Tensor:
    import torch

    entropy = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, entropy])))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= _deviation(name, len(shape), scale)
    if len(shape) == 1 and "norm" in name:
        values += scale.norm_mean
    return torch.from_numpy(values)


def _deviation(name: str, dimensions: int, scale: WeightScale) -> float:
    for part, deviation in scale.by_name.items():
        if part in name:
            return deviation
    if dimensions < 2:
        return scale.vector
    return scale.embedding if "embed" in name else scale.matrix
