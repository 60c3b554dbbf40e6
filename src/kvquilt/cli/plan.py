"""`kvquilt plan`: what a byte budget holds for a model, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from kvquilt.config import Options
from kvquilt.errors import ConfigError, SizingError
from kvquilt.layout.catalog import ModelLayout, layout_from_config
from kvquilt.layout.catalog.reader import Device
from kvquilt.sizing import Partition, SlotPlan, plan_slots
from kvquilt.units import format_bytes, parse_bytes

__all__ = ["plan"]

_GPU_NODE = Path("/dev/nvidiactl")


class Intervals(NamedTuple):
    """Tokens between kept checkpoints, and between kept recurrent states; None: every block."""

    checkpoints: int | None
    states: int | None


def plan(
    config: Annotated[Path, typer.Option(help="A model's config.json, or the directory that holds it.")],
    budget: Annotated[str, typer.Option(help="Bytes to split, such as 64GiB.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; a slot holds the pages of all.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Element type of attention caches.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Element type of the model.")] = "auto",
    state_dtype: Annotated[str, typer.Option(help="Element type of recurrent states.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="The engine's --block-size.")] = None,
    device: Annotated[
        str, typer.Option(help="cuda or cpu: whose block sizes; auto is this machine's.")
    ] = "auto",
    checkpoint_interval: Annotated[
        int | None, typer.Option(help="Tokens between kept checkpoints; every block is kept without it.")
    ] = None,
    state_interval: Annotated[
        int,
        typer.Option(
            help="The engine's prefix_cache_retention_interval, for recurrent states; 0: only where prompts "
            "end or fork, for which 2,048 tokens are assumed."
        ),
    ] = 0,
    partition: Annotated[str, typer.Option(help="solved or shared_rows.")] = "solved",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how many slots each cache group gets out of a budget, and the tokens they cover."""
    if device == "auto":
        device = "cuda" if _GPU_NODE.exists() else "cpu"
    model = layout_from_config(
        _read(config),
        tp=tp,
        kv_dtype=kv_dtype,
        dtype=dtype,
        state_dtype=state_dtype,
        block_size=block_size,
        device=cast(Device, device),
    )
    if state_interval < 0:
        raise ConfigError(f"state_interval={state_interval}: must not be negative")
    states = Options(checkpoint_interval=checkpoint_interval).planned_state_interval(state_interval)
    intervals = Intervals(checkpoint_interval, states)
    report = _report(model, parse_bytes(budget, "budget"), intervals, cast(Partition, partition))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _read(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config={str(path)!r}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config={str(path)!r}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"config={str(path)!r}: must hold an object, not {type(found).__name__}")
    return found


def _split(model: ModelLayout, budget: int, intervals: Intervals, partition: Partition) -> SlotPlan:
    return plan_slots(
        model.layout,
        budget,
        intervals.checkpoints,
        num_ranks=model.tp,
        partition=partition,
        state_interval=intervals.states,
    )


def _report(model: ModelLayout, budget: int, intervals: Intervals, partition: Partition) -> dict[str, Any]:
    split = _split(model, budget, intervals, partition)
    return {
        "model_type": model.model_type,
        "dtype": model.dtype,
        "kv_dtype": model.kv_dtype,
        "tensor_parallel": model.tp,
        "device": model.device,
        "partition": partition,
        "checkpoint_interval": intervals.checkpoints,
        "state_interval": intervals.states,
        "budget_bytes": budget,
        "bytes_used": split.bytes_used,
        "tokens": split.tokens,
        "tokens_per_hash": model.layout.tokens_per_hash,
        "lattice_tokens": model.layout.lattice_tokens,
        "bytes_per_token": _bytes_per_token(model, budget, intervals),
        "groups": _groups(model, split, budget),
        "notes": list(model.notes),
    }


def _groups(model: ModelLayout, split: SlotPlan, budget: int) -> list[dict[str, Any]]:
    rows = []
    for group, facts in zip(model.layout.groups, model.facts, strict=True):
        slots, slot_bytes = split.slots[group.name], split.slot_bytes[group.name]
        rows.append(
            {
                "name": group.name,
                "kind": group.kind,
                "layers": facts.num_layers,
                "layer_names": list(group.layers),
                "window": group.window,
                "chunk": group.chunk,
                "tokens_per_block": group.tokens_per_block,
                "page_bytes": group.page_bytes,
                "engine_page_bytes": facts.engine_page_bytes,
                "copies": facts.copies,
                "slot_bytes": slot_bytes,
                "slots": slots,
                "tokens_covered": split.tokens,
                "budget_share": slots * slot_bytes / budget,
            }
        )
    return rows


def _bytes_per_token(model: ModelLayout, budget: int, intervals: Intervals) -> dict[str, float | None]:
    """Bytes spent per token covered, for both partitions of this budget, and their ratio."""
    cost: dict[str, float | None] = {}
    for partition in get_args(Partition):
        try:
            split = _split(model, budget, intervals, partition)
        except SizingError:  # rows as wide as the widest group may not fit where exact slots do
            cost[partition] = None
        else:
            cost[partition] = split.bytes_used / split.tokens if split.tokens else None
    solved, rows = cost["solved"], cost["shared_rows"]
    return {**cost, "ratio": rows / solved if solved and rows else None}


def _print(report: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width; 80 columns would break the rows
    table = Table(
        title=f"{report['model_type']}: {format_bytes(report['budget_bytes'])}, {report['partition']}"
    )
    for heading in ("group", "kind"):
        table.add_column(heading, no_wrap=True)
    for heading in ("layers", "tokens/block", "page bytes", "slots", "tokens covered", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["groups"]:
        cells = (
            row["layers"],
            row["tokens_per_block"],
            row["page_bytes"],
            row["slots"],
            row["tokens_covered"],
        )
        table.add_row(row["name"], row["kind"], *(f"{c:,}" for c in cells), f"{row['budget_share']:.1%}")
    console.print(table)
    console.print(
        f"covers {report['tokens']:,} tokens in {format_bytes(report['bytes_used'])}; pages are of one rank "
        f"of {report['tensor_parallel']}, blocks as on {report['device']}, hits end at multiples of "
        f"{report['lattice_tokens']} tokens",
        highlight=False,
    )
    cost = report["bytes_per_token"]
    solved, rows, ratio = (cost[k] for k in ("solved", "shared_rows", "ratio"))
    console.print(
        f"bytes per token: solved {_number(solved)}, shared_rows {_number(rows)}, ratio {_number(ratio, 2)}",
        highlight=False,
    )
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False)


def _number(value: float | None, digits: int = 0) -> str:
    return "does not fit" if value is None else f"{value:,.{digits}f}"
