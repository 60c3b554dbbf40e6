"""`kvquilt bench`: the main job in a real engine, measured and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvquilt.bench.config import DEFAULT_MODEL, make_config
from kvquilt.errors import BenchError

if TYPE_CHECKING:
    from kvquilt.bench.config import BenchConfig
    from kvquilt.bench.progress import BenchProgress

__all__ = ["bench"]

_PIPE_WIDTH = 120
_Ended = tuple[dict[str, Any], Sequence[str], Callable[[Console], None]]
"""The result for --json, what did not hold, and how to show it to people."""


def bench(
    model: Annotated[
        str, typer.Option(help="A tiny model, such as gemma4-mini (see the docs), or a directory with one.")
    ] = DEFAULT_MODEL,
    ram_bytes: Annotated[
        str | None, typer.Option(help="Host memory for pages, such as 1GiB.  [default: the working set]")
    ] = None,
    retention: Annotated[str, typer.Option(help="dense or prompt_end.")] = "dense",
    group_partition: Annotated[str, typer.Option(help="solved or shared_rows.")] = "solved",
    requests: Annotated[int | None, typer.Option(help="Prompts per phase.  [default: 200]")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests that run at once.  [default: 8, or 1 where the model asks]")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt.  [default: 2000]")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens generated.  [default: 8]")] = None,
    order: Annotated[str, typer.Option(help="same or reversed: prompts in the warm phases.")] = "same",
    profile: Annotated[str, typer.Option(help="default, or seed: 200 x 9,993 tokens in, 1 out.")] = "default",
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of a tiny model's weights.")] = 0,
    disk: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory of the disk tier; with --restart.")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(help="The most that may lie in DIR.  [default: the working set]")
    ] = None,
    disk_write: Annotated[str, typer.Option(help="through or evicted.")] = "through",
    restart: Annotated[
        bool, typer.Option("--restart", help="Kill the engine, and go on from DIR in another process.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and all else on stderr.")] = False,
) -> None:
    """Compute, save, put back and compare prompts in a real engine.

    Exit status 1 if anything that must hold did not, 2 for arguments that cannot be run.
    """
    config = make_config(
        profile=profile,
        model=model,
        ram_bytes=ram_bytes,
        retention=retention,
        group_partition=group_partition,
        requests=requests,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        order=order,
        seed=seed,
        disk=disk,
        disk_bytes=disk_bytes,
        disk_write=disk_write,
        restart=restart,
    )
    from kvquilt.bench.quiet import quiet_environment, stdout_to_stderr

    quiet_environment()
    from kvquilt.bench.progress import ConsoleProgress

    stderr = _console(stderr=True)
    try:
        with stdout_to_stderr():
            report, failures, show = (_run_restart if restart else _run)(config, ConsoleProgress(stderr))
    except BenchError as error:
        typer.echo(f"kvquilt: {error}", err=True)
        raise typer.Exit(1) from error
    show(stderr if as_json else _console())
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    raise typer.Exit(1 if failures else 0)


def _run(config: BenchConfig, progress: BenchProgress) -> _Ended:
    from kvquilt.bench.run import run_bench
    from kvquilt.bench.table import print_outcome

    outcome = run_bench(config, progress)
    return outcome.report.to_dict(), outcome.failures, partial(print_outcome, outcome)


def _run_restart(config: BenchConfig, progress: BenchProgress) -> _Ended:
    from kvquilt.bench.restart import run_restart
    from kvquilt.bench.restart_table import print_restart

    outcome = run_restart(config, progress)
    return outcome.report.to_dict(), outcome.failures, partial(print_restart, outcome)


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # A pipe has no width; 80 columns would break the rows.
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)
