"""What a tiny model is described by, and what the families' configs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.layout.catalog import layout_from_config

__all__ = ["VOCABULARY", "ModelSpec", "WeightScale", "base_config", "planned_groups", "rope"]

VOCABULARY = 2048
_MAX_POSITIONS = 32768


@dataclass(frozen=True)
class WeightScale:
    """How random weights are drawn, so that attention decides what the model says.

    A tied embedding of standard deviation 1 makes a model echo its last token, and weights near
    zero make it say one token for ever; neither would notice a wrong cache.

    embedding, matrix, vector: standard deviations of embeddings, other matrices, and vectors.
    norm_mean: mean of the vectors that scale a normalised input (1 where the model does not add 1).
    by_name: standard deviations for parameters whose name contains the key; the first match wins.
    mean_by_name: the same for means, 0 where nothing matches.
    """

    embedding: float = 0.05
    matrix: float = 0.2
    vector: float = 0.1
    norm_mean: float = 0.0
    by_name: Mapping[str, float] = field(default_factory=dict)
    mean_by_name: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """One tiny model.

    config: its `config.json`.
    engine: engine arguments that it cannot run without (`dtype`, `block_size`, ...).
    groups: the cache groups that vLLM makes of it with those arguments, in the engine's order.
    weights: how its weights are drawn.
    notes: what is worth knowing about it, for tables and docs.
    drafter: the model that drafts for it, if one does. draft_tokens: how many in each step.
    concurrency: requests at once with which its outputs repeat. 16 bits allow one: a batch of another
    size rounds differently, and near ties are common.
    split_experts: the engine reads experts' matrices one by one, not stacked.
    stubs: modules that reading its config imports and that may be missing: empty ones do.
    """

    config: Mapping[str, Any]
    engine: Mapping[str, Any]
    groups: tuple[CacheGroup, ...]
    weights: WeightScale
    notes: str
    drafter: ModelSpec | None = None
    draft_tokens: int = 3
    concurrency: int = 8
    split_experts: bool = False
    stubs: tuple[str, ...] = ()

    @property
    def layout(self) -> CacheLayout:
        """The layout that the engine's groups make."""
        return CacheLayout(self.groups)

    @property
    def draft_groups(self) -> frozenset[str]:
        """Names of the groups that hold the drafter's layers alone: no output depends on them."""
        return frozenset(group.name for group in self.groups if group.name.startswith("draft."))


def base_config(architecture: str, model_type: str, **config: Any) -> dict[str, Any]:
    """A `config.json` with what every family has; `config` wins."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": _MAX_POSITIONS,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "float32",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        **config,
    }


def rope(theta: float = 1e4, **more: Any) -> dict[str, Any]:
    """Plain rotary positions."""
    return {"rope_type": "default", "rope_theta": theta, **more}


def planned_groups(config: Mapping[str, Any], engine: Mapping[str, Any]) -> tuple[CacheGroup, ...]:
    """The groups that the catalogue plans for these engine arguments on a CPU.

    Tests hold them against the engine. Not spelled out where they depend on the machine: processors
    with 16-bit instructions keep recurrent states in 32 bits, which makes all blocks longer.
    """
    planned = layout_from_config(config, dtype=engine["dtype"], block_size=engine["block_size"], device="cpu")
    return planned.layout.groups
