"""`kvquilt fsck`: every page of a directory of the disk tier, read and proven."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvquilt.errors import ConfigError
from kvquilt.tiers.fsck import FsckReport, NamespaceReport
from kvquilt.tiers.fsck import fsck as check
from kvquilt.units import format_bytes

__all__ = ["fsck"]

_PIPE_WIDTH = 120


def fsck(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The disk_path of the engines.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is bad or orphaned, and what dead processes left.")
    ] = False,
    remove: Annotated[
        str | None, typer.Option(help="First remove this namespace: its path, or how its digest starts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and all else on stderr.")] = False,
) -> None:
    """Read and prove every page that lies on disk. Safe beside running engines.

    Exit status 0 if everything is sound or was repaired, 1 if something bad is left, 2 for a directory
    that cannot be checked, or a namespace that cannot be removed.
    """
    stderr = _console(stderr=True)
    handler, logger = _Lines(stderr), logging.getLogger("kvquilt")
    logger.addHandler(handler)
    try:
        with _Bars(stderr) as bars:
            report = check(directory, repair=repair, remove=remove, progress=bars.show)
    except OSError as error:
        raise ConfigError(f"{directory}: {error}") from error
    finally:
        logger.removeHandler(handler)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print(report, _console())
    raise typer.Exit(0 if report.sound else 1)


class _Bars:
    """A bar per namespace on a terminal; nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def show(self, path: str, done: int, total: int) -> None:
        """Pages read in the namespace at `path`."""
        if path not in self._tasks:
            self._tasks[path] = self._bars.add_task(f"{Path(path).parent.name}/{Path(path).name[:12]} pages")
        self._bars.update(self._tasks[path], completed=done, total=total)


class _Lines(logging.Handler):
    """Log lines on a console, between its bars."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        _say(self._console, record.getMessage())


def _print(report: FsckReport, console: Console) -> None:
    for path in report.removed:
        _say(console, f"removed {path}")
    for one in report.namespaces:
        _print_namespace(one, console)
    verdict = "sound" if report.sound else "NOT sound"
    if report.sound and (report.bad or report.orphaned) and all(one.repaired for one in report.namespaces):
        verdict = "repaired"
    count = len(report.namespaces)
    _say(
        console,
        f"{report.path}: {verdict}: {count} namespace{'s' * (count != 1)}, {report.pages:,} pages, "
        f"{format_bytes(report.bytes)}, {report.bad:,} bad, {report.orphaned:,} orphaned",
    )


def _print_namespace(one: NamespaceReport, console: Console) -> None:
    facts = [one.model or "unknown model", f"generation {one.generation}", one.partition or ""]
    facts = facts if one.generation is not None else [f"manifest {one.manifest.replace('_', ' ')}"]
    facts += ["in use"] * one.in_use + ["repaired"] * one.repaired
    _say(console, f"{one.path}\n{', '.join(facts)}")
    table = Table()
    table.add_column("group", no_wrap=True)
    for heading in ("pages", "bytes", "bad", "orphaned"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in one.groups:
        why = ", ".join(f"{count:,} {reason}" for reason, count in group.orphaned_by.items())
        table.add_row(
            group.name,
            f"{group.pages:,}",
            format_bytes(group.bytes),
            f"{group.bad:,}",
            f"{group.orphaned:,}" + (f" ({why})" if why else ""),
        )
    if one.groups:
        console.print(table)
    for line in [*one.problems, *(f"left by a dead process: {path}" for path in one.leftovers)]:
        _say(console, f"  {line}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # A pipe has no width; 80 columns would break the rows.
    return console if console.is_terminal else Console(stderr=stderr, width=_PIPE_WIDTH)
