"""Progress of a run, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["BenchProgress", "ConsoleProgress", "SilentProgress"]

Advance = Callable[[int, int], None]
"""Called with (finished, all)."""


class BenchProgress(Protocol):
    """Told what a run is doing."""

    def say(self, text: str) -> None:
        """One line of what is so."""

    def stage(self, name: str) -> AbstractContextManager[Advance]:
        """A stage with its progress."""


class SilentProgress:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Ignore `text`."""

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """Ignore the stage."""
        yield lambda done, total: None


class ConsoleProgress:
    """A bar per stage on a terminal, a line per finished stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[Advance]:
        """Show the stage's progress, and leave one line behind."""
        started, count = time.perf_counter(), 0
        columns = (
            TextColumn("{task.description:<38}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        ) as bars:
            task = bars.add_task(name, total=None)

            def advance(done: int, total: int) -> None:
                nonlocal count
                count = done
                bars.update(task, completed=done, total=total)

            yield advance
        requests = f"{count:>5} requests" if count else " " * 14
        self.say(f"  {name:<44}{requests}{time.perf_counter() - started:8.1f} s")
