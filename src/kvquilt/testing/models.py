"""Tiny models whose output depends on their cache, made from a seed.

A test that puts keys and values back into an engine proves nothing with a model that says the same
whatever its cache holds. These do not: zeros in any one cache group change most greedy outputs.
"""

from __future__ import annotations

import dataclasses
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
from kvquilt.testing.stubs import provide_stubs

if TYPE_CHECKING:
    import torch

__all__ = ["cache_root", "make_drafter", "make_model", "model_names", "model_spec"]

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
    return _make(name, model_spec(name), root, seed)


def make_drafter(name: str, root: str | os.PathLike[str] | None = None, seed: int = 0) -> Path | None:
    """As `make_model`, for the model that drafts for the tiny model `name`; None if none does."""
    spec = model_spec(name).drafter
    return None if spec is None else _make(f"{name}-drafter", spec, root, seed)


def _make(name: str, spec: ModelSpec, root: str | os.PathLike[str] | None, seed: int) -> Path:
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
    weights = dataclasses.asdict(spec.weights)
    version = importlib.metadata.version("transformers")
    factors = [_FORMAT, dict(spec.config), weights, spec.split_experts, seed, version]
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:16]


def _write(spec: ModelSpec, seed: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    provide_stubs(spec)
    (folder / "config.json").write_text(json.dumps(dict(spec.config), indent=1, sort_keys=True))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    dtype = getattr(torch, spec.config["dtype"])
    # Each parameter has its own generator, so that one more layer leaves the others as they were.
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        drawn = _draw(name, tuple(parameter.shape), spec.weights, seed).to(dtype)
        tensors.update(_split_experts(name, drawn) if spec.split_experts else {name: drawn})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The experts' matrices one by one, as checkpoints of most families have them."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts"):
        return {name: tensor}
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return {
        f"{stem}.{expert}.{part}.weight": piece.contiguous()
        for expert, matrix in enumerate(tensor)
        for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


def _draw(name: str, shape: tuple[int, ...], scale: WeightScale, seed: int) -> torch.Tensor:
    import torch

    entropy = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, entropy])))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= _deviation(name, len(shape), scale)
    values += _mean(name, len(shape), scale)
    return torch.from_numpy(values)


def _mean(name: str, dimensions: int, scale: WeightScale) -> float:
    for part, mean in scale.mean_by_name.items():
        if part in name:
            return mean
    return scale.norm_mean if dimensions < 2 and "norm" in name else 0.0


def _deviation(name: str, dimensions: int, scale: WeightScale) -> float:
    for part, deviation in scale.by_name.items():
        if part in name:
            return deviation
    if dimensions < 2:
        return scale.vector
    return scale.embedding if "embed" in name else scale.matrix
