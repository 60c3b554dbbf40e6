"""Random traffic for one engine with everything that can fail failing now and then."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

from harness.brute_force import HitCheck
from harness.connector_support import Quilt, engine_of, tokens
from harness.sibling_connector import SIBLING, ClaimingSibling, Wishes
from kvquilt.testing.faults import CopyPlan, MethodFault, full_store
from kvquilt.vllm.scheduler import SchedulerSide

MAX_TOKENS = 510
NUM_DRAFTS = 3
BASES = [tokens(seed, 600) for seed in range(3)]

COPY_FAULTS: list[dict[str, float]] = [
    {},
    {"fail": 0.2},
    {"late": 0.5},
    {"late report": 0.5},
    {"silent": 0.1, "fail": 0.1, "late": 0.2, "tear": 0.1, "late report": 0.1},
    {"refuse": 0.2},
]

# Where an error may strike: what each hook does first, and what the hooks rest on.
SCHEDULER_SIDE = (
    "match",
    "allocated",
    "doom",
    "on_output",
    "miss_output",
    "build_step",
    "finished",
    "has_push_work",
    "has_block_frees",
    "reset",
    "stats",
)
WORKER_SIDE = ("before_forward", "start_loads", "start_saves", "poll", "take_told", "report")
STORE = ("lookup", "lease_at", "reserve", "pages", "commit")
# After these an error comes too late: what was done is known to nobody.
BEFORE_ONLY = {
    "build_step",
    "commit",
    "lease_at",
    "load",
    "lookup",
    "miss_output",
    "pin",
    "poll",
    "report",
    "reserve",
    "reset",
    "save",
    "take_told",
}


class Injected(Exception):
    """An error that nobody expects."""


def fail_to_commit(real: Any, ticket_id: int, owner: str, *, failed: bool = False) -> None:
    """Fail, unless it is an abort, which is how a failed commit is undone."""
    if not failed:
        raise Injected
    real(ticket_id, owner, failed=True)


def fault_targets(quilt: Quilt) -> list[tuple[Any, str]]:
    out: list[tuple[Any, str]] = [(quilt.side, name) for name in SCHEDULER_SIDE]
    for worker in quilt.workers:
        out += [(worker.worker_side, name) for name in WORKER_SIDE]
        out += [(worker.worker_side.copier, name) for name in ("save", "load", "poll")]
    out += [(quilt.side.loads, name) for name in ("filter_output", "told")]
    out += [(quilt.store, name) for name in STORE]
    return out + ([(quilt.side.pins, "pin")] if quilt.side.pins is not None else [])


def blocks_of_longest(name: str) -> int:
    """The engine starts only if its pool can hold one request of the greatest length."""
    groups, options = engine_of(name)
    drafts = NUM_DRAFTS if options else 0  # of these a recurrent group keeps a state each
    spare = sum(group.spare_blocks + drafts for group in groups)
    return 1 + spare + sum(-(-MAX_TOKENS // group.tokens_per_block) for group in groups)


def make(draw: random.Random, name: str) -> Quilt:
    """An engine with everything chosen by `draw`."""
    ranks = draw.choice([1, 1, 2])
    rates = draw.choice(COPY_FAULTS)
    late = dict.fromkeys(range(ranks), 0)
    if draw.random() < 0.25:
        late[draw.randrange(ranks)] = draw.randrange(1, 4)
    multi = draw.choice([False] * 8 + [True, [SIBLING], [SIBLING]])
    bind = contextlib.ExitStack()
    if draw.random() < 0.03:
        # The connector never learns of the engine's cache manager: it must neither save nor load.
        bind.enter_context(mock.patch.object(SchedulerSide, "bind", side_effect=Injected))
    with bind:
        return new_quilt(draw, name, ranks, rates, late, multi)


def new_quilt(
    draw: random.Random, name: str, ranks: int, rates: Any, late: dict[int, int | None], multi: Any
) -> Quilt:
    groups, options = engine_of(name)
    recurrent = any(group.kind == "recurrent" for group in groups)
    return Quilt(
        groups,
        copies=[CopyPlan(seed=draw.randrange(1 << 30), rates=rates) for _ in range(ranks)],
        late=late,
        step_seconds=0.01,
        pin_cap=draw.choice([None, None, 1_000_000]),
        load_timeout_seconds=draw.choice([0.1, 0.5]),
        ram_bytes=draw.choice([96 << 10, 256 << 10, "1MiB", "4MiB"]),
        retention=draw.choice(["dense", "prompt_end"]),
        group_partition=draw.choice(["solved", "shared_rows"]),
        retain_slack=draw.random() < 0.5,
        retain_generated=draw.random() < 0.7,
        mode="save_only" if draw.random() < 0.05 else "read_write",
        checkpoint_interval=draw.choice([None, None, 128]),
        num_blocks=int(blocks_of_longest(name) * draw.choice([1.05, 1.5, 6])),
        max_num_seqs=draw.choice([2, 8]),
        max_num_batched_tokens=draw.choice([64, 200, 1024]) if not recurrent else draw.choice([128, 1024]),
        enable_prefix_caching=draw.random() < 0.8 or recurrent,
        retention_interval=draw.choice([0, None]),
        async_scheduling=draw.random() < 0.4,
        draft=draw.choice(["best_effort", "best_effort", "required"]),
        runner=draw.choice(["v1", "v1-deferred", "v2"]),
        num_ranks=ranks,
        multi=multi is not False,
        multi_connector=multi,
        load_failure_policy="recompute",
        num_draft_tokens=NUM_DRAFTS,
        **options,
    )


class Traffic:
    """What clients and operators do to one engine."""

    def __init__(self, quilt: Quilt, name: str) -> None:
        self.quilt = quilt
        self.hits = HitCheck(quilt, engine_of(name)[0])
        self.live: list[Any] = []
        self.served = 0
        self._faults = contextlib.ExitStack()

    def add(self, base: int, length: int, tail: int, max_tokens: int, salt: str | None) -> None:
        prompt = BASES[base][:length] + tokens(self.served, tail)
        self.live.append(self.quilt.add(prompt, max_tokens, cache_salt=salt))
        self.served += 1

    def abort(self, which: int, mid_step: bool) -> None:
        if self.live:
            self.quilt.h.abort(self.live[which % len(self.live)].id, mid_step=mid_step)

    def preempt(self, which: int) -> None:
        if self.live:
            self.quilt.h.preempt(self.live[which % len(self.live)].id)

    def reset(self, connector: bool, running: bool = False) -> None:
        scheduler = self.quilt.h.scheduler
        # Waiting for a load, or for its turn with what was loaded.
        idle = [r for r in scheduler.requests.values() if r not in scheduler.running]
        waiting = [r for r in idle if r.status.name == "WAITING_FOR_REMOTE_KVS" or r.num_computed_tokens]
        # Aborted while they were loading: their blocks wait for the copies, too.
        loading = waiting or any(r.is_finished() for r in scheduler.requests.values())
        # Reported failed while their copies went on: so do their pins.
        loading = loading or self.quilt.side.loads.under_way()
        try:
            self.quilt.h.reset_prefix_cache(reset_connector=connector, reset_running_requests=running)
        except RuntimeError:  # the engine's own answer while loads or steps are in flight, and only then
            assert running
            assert loading or scheduler.deferred_frees

    def silence(self, rank: int) -> None:
        """From now on, until the next drain, one rank's connector says nothing at all."""
        self.quilt.late[rank % len(self.quilt.late)].silence()

    def claim(self, claims: bool) -> None:
        """Another connector beside ours claims all prompts from now on, or stops; its loads fail."""
        ClaimingSibling.wishes = Wishes(claim=claims, end=True, fail=True)

    def step(self, times: int) -> None:
        for _ in range(times):
            self.quilt.step()
        assert self.hits.wrong == []
        self.live = [record for record in self.live if record.finish_reason is None]

    def inject(self, which: int, rate: float, after: bool, seed: int) -> None:
        """From now on, until `calm`, something fails now and then."""
        targets = fault_targets(self.quilt)
        target, name = targets[which % len(targets)]
        when: dict[str, Any] = {"rate": rate, "seed": seed}
        if name == "commit":
            fault = MethodFault(target, name, instead=fail_to_commit, **when)
        else:
            fault = MethodFault(target, name, error=Injected, after=after and name not in BEFORE_ONLY, **when)
        self._faults.enter_context(fault)

    def fill(self) -> None:
        """From now on, until `calm`, the store grants nothing."""
        self._faults.enter_context(full_store(self.quilt.store))

    def calm(self) -> None:
        self._faults.close()

    def drain(self) -> None:
        self.calm()
        self.claim(False)
        silent = [late for late in self.quilt.late.values() if late.silent]
        if silent:
            self.quilt.step(30)  # what loads from that rank holds its blocks, the rest goes on
        for late in silent:
            late.heal()
        self.quilt.run()
        assert all(record.finish_reason for record in self.live)
        self.live = []

    def end(self) -> None:
        self.quilt.heal()
        self.drain()
        self.quilt.settle()
        self.quilt.check_end(hook_errors=None)
        assert self.hits.wrong == []
        expected = {"Injected", "TransferError"}
        assert {kind for _, kind in self.quilt.hook_errors()} <= expected, self.quilt.hook_errors()


def random_traffic(seed: int, num_requests: int, name: str) -> dict[str, float]:
    """`num_requests` requests and everything else at random over a layout; what was counted."""
    draw = random.Random(seed)
    quilt = make(draw, name)
    traffic = Traffic(quilt, name)
    with quilt:
        while traffic.served < num_requests:
            act = draw.random()
            if act < 0.35 and len(traffic.live) < 12:
                traffic.add(
                    draw.randrange(3),
                    draw.randrange(1, 400),
                    draw.choice([0, 0, 1, 5, 40]),
                    draw.choice([1, 2, 12, 40]),
                    draw.choice([None, None, None, "x"]),
                )
            elif act < 0.40:
                traffic.abort(draw.randrange(10), draw.random() < 0.5)
            elif act < 0.44:
                traffic.preempt(draw.randrange(10))
            elif act < 0.47:
                traffic.reset(draw.random() < 0.4, draw.random() < 0.3)
            elif act < 0.475:
                traffic.silence(draw.randrange(2))
                traffic.step(draw.randrange(1, 8))
                traffic.drain()
            elif act < 0.48:
                traffic.claim(draw.random() < 0.5)
            elif act < 0.50:
                traffic.inject(
                    draw.randrange(61), draw.choice([0.3, 1.0]), draw.random() < 0.5, draw.randrange(99)
                )
                traffic.step(draw.randrange(1, 5))
                traffic.calm()
            elif act < 0.51:
                traffic.fill()
                traffic.step(3)
                traffic.calm()
            traffic.step(draw.choice([1, 1, 2, 4]))
        traffic.end()
        failures = quilt.count("load_failures")
        return {
            "hit_tokens": quilt.count("hit_tokens"),
            "load_failures": failures,
            "requests": traffic.served,
            "steps": quilt.h.num_steps,
            "look-ups checked": traffic.hits.num_checked,
            "hits": traffic.hits.num_hits,
            "hits without a drafter": traffic.hits.num_without,
        }
