"""From a model's config.json to its `CacheLayout`: no weights, no engine.

Group sizes, block sizes and pages follow vLLM 0.32, so that what is planned is what a connector
in that engine will find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvquilt.errors import ConfigError
from kvquilt.layout.catalog import attention, latent, recurrent
from kvquilt.layout.catalog.grouping import group_layers
from kvquilt.layout.catalog.reader import Device, ModelConfig, Settings, dtype_bytes
from kvquilt.layout.catalog.spec import LayerSpec
from kvquilt.layout.groups import CacheGroup
from kvquilt.layout.layout import CacheLayout
from kvquilt.layout.names import group_names

__all__ = ["GroupFacts", "ModelLayout", "known_model_types", "layout_from_config"]

_FAMILIES = {**attention.FAMILIES, **recurrent.FAMILIES, **latent.FAMILIES}
# Configs without a model_type, and wrappers whose text part has none.
_BY_ARCHITECTURE = {"MiMoV2FlashForCausalLM": "mimo_v2_flash", "NemotronHForCausalLM": "nemotron_h"}


@dataclass(frozen=True)
class GroupFacts:
    """What a person wants to know of a group besides its `CacheGroup`.

    engine_page_bytes: what the engine sets aside for one block, padding included; page_bytes of the
    group is the content alone. copies: ranks that hold the same bytes (KV heads or latents
    replicated because there are more ranks than heads).
    """

    name: str
    num_layers: int
    engine_page_bytes: int
    copies: int


@dataclass(frozen=True)
class ModelLayout:
    """A layout with where it came from. facts: one per group, in order. notes: for people."""

    layout: CacheLayout
    facts: tuple[GroupFacts, ...]
    model_type: str
    dtype: str
    kv_dtype: str
    tp: int
    device: Device
    block_size: int
    notes: tuple[str, ...]


def known_model_types() -> list[str]:
    """Model types that `layout_from_config` knows, sorted."""
    return sorted(_FAMILIES)


def layout_from_config(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    kv_dtype: str = "auto",
    block_size: int | None = None,
    dtype: str = "auto",
    state_dtype: str = "auto",
    device: Device = "cuda",
    engine: str = "vllm",
) -> ModelLayout:
    """The cache groups that the engine will make for the model of this config.json.

    config: the parsed file; multimodal wrappers are searched for their text part. tp: ranks.
    kv_dtype, dtype, state_dtype: of attention caches, of the model and of recurrent states, as the
    engine's options of these names. block_size: the engine's option; None is its default, 16 tokens
    on a GPU and 128 on a CPU, and more where kernels or page sizes ask for it. Page bytes are
    those of one rank; a recurrent group's are the state's content without the engine's padding.

    Raises ConfigError for an unknown architecture, for missing or impossible values (naming the
    key) and for a number of ranks that the model cannot be split over.
    """
    if engine != "vllm":
        raise ConfigError(f"engine={engine!r}: only vllm is known")
    if device not in get_args(Device):
        raise ConfigError(f"device={device!r}: allowed are {', '.join(get_args(Device))}")
    for name, value in (("tp", tp), ("block_size", 1 if block_size is None else block_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r}: must be a positive integer")
    model = ModelConfig(config)
    kind = _family(model)
    settings = _settings(model, kind, tp, kv_dtype, block_size, dtype, state_dtype, device)
    layers = _FAMILIES[kind](model, settings)
    groups = group_layers(layers, block_outermost=kind in latent.BLOCK_OUTERMOST)
    if not groups:
        raise ConfigError(f"config.json ({kind}): no layer keeps KV of its own")
    _check_blocks(settings, groups)
    return _assemble(model, kind, settings, groups)


def _check_blocks(settings: Settings, groups: Sequence[Sequence[LayerSpec]]) -> None:
    """Refuse block sizes that the engine's attention kernels refuse at start."""
    for spec in (layers[0] for layers in groups):
        if spec.kind != "recurrent" and not spec.mla and spec.tokens_per_block % settings.kernel_tokens:
            raise ConfigError(
                f"block_size={settings.block_size}: {spec.name} would get blocks of {spec.tokens_per_block} "
                f"tokens; {settings.device} kernels take multiples of {settings.kernel_tokens}"
            )


def _family(model: ModelConfig) -> str:
    candidates = (model.model_type, model.outer_type, _BY_ARCHITECTURE.get(model.architecture, ""))
    for kind in candidates:
        if kind in _FAMILIES:
            return kind
    raise ConfigError(
        f"unknown architecture: model_type={model.model_type or None!r}, "
        f"architectures={model.architecture or None!r}: its cache groups are not in the catalogue"
    )


def _settings(
    model: ModelConfig,
    kind: str,
    tp: int,
    kv_dtype: str,
    block_size: int | None,
    dtype: str,
    state_dtype: str,
    device: Device,
) -> Settings:
    resolved = model.dtype if dtype == "auto" else dtype
    dtype_bytes(resolved, "dtype")
    if dtype == "auto" and resolved in ("float32", "float"):
        resolved = "bfloat16"  # the engine runs float32 checkpoints in 16 bits unless told not to
    if state_dtype != "auto":
        dtype_bytes(state_dtype, "state_dtype")
    kv = resolved if kv_dtype == "auto" else kv_dtype
    dtype_bytes(kv)
    flags = _cpu_flags() if device == "cpu" else frozenset()
    return Settings(
        tp=tp,
        block_size=block_size,
        dtype=resolved,
        kv_dtype=kv,
        kv_dtype_given=kv_dtype != "auto",
        state_dtype=state_dtype,
        device=device,
        float32_states="avx512_bf16" in flags,
        mla_block=_mla_block(kind, block_size, device, "amx_tile" in flags),
    )


def _mla_block(kind: str, block_size: int | None, device: Device, amx: bool) -> int | None:
    if kind not in latent.FAMILIES:
        return None
    if device == "cpu":
        return None if amx else 16  # the only size of the plain CPU kernel, whatever the user says
    return 64 if block_size is None else block_size


def _cpu_flags() -> frozenset[str]:
    """Instruction sets of this machine; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    line = next((x for x in text.splitlines() if x.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _assemble(
    model: ModelConfig, kind: str, settings: Settings, groups: Sequence[Sequence[LayerSpec]]
) -> ModelLayout:
    names = group_names([layers[0].kind for layers in groups])
    made, facts = [], []
    for name, layers in zip(names, groups, strict=True):
        first = layers[0]
        made.append(
            CacheGroup(
                name,
                kind=first.kind,
                tokens_per_block=first.tokens_per_block,
                page_bytes=sum(s.content_bytes for s in layers),
                window=first.window,
                chunk=first.chunk,
                layers=tuple(s.name for s in layers),
                replicated=first.mla,
            )
        )
        page = sum(s.engine_bytes for s in layers)
        facts.append(GroupFacts(name, len(layers), page, first.copies))
    layout = CacheLayout(made)
    return ModelLayout(
        layout=layout,
        facts=tuple(facts),
        model_type=kind,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        tp=settings.tp,
        device=settings.device,
        block_size=max(g.tokens_per_block for g in made if g.dense) if any(g.dense for g in made) else 0,
        notes=_notes(model, settings, layout, facts),
    )


def _notes(
    model: ModelConfig, settings: Settings, layout: CacheLayout, facts: Sequence[GroupFacts]
) -> tuple[str, ...]:
    notes = []
    if settings.dtype != model.dtype:
        notes.append(f"dtype {settings.dtype}: the engine's choice for a {model.dtype} checkpoint")
    for group, fact in zip(layout.groups, facts, strict=True):
        if fact.copies > 1:
            notes.append(f"{group.name}: {fact.copies} ranks hold the same bytes")
        if fact.engine_page_bytes != group.page_bytes:
            share = group.page_bytes / fact.engine_page_bytes
            notes.append(f"{group.name}: content is {share:.0%} of the engine's padded page")
    shared = model.integer("num_kv_shared_layers", 0, low=0)
    if shared:
        notes.append(f"{shared} layers read the KV of earlier layers and own none")
    return tuple(notes)
