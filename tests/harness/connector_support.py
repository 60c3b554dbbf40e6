"""The real connector in the scheduler harness: layouts, clocks, and what must hold at all times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from harness.helpers import tokens
from kvquilt.testing.copy_faults import CopyPlan, FaultyCopier
from kvquilt.testing.faults import LateWorker
from kvquilt.testing.harness_records import HarnessRequest
from kvquilt.testing.scheduler_harness import SchedulerHarness
from kvquilt.testing.sim_shapes import GroupShape

__all__ = ["KINDS", "LAYOUTS", "Quilt", "engine_of", "full", "sliding", "states", "tokens"]


def full(tokens_per_block: int, **more: Any) -> GroupShape:
    return GroupShape("full", tokens_per_block, **more)


def sliding(tokens_per_block: int, window: int, **more: Any) -> GroupShape:
    return GroupShape("sliding", tokens_per_block, window=window, **more)


LAYOUTS: dict[str, list[GroupShape]] = {
    "full 32 + sliding 16": [full(32, num_layers=2), sliding(16, 64)],
    "two windows, full last": [sliding(16, 20), sliding(32, 100), full(16)],
    "three windows": [sliding(16, 33), sliding(32, 90, num_layers=2), full(32), sliding(16, 200)],
    "five sliding, full last": [*[sliding(16, 33) for _ in range(5)], full(16)],
    "full only": [full(16)],
    "sliding only": [sliding(16, 64)],
    "two sliding, no full": [sliding(16, 40), sliding(32, 90)],
    "sizes that do not divide": [full(32), sliding(48, 64)],
    "sliding larger than full": [full(16, bytes_per_token=24), sliding(64, 200)],
    "two full, two windows": [sliding(32, 64), full(64), sliding(16, 100), full(32)],
    "extra tokens": [full(16), sliding(16, 48, extra_tokens=3)],
}


def states(tokens_per_block: int, state_bytes: int, **more: Any) -> GroupShape:
    return GroupShape("recurrent", tokens_per_block, state_bytes=state_bytes, **more)


def chunked(tokens_per_block: int, chunk: int, **more: Any) -> GroupShape:
    return GroupShape("chunked", tokens_per_block, chunk=chunk, **more)


def latent(tokens_per_block: int, **more: Any) -> GroupShape:
    return full(tokens_per_block, replicated=True, **more)


KINDS: dict[str, list[GroupShape]] = {
    "states": [full(64, bytes_per_token=16), states(64, 1024, num_layers=2)],
    "states of several sizes": [
        states(64, 1024),
        full(64, bytes_per_token=16),
        states(64, 40, num_layers=2),
        states(64, 264),
    ],
    "padded states": [full(32, bytes_per_token=16), states(32, 200, padded_bytes=512)],
    "states larger than blocks": [full(16), states(64, 128)],
    "all states": [full(32), states(32, 256, state_mode="all")],
    "all states and a window": [full(32), states(32, 256, state_mode="all"), sliding(32, 40)],
    "states only": [states(32, 128)],
    "chunked": [chunked(16, 64, num_layers=2), full(16)],
    "chunked, states": [full(32), chunked(32, 96), states(32, 80)],
    "full, two windows, states": [full(48, num_layers=2), sliding(16, 40), sliding(32, 100), states(96, 40)],
    "sliding, states, full": [sliding(32, 64), states(64, 512), full(64)],
    "mtp": [sliding(16, 64), full(16), full(16, draft=True, drafter="mtp", bytes_per_token=16)],
    "mtp with a window": [full(32), sliding(16, 40, extra_tokens=2, draft=True, drafter="numbered")],
    "eagle, no group flagged": [full(32), sliding(16, 40), full(32, drafter="numbered")],
    "draft model": [sliding(64, 64), full(32), full(128, drafter="draft_model", bytes_per_token=16)],
    "states, draft model": [
        full(64, bytes_per_token=16),
        states(64, 1024, num_layers=2),
        full(32, drafter="draft_model", bytes_per_token=16),
    ],
    "small states, mtp": [
        states(16, 64),
        full(16),
        full(16, draft=True, drafter="mtp", bytes_per_token=16),
    ],
    "sliding, states, eagle": [full(32), sliding(32, 64), states(64, 128), full(32, drafter="numbered")],
    "scratch ring": [full(32), GroupShape("ring", 16), sliding(16, 40)],
    "scratch replay": [full(32, num_layers=2), GroupShape("replay", 16, window=64)],
    "unequal layers": [full(32, layer_bytes=(8, 24, 16)), sliding(16, 40)],
    "two caches per layer": [full(32, num_layers=2), full(32, beside=0, num_layers=2, bytes_per_token=16)],
    "latent": [latent(16, num_layers=2, bytes_per_token=24), sliding(32, 100)],
}
"""Layouts of the kinds beyond full and sliding groups."""

SPECULATION = {
    "mtp": "mtp",
    "mtp with a window": "mtp",
    "eagle, no group flagged": "eagle",
    "draft model": "draft_model",
    "states, draft model": "draft_model",
    "small states, mtp": "mtp",
    "sliding, states, eagle": "eagle",
}


def engine_of(name: str) -> tuple[list[GroupShape], dict[str, Any]]:
    """Groups and engine options of a layout."""
    if name in LAYOUTS:
        return LAYOUTS[name], {}
    return KINDS[name], {"speculation": SPECULATION[name]} if name in SPECULATION else {}


class Quilt:
    """One engine with kvquilt; a context manager.

    options: of the connector. copies: a plan of copy faults per rank (or one for all).
    late: `LateWorker` steps by rank, None there for silence. step_seconds: what the connector's
    clock advances in a step; None for the real clock. pin_cap: blocks that pins alone may hold;
    None for the product's own cap, at which steps faster than their copies save less.
    prepare: called with each worker's connector when it is "made" and when "registered". multi: wrap
    the connector in the engine's MultiConnector. Further options are the harness's.
    """

    def __init__(
        self,
        groups: list[GroupShape],
        *,
        copies: CopyPlan | list[CopyPlan] | None = None,
        late: Mapping[int, int | None] | None = None,
        step_seconds: float | None = None,
        num_blocks: int = 400,
        multi: bool = False,
        pin_cap: int | None = 1_000_000,
        prepare: Callable[[Quilt, Any, str], None] | None = None,
        **rest: Any,
    ) -> None:
        names = ("ram_bytes", "group_partition", "retention", "retain_slack", "retain_generated")
        names += ("checkpoint_interval", "namespace_salt", "load_timeout_seconds", "mode", "draft")
        names += ("disk_path", "disk_bytes", "disk_write", "disk_lora")
        multi_connector = rest.pop("multi_connector", True)
        options: dict[str, Any] = {"ram_bytes": "4MiB", **{n: rest.pop(n) for n in names if n in rest}}
        self.late: dict[int, LateWorker] = {}
        self.copiers: list[FaultyCopier] = []
        self._now = 0.0
        self._step_seconds = step_seconds

        def on_worker(rank: int, connector: Any, when: str) -> None:
            if multi:
                connector = connector._connectors[0]
            if prepare is not None:
                prepare(self, connector, when)
            if when == "made":
                if step_seconds is not None:
                    connector.worker_side._clock = self.clock
                if late is not None and rank in late:
                    self.late[rank] = LateWorker(connector, late[rank])
                return
            plan = copies[rank] if isinstance(copies, list) else copies
            copier = FaultyCopier(connector.worker_side.copier, plan or CopyPlan())
            connector.worker_side.copier = copier
            self.copiers.append(copier)

        self.h = SchedulerHarness(
            groups,
            num_blocks=num_blocks,
            extra_config=options,
            on_worker=on_worker,
            **({"multi_connector": multi_connector} if multi else {}),
            **rest,
        )
        root = self.h.connector
        self.connector = root._connectors[0] if multi else root
        workers = self.h.worker_connectors
        self.workers = [w._connectors[0] for w in workers] if multi else workers
        if pin_cap is not None and self.side.pins is not None:
            self.side.pins.cap = pin_cap
        if step_seconds is not None:
            self.side.clock = self.side.loads._clock = self.side.saves._clock = self.clock

    def clock(self) -> float:
        return self._now

    @property
    def side(self) -> Any:
        return self.connector.scheduler_side

    @property
    def store(self) -> Any:
        return self.side.store

    @property
    def layout(self) -> Any:
        return self.side.layout

    # ---- what a client of the engine does ----

    def add(self, prompt: list[int], max_tokens: int = 1, **more: Any) -> HarnessRequest:
        return self.h.add(prompt, max_tokens=max_tokens, **more)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self._step_seconds is not None:
                self._now += self._step_seconds
            self.h.step()
            self.check_step()

    def run(self, max_steps: int = 20_000) -> None:
        """Step until idle, checking every step."""
        if self._step_seconds is None:
            self.h.run_until_idle(max_steps)
        else:
            self.h.run_until(self._idle_after_tick, max_steps, stall_seconds=60.0)
        self.check_step()

    def settle(self) -> None:
        """Nothing fails any more; step until every copy has ended, also those given up."""
        self.heal()
        self.run()
        self.h.run_until(lambda: not (self.side.loads.under_way() or self.side.saves.under_way()))
        self.check_step()

    def _idle_after_tick(self) -> bool:
        self._now += self._step_seconds or 0.0
        self.check_step()
        return not self.h.has_work()

    def serve(self, prompt: list[int], max_tokens: int = 1, **more: Any) -> HarnessRequest:
        record = self.add(prompt, max_tokens, **more)
        self.run()
        return record

    def serve_beside(self, prompt: list[int]) -> HarnessRequest:
        """`serve` while others are not to be finished: until this one is, and its saves are."""
        record = self.add(prompt)
        self.h.run_until(lambda: record.finish_reason is not None and not self.side.saves.under_way())
        return record

    def forget(self) -> None:
        """The engine's own cache is emptied; the store is not."""
        assert self.h.reset_prefix_cache()

    def start(self) -> None:
        """Run something, so that all ranks have attached the pools."""
        self.serve(tokens(99_991, self.layout.lattice_tokens + 1))
        assert len(self.side._attached) == self.side.num_ranks

    # ---- faults ----

    def heal(self) -> None:
        for copier in self.copiers:
            copier.heal()
        for late in self.late.values():
            late.heal()

    def fault_at_next(self, fault: str, rank: int = 0, jobs: int = 1) -> None:
        """The next copy jobs of one rank go wrong."""
        copier = self.copiers[rank]
        first = copier._num_jobs
        copier._plan = CopyPlan(at={first + i: fault for i in range(jobs)})  # type: ignore[dict-item]

    # ---- what must hold ----

    def check_step(self) -> None:
        """Holds after every step: every slot is accounted for, every pin is a reference."""
        self.store.audit()
        pins = self.side.pins
        if pins is None:  # the engine's cache manager never became known
            return
        blocks = self.h.block_pool.blocks
        for block_id, count in pins._pins.items():
            assert count > 0
            assert blocks[block_id].ref_cnt >= count, f"block {block_id}: {count} pins"
        assert 0 not in pins._pins

    def check_end(self, hook_errors: int | None = 0) -> None:
        """Holds once all is over: nothing is leased, reserved, pinned or waiting."""
        self.check_disk()
        audit = self.store.audit()
        assert (audit.leases, audit.tickets) == (0, 0)
        assert self.side.pins is None or len(self.side.pins) == 0
        assert self.side.loads.under_way() == self.side.saves.under_way() == 0
        assert not self.side._states
        if hook_errors is not None:
            assert sum(self.hook_errors().values()) == hook_errors, self.hook_errors()
        self.h.check_idle()

    def check_disk(self) -> None:
        """The disk tier, if there is one, comes to rest, and its index leases nothing."""
        below = self.side.below
        if below is None:
            return
        assert below.tier.wait_idle(60)
        assert not below.promoter._promotions
        if below.tier._opened is not None:
            audit = below.tier._opened.index.audit()
            assert (audit.leases, audit.tickets) == (0, 0)

    def hook_errors(self) -> dict[tuple[str, str], int]:
        total: dict[tuple[str, str], int] = {}
        for connector in (self.connector, *self.workers):
            for cause, count in connector._hook_errors.items():
                total[cause] = total.get(cause, 0) + count
        return total

    # ---- what was saved ----

    def pages(self) -> dict[str, int]:
        """Visible pages per group."""
        return {group.name: group.pages for group in self.store.stats().groups}

    def saved_blocks(self, prompt: list[int], group: int, **more: Any) -> list[int]:
        """Blocks of `group` that the store holds (or is writing) for a prompt."""
        chain = self.chain(prompt, **more)
        blocks = np.arange(chain.num_blocks(group), dtype=np.int64)
        missing = self.store.missing(chain, group, blocks)
        return [int(b) for b in blocks[~missing]]

    def chain(self, prompt: list[int], cache_salt: str | None = None) -> Any:
        from kvquilt.store import Chain

        chain = Chain(self.layout)
        chain.extend(self.request(prompt, cache_salt=cache_salt).block_hashes)
        return chain

    def request(self, prompt: list[int], **more: Any) -> Any:
        """A request of the engine that nobody adds to it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            "probe",
            list(prompt),
            SamplingParams(max_tokens=1),
            None,
            block_hasher=self.h.engine.hasher,
            **more,
        )

    def count(self, name: str, label: str | None = None) -> float:
        return float(self.side.meter.total(name, label))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.h.shutdown()
