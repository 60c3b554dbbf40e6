"""`kvquilt bench`: the main job in a real engine, measured and checked."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from kvquilt.bench.config import DEFAULT_MODEL, make_config
from kvquilt.errors import BenchError

__all__ = ["bench"]

_PIPE_WIDTH = 120


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
    )
    from kvquilt.bench.quiet import quiet_environment, stdout_to_stderr

    quiet_environment()
    from kvquilt.bench.progress import ConsoleProgress
    from kvquilt.bench.run import run_bench
    from kvquilt.bench.table import print_outcome

    stderr = _console(stderr=True)
    try:
        with stdout_to_stderr():
            outcome = run_bench(config, ConsoleProgress(stderr))
    except BenchError as error:
        typer.echo(f"kvquilt: {error}", err=True)
        raise typer.Exit(1) from error
    print_outcome(outcome, stderr if as_json else _console())
    if as_json:
        typer.echo(json.dumps(outcome.report.to_dict(), indent=2))
    raise typer.Exit(1 if outcome.failures else 0)


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # A pipe has no width; 80 columns would break the rows.
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)
