"""Entry point of the `kvquilt` command; sub-commands are imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvquilt.errors import KVQuiltError

__all__ = ["app"]

# Each is a function of the same name in the module kvquilt.cli.<name>.
_COMMANDS = ("plan", "bench", "replay", "serve", "status", "fsck")


class _LazyGroup(TyperGroup):
    """Loads a sub-command's module on use: planning must not wait for an engine to be imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in _COMMANDS if importlib.util.find_spec(f"kvquilt.cli.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"kvquilt.cli.{cmd_name}")
        single = typer.Typer(add_completion=False)
        single.command(name=cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVQuiltError as error:
            typer.echo(f"kvquilt: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(cls=_LazyGroup, add_completion=False, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvquilt {version('kvquilt')}")
        raise typer.Exit


@app.callback()
def kvquilt(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """A KV-cache tier for hybrid-attention LLMs."""
