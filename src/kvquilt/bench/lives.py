"""Two lives of one engine, each in a process of its own: the first is killed, the second goes on from disk.

The parent gives a `Task` on standard input and reads one `Life` or `Refusal` from a pipe, both with their
length in front. Then the child keeps its engine, and waits: to be killed, or for the end of its input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Literal

import msgspec
from rich.console import Console

from kvquilt.bench.clock import PausableClock
from kvquilt.bench.config import BenchConfig
from kvquilt.bench.engines import open_engine, rest_disk, wait_for_disk
from kvquilt.bench.phases import Counts, check_layout, counts_of, run_phase, watch_pages
from kvquilt.bench.progress import BenchProgress, ConsoleProgress
from kvquilt.bench.quiet import quiet_environment, stdout_to_stderr
from kvquilt.bench.setup import set_up
from kvquilt.errors import BenchError, ConfigError, KVQuiltError
from kvquilt.testing.engine import Engine
from kvquilt.testing.pages import PageReport
from kvquilt.testing.results import DraftCounts, Result
from kvquilt.tiers import GroupTierStats

__all__ = ["DiskGroup", "Life", "Refusal", "Task", "life_of", "main", "run_life"]

_LENGTH_BYTES = 8


class Task(msgspec.Struct, frozen=True, tag=True):
    """config: with `ram_bytes` given. role: the first life computes and saves, the second one loads.
    digests: of the pages that the first one saved: (group index, key, digest)."""

    config: BenchConfig
    role: Literal["first", "second"]
    disk_bytes: int
    digests: list[tuple[int, bytes, str]] = []


class DiskGroup(msgspec.Struct, frozen=True):
    """One group's use of the disk. found: pages there when the engine had started, pages: at the end; the
    rest counts the phase alone. loaded: pages put back into the engine."""

    name: str
    ram_slots: int
    slots: int
    found: int
    pages: int
    reads: int
    writes: int
    bad: int
    evictions: int
    dropped: dict[str, int]
    loaded: int


class Life(msgspec.Struct, frozen=True, tag=True):
    """What one engine did. digests: of all pages that it saved. promotions: by what became of them."""

    results: list[Result]
    drafts: DraftCounts
    pages: PageReport
    groups: list[DiskGroup]
    load_failures: int
    bytes_loaded: int
    promotions: dict[str, int]
    digests: list[tuple[int, bytes, str]]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The run cannot be, and why. by_config: the user has to change something."""

    message: str
    by_config: bool


def run_life(task: Task, *, kill: bool) -> Life:
    """Run one life in a process of its own. kill: end it by SIGKILL as soon as it has told, while its
    engine is alive; otherwise it closes its engine.

    Raises ConfigError or BenchError as the child does, and BenchError if it ends in another way.
    """
    with _child() as (process, answers):
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: there will be no answer either
            _send(process.stdin, msgspec.msgpack.encode(task))
        told = _receive(answers)
        if told is None:
            raise BenchError(f"the engine of the {task.role} life ended with status {process.wait()}")
        answer = msgspec.msgpack.decode(told, type=Life | Refusal)
        if isinstance(answer, Refusal):
            raise ConfigError(answer.message) if answer.by_config else BenchError(answer.message)
        if kill:
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.stdin.close()
        status, wanted = process.wait(), -signal.SIGKILL if kill else 0
        if status != wanted:
            raise BenchError(f"the engine of the {task.role} life ended with {status}, not {int(wanted)}")
        return answer


@contextmanager
def _child() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A child that runs `main`, and the pipe on which it answers; killed at the end if it still lives."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", "from kvquilt.bench.lives import main; main()", str(writing)],
                stdin=subprocess.PIPE,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        with process:
            try:
                yield process, answers
            finally:
                if process.poll() is None:
                    process.kill()
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # what a child that has ended never read is still in it
                    process.stdin.close()


def main() -> None:
    """The child: read a task, live it, tell, and wait."""
    quiet_environment()
    task = msgspec.msgpack.decode(_receive(sys.stdin.buffer) or b"", type=Task)
    with os.fdopen(int(sys.argv[1]), "wb") as answers, stdout_to_stderr():
        try:
            with life_of(task) as life:
                _send(answers, msgspec.msgpack.encode(life))
                sys.stdin.buffer.read()
        except KVQuiltError as error:
            refusal = Refusal(str(error), by_config=not isinstance(error, BenchError))
            _send(answers, msgspec.msgpack.encode(refusal))


@contextmanager
def life_of(task: Task) -> Iterator[Life]:
    """Live a task in this process; the engine is at rest and alive inside the block."""
    config, second = task.config, task.role == "second"
    setup, clock = set_up(config), PausableClock()
    progress: BenchProgress = ConsoleProgress(Console(stderr=True))
    found: dict[str, int] = {}

    def look(engine: Engine) -> None:
        wait_for_disk(engine)
        found.update({group.name: group.pages for group in _disk(engine)})

    with open_engine(
        setup,
        progress,
        connector=config.with_disk(setup.ram_bytes, task.disk_bytes),
        clock=clock,
        keep_disk=second,
        started=look,
    ) as engine:
        check_layout(engine, setup)
        recorder = watch_pages(engine, clock)
        recorder.recall(task.digests)
        promoter = engine.connector.scheduler_side.below.promoter
        before, disk, drafts = counts_of(engine), _disk(engine), engine.drafts
        promoted = dict(promoter.counts)
        name, order = ("restart_warm", config.order) if second else ("cold", "same")
        results = run_phase(engine, setup, progress, name, setup.work.prompts, order)
        drafts = engine.drafts.since(drafts)
        with progress.stage("  wait for the disk"):
            rest_disk(engine)
        after = counts_of(engine)
        yield Life(
            results=results,
            drafts=drafts,
            pages=recorder.report(),
            groups=_groups(engine, found, disk, before, after),
            load_failures=after.since(before, "load_failures"),
            bytes_loaded=after.since(before, "loaded_bytes"),
            promotions={name: count - promoted[name] for name, count in promoter.counts.items()},
            digests=[] if second else recorder.digests(),
        )


def _disk(engine: Engine) -> list[GroupTierStats]:
    groups: list[GroupTierStats] = engine.connector.scheduler_side.below.stats().groups
    return groups


def _groups(
    engine: Engine, found: dict[str, int], disk: list[GroupTierStats], before: Counts, after: Counts
) -> list[DiskGroup]:
    ram = {group.name: group.slots for group in engine.connector.scheduler_side.store.stats().groups}
    groups = []
    for old, new in zip(disk, _disk(engine), strict=True):
        dropped = {reason: count - old.dropped.get(reason, 0) for reason, count in new.dropped.items()}
        groups.append(
            DiskGroup(
                name=new.name,
                ram_slots=ram[new.name],
                slots=new.slots,
                found=found[new.name],
                pages=new.pages,
                reads=new.reads - old.reads,
                writes=new.writes - old.writes,
                bad=new.bad - old.bad,
                evictions=new.evictions - old.evictions,
                dropped={reason: count for reason, count in dropped.items() if count},
                loaded=after.since(before, "loaded_pages", new.name),
            )
        )
    return groups


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message; None if the other side ends before it is complete."""
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    data = pipe.read(int.from_bytes(length, "little"))
    return data if len(data) == int.from_bytes(length, "little") else None
