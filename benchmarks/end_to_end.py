"""Save and load end to end: through the connector's worker side, and as a request sees them.

    python benchmarks/end_to_end.py [--model gemma4-mini] [--rounds 15] [--mib 32] [--json]

Copies: one save job and one load job of `--mib` MiB over all groups, encoded, handed to the worker
side, copied by its threads between the engine's own tensors and the pools, and collected; the
limit is one memcpy of as many bytes between two flat buffers on one thread.
Warm start: the time to the first token of prompts whose KV comes from kvquilt's pools (the
engine's cache is emptied before each pass) beside the same prompts from the engine's own prefix
cache, pass by pass in turns. Limit: 1.1 times the engine's own hit, or that hit plus two engine
steps if that is more; a step is that of one request that generates.
All figures are medians. Exit status 1 if a warm start is above its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# The engine's threads spin between parallel regions otherwise, and starve all others of a small
# machine. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from kvquilt.testing.engine import Engine
from kvquilt.vllm.metadata import CopyList, LoadJob, SaveJob, StepPlan, decode_reports, encode_plan

PROMPTS, PROMPT_TOKENS = 24, 1500
ALLOWED_RATIO = 1.1
ALLOWED_STEPS = 2
FIRST_JOB = 1 << 40
"""Far from the connector's own job numbers."""


class Copies:
    """Jobs straight to the worker side, over slots that no page of the store uses yet."""

    def __init__(self, engine: Engine, num_bytes: int) -> None:
        self._worker = engine.worker_connector.worker_side
        side = engine.connector.scheduler_side
        groups = [i for i, g in enumerate(side.layout.groups) if g.cacheable and g.page_bytes]
        row = sum(side.layout.groups[i].page_bytes for i in groups)
        slots = [side.plan.slots[side.layout.groups[i].name] for i in groups]
        # One engine block belongs to one group at a time, so every page has a block of its own.
        room = (engine.block_pool.num_gpu_blocks - 1) // len(groups)
        count = min(num_bytes // row, room, *(n // 2 for n in slots))
        rng = np.random.default_rng(0)
        self.pages = CopyList.of(
            np.repeat(np.asarray(groups, dtype=np.int32), count),
            rng.permutation(len(groups) * count) + 1,
            np.concatenate([n - 1 - np.arange(count) for n in slots]),
        )
        self.num_bytes = count * row
        self._source = np.ones(self.num_bytes, dtype=np.uint8)
        self._target = np.ones(self.num_bytes, dtype=np.uint8)
        self._next = FIRST_JOB

    def save(self) -> float:
        """Seconds of one save job, from its message to its end."""
        self._next += 1
        return self._timed(StepPlan(saves=(SaveJob(self._next, self.pages),)))

    def load(self) -> float:
        """Seconds of one load job."""
        self._next += 1
        return self._timed(StepPlan(loads=(LoadJob(self._next, "benchmark", self.pages, 60.0),), idle=True))

    def memcpy(self) -> float:
        """Seconds of the limit."""
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - begin

    def _timed(self, plan: StepPlan) -> float:
        worker = self._worker
        begin = time.perf_counter()
        worker.before_forward(worker.take_plan(encode_plan(plan)))
        worker.start_loads()
        worker.start_saves()
        worker.poll()
        worker.copier.wait(2 * self._next + len(plan.loads), None)
        worker.poll()
        seconds = time.perf_counter() - begin
        worker.take_told()
        (report,) = decode_reports(worker.report())
        if [(end.job_id, end.ok) for end in (*report.saves, *report.loads)] != [(self._next, True)]:
            raise RuntimeError(f"the copy did not end well: {report}")
        return seconds


class Warm:
    """Passes over the same prompts in one engine."""

    def __init__(self, engine: Engine) -> None:
        rng = np.random.default_rng(0)
        self._engine = engine
        self._prompts = rng.integers(3, 2048, (PROMPTS, PROMPT_TOKENS)).tolist()
        self.steps: list[float] = []

    def run(self, *, reset: bool) -> tuple[float, int, int]:
        """Median time to the first token in seconds; local and external hit tokens."""
        engine = self._engine
        if reset and not engine.reset_prefix_cache():
            raise RuntimeError("the engine refused to reset its prefix cache: blocks are still in use")
        results = engine.run(self._prompts, max_tokens=1, concurrency=1)
        engine.step_until_idle()
        median = statistics.median(r.ttft_seconds or 0.0 for r in results)
        return median, sum(r.local_hit_tokens for r in results), sum(r.external_hit_tokens for r in results)

    def time_steps(self) -> None:
        """Steps of one request that generates; the prompt is the engine's own hit."""
        engine = self._engine
        key = engine.add(self._prompts[-1], max_tokens=17)
        engine.step()
        while not engine.finished(key):
            begin = time.perf_counter()
            engine.step()
            self.steps.append(time.perf_counter() - begin)
        engine.take_result(key)
        engine.step_until_idle()


def measure_copies(engine: Engine, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Save and load beside the memcpy, in turns; the first round only warms up."""
    copies = Copies(engine, num_bytes)
    ways: dict[str, Callable[[], float]] = {"save": copies.save, "load": copies.load, "memcpy": copies.memcpy}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            spent = way()
            if turn:
                seconds[name].append(spent)
    limit = statistics.median(seconds["memcpy"])
    return [
        {
            "what": name,
            "mib": round(copies.num_bytes / (1 << 20), 1),
            "ms": round(statistics.median(seconds[name]) * 1e3, 3),
            "limit_ms": round(limit * 1e3, 3),
            "ratio": round(statistics.median(seconds[name]) / limit, 3),
        }
        for name in ("save", "load")
    ]


def measure_warm(engine: Engine, rounds: int) -> dict[str, Any]:
    """The warm start beside the engine's own prefix hit, in turns."""
    warm = Warm(engine)
    computed, _, _ = warm.run(reset=True)
    own: list[float] = []
    ours: list[float] = []
    for turn in range(rounds + 1):
        mine, _, external = warm.run(reset=True)
        theirs, local, _ = warm.run(reset=False)
        if not turn:
            continue
        warm.time_steps()
        ours.append(mine)
        own.append(theirs)
        if external != local:
            raise RuntimeError(f"{external} tokens came from kvquilt, {local} from the engine's own cache")
    step, hit, figure = (statistics.median(values) for values in (warm.steps, own, ours))
    limit = max(ALLOWED_RATIO * hit, hit + ALLOWED_STEPS * step)
    return {
        "what": "warm start",
        "computed_ms": round(computed * 1e3, 3),
        "hit_tokens": external,
        "ms": round(figure * 1e3, 3),
        "engine_hit_ms": round(hit * 1e3, 3),
        "engine_step_ms": round(step * 1e3, 3),
        "limit_ms": round(limit * 1e3, 3),
        "times_engine_hit": round(statistics.median(a / b for a, b in zip(ours, own, strict=True)), 3),
        "ratio": round(figure / limit, 3),
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma4-mini")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=32, help="MiB copied per job")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    options = parser.parse_args()
    load = os.getloadavg()
    with Engine(options.model, connector={"ram_bytes": "512MiB"}) as engine:
        warm = measure_warm(engine, options.rounds)
        copies = measure_copies(engine, options.mib << 20, options.rounds)
    if options.json:
        print(
            json.dumps(
                {"model": options.model, "load_average": load, "copies": copies, "warm": warm}, indent=2
            )
        )
    else:
        print(f"{options.model}, {options.rounds} rounds, load average {load[0]:.1f}")
        for row in copies:
            print(
                f"{row['what']:>10}  {row['mib']:6.1f} MiB  {row['ms']:8.3f} ms  "
                f"limit {row['limit_ms']:8.3f} ms (one memcpy)  ratio {row['ratio']}"
            )
        print(
            f"{warm['what']:>10}  {warm['hit_tokens']:,} tokens  {warm['ms']:.3f} ms  "
            f"limit {warm['limit_ms']:.3f} ms  ratio {warm['ratio']}"
        )
        own, step, computed = warm["engine_hit_ms"], warm["engine_step_ms"], warm["computed_ms"]
        print(f"{'':>10}  {warm['times_engine_hit']} times the engine's own hit of {own:.3f} ms; ", end="")
        print(f"one step {step:.3f} ms; computed {computed:.3f} ms")
    return int(warm["ratio"] > 1)


if __name__ == "__main__":
    sys.exit(main())
