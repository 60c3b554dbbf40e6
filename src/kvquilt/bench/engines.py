"""Engines of a run: started for its workload, warmed up, brought to rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvquilt.bench.expect import ENGINE_INTERVAL
from kvquilt.bench.progress import BenchProgress
from kvquilt.bench.setup import BATCH_TOKENS, BenchSetup
from kvquilt.errors import BenchError, KVQuiltError
from kvquilt.testing.engine import Engine
from kvquilt.testing.results import Result

__all__ = [
    "empty_engine",
    "open_engine",
    "practise",
    "rest_disk",
    "run_one_by_one",
    "wait_for_disk",
    "wait_for_memory",
]

IDLE_SECONDS = 120.0
PREFAULT_SECONDS = 300.0
_POLL_SECONDS = 0.01


@contextmanager
def open_engine(
    setup: BenchSetup,
    progress: BenchProgress,
    *,
    connector: Mapping[str, Any] | None,
    clock: Callable[[], float],
    keep_boundary: int = ENGINE_INTERVAL,
    keep_disk: bool = False,
    started: Callable[[Engine], None] | None = None,
) -> Iterator[Engine]:
    """A running engine, warmed up and empty, whose pool keeps every prompt's prefix.

    keep_boundary: tokens at which its own cache keeps windows too, besides those at prompts' ends.
    keep_disk: what an earlier engine has left on disk stays there. started: called with the engine before
    anything runs in it.
    Raises BenchError if vLLM cannot start it; what kvquilt refuses is raised as it is.
    """
    kind = "without" if connector is None else "with"
    with progress.stage(f"start an engine {kind} kvquilt"):
        engine = _start(setup, connector, clock, keep_boundary)
    with engine:
        if started is not None:
            started(engine)
        with progress.stage("  warm it up"):
            if engine.connector is not None:
                wait_for_memory(engine.connector.scheduler_side.store)
            practise(engine, setup, keep_disk=keep_disk)
        yield engine


def _start(
    setup: BenchSetup, connector: Mapping[str, Any] | None, clock: Callable[[], float], keep_boundary: int
) -> Engine:
    config = setup.config
    # The engine refuses an interval where it has nothing that it could keep fewer of.
    sparse = any(g.kind in ("sliding", "recurrent") for g in setup.model.layout.cacheable_groups)
    try:
        return Engine(
            config.model,
            connector=connector,
            num_blocks=setup.pool_blocks,
            kv_cache_memory_bytes=setup.pool_bytes,
            max_model_len=config.max_model_len,
            max_num_seqs=config.concurrency,
            max_num_batched_tokens=max(BATCH_TOKENS, config.concurrency),
            retention_interval=keep_boundary if sparse else ENGINE_INTERVAL,
            seed=config.seed,
            clock=clock,
            use_tqdm_on_load=False,
            **setup.model.engine,
        )
    except KVQuiltError:
        raise
    except Exception as error:
        raise BenchError(f"the engine did not start with --model={config.model}: {error}") from error


def empty_engine(engine: Engine, *, connector_too: bool = False) -> None:
    """Step to idle and empty the engine's prefix cache. Raises BenchError if it does not empty."""
    try:
        engine.step_until_idle(IDLE_SECONDS)
    except TimeoutError as error:
        raise BenchError(f"the engine does not come to rest: {error}") from error
    if engine.reset_prefix_cache(reset_connector=connector_too) is not True:
        raise BenchError("the engine did not empty its prefix cache: blocks are still in use")


def practise(engine: Engine, setup: BenchSetup, *, keep_disk: bool = False) -> None:
    """Run some other prompts cold and warm, so that no phase pays for compilers or first touches.

    keep_disk: forget them in host memory alone, and fetch them from disk once.
    """
    prompts, config = setup.work.practice, setup.config
    for _ in range(2):
        for _ in range(2):
            engine.run(prompts, max_tokens=config.output_tokens, concurrency=config.concurrency)
        empty_engine(engine)
        if keep_disk:
            rest_disk(engine)
            engine.connector.scheduler_side.store.reset()
    if engine.connector is not None and not keep_disk:
        empty_engine(engine, connector_too=True)


def wait_for_disk(engine: Engine) -> None:
    """Wait until the disk tier knows what it has. Raises BenchError if that takes too long."""
    end = time.monotonic() + PREFAULT_SECONDS
    while engine.connector.scheduler_side.below.tier.state == "starting":
        if time.monotonic() > end:
            raise BenchError(f"the disk tier was not ready after {PREFAULT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


def rest_disk(engine: Engine) -> None:
    """Step to idle, and wait until the disk tier has written and read all that it was given.

    Raises BenchError if it does not come to rest, or is switched off.
    """
    tier = engine.connector.scheduler_side.below.tier
    try:
        engine.step_until_idle(IDLE_SECONDS)
    except TimeoutError as error:
        raise BenchError(f"the engine does not come to rest: {error}") from error
    if not tier.wait_idle(IDLE_SECONDS):
        raise BenchError(f"the disk did not come to rest within {IDLE_SECONDS:.0f} s")
    if tier.state != "on":
        raise BenchError(f"the disk tier is {tier.state}: {tier.stats().why}")


def run_one_by_one(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    concurrency: int,
    progress: Callable[[int, int], None],
) -> list[Result]:
    """As `Engine.run`, but with at most one new request in each step."""
    running: dict[str, int] = {}
    results: dict[int, Result] = {}
    waiting = iter(range(len(prompts)))
    while len(results) < len(prompts):
        if len(running) < concurrency and (index := next(waiting, None)) is not None:
            running[engine.add(prompts[index], max_tokens=max_tokens)] = index
        engine.step()
        for key in [key for key in running if engine.finished(key)]:
            results[running.pop(key)] = engine.take_result(key)
            progress(len(results), len(prompts))
    return [results[index] for index in range(len(prompts))]


def wait_for_memory(store: Any) -> None:
    """Wait until all slots are usable: a phase must measure copies, not the page faults of a start.

    Raises BenchError after `PREFAULT_SECONDS`.
    """
    end = time.monotonic() + PREFAULT_SECONDS
    while any(group.usable_slots < group.slots for group in store.stats().groups):
        if time.monotonic() > end:
            raise BenchError(f"kvquilt's memory was not ready after {PREFAULT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
