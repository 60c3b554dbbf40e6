"""vLLM's real scheduler, KV cache manager and connectors over a simulated model.

For layouts that no tiny model has, and for exact control of when things happen: every step is one
call, every entry that attention would read is checked (see `sim_model`).

    groups = [GroupShape("full", 32), GroupShape("sliding", 16, window=64)]
    with SchedulerHarness(groups, num_blocks=256) as harness:
        first = harness.add(range(1000), max_tokens=4)
        harness.run_until_idle()
        harness.reset_prefix_cache()
        second = harness.add(range(1000), max_tokens=4)
        harness.run_until_idle()
        assert second.external_hit == 992
        harness.check_idle()
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from kvquilt.testing.harness_records import Admission, Hang, HarnessRequest, LeakError
from kvquilt.testing.sim_config import EngineConfig, MemoryLayout, Speculation
from kvquilt.testing.sim_engine import OnWorker, SimEngine, kv_transfer_options
from kvquilt.testing.sim_shapes import GroupShape
from kvquilt.testing.sim_worker import RunnerKind

__all__ = ["SchedulerHarness"]

_POLL_SECONDS = 0.0005
_IDLE_STEPS = 50


class SchedulerHarness:
    """One engine without a model; a context manager.

    groups: the cache groups, in the engine's order.
    num_blocks: blocks in the engine's pool, the null block included.
    connector, module: class and module of the KV connector; connector=None for none.
    extra_config: the connector's own options.
    retention_interval: the engine's `prefix_cache_retention_interval`: 0 keeps, in sliding groups,
    only blocks at prompts' boundaries; None keeps all.
    num_ranks: workers. With more than one, messages are serialised and outputs aggregated as
    between the engine's processes.
    async_scheduling: two steps in flight.
    runner: order of the worker's hooks, and (v2) the form of the scheduler's messages.
    multi_connector: True wraps the connector in the engine's MultiConnector; a list of
    `kv_transfer_config` mappings adds these after it.
    load_failure_policy: the engine's `kv_load_failure_policy`; None leaves its default.
    kv_events: the engine's `kv_events_config`; None for none.
    speculation, num_draft_tokens: drafts are proposed and verified; some are wrong. Recurrent groups
    then keep a state for each.
    on_worker: called with (rank, connector) of each worker after construction and again after
    `register_kv_caches`, with "made" or "registered" as third argument; the place for faults.

    Raises what vLLM or the connector raises if it cannot start.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        *,
        num_blocks: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 8192,
        connector: str | None = "KVQuiltConnector",
        module: str = "kvquilt.vllm",
        extra_config: Mapping[str, Any] | None = None,
        enable_prefix_caching: bool = True,
        retention_interval: int | None = 0,
        num_ranks: int = 1,
        async_scheduling: bool = False,
        runner: RunnerKind = "v1",
        multi_connector: bool | Sequence[Mapping[str, Any]] = False,
        load_failure_policy: str | None = None,
        memory_layout: MemoryLayout = "auto",
        hash_algorithm: str = "sha256",
        scheduler_options: Mapping[str, Any] | None = None,
        kv_events: Mapping[str, Any] | None = None,
        speculation: Speculation | None = None,
        num_draft_tokens: int = 3,
        on_worker: OnWorker | None = None,
    ) -> None:
        self.requests: dict[str, HarnessRequest] = {}
        self.num_steps = 0
        self._ids = itertools.count()
        self._mid_step_aborts: list[str] = []
        config = EngineConfig(
            groups=tuple(groups),
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_transfer=kv_transfer_options(
                connector, module, extra_config, multi_connector, load_failure_policy
            ),
            enable_prefix_caching=enable_prefix_caching,
            retention_interval=retention_interval,
            num_ranks=num_ranks,
            async_scheduling=async_scheduling,
            memory_layout=memory_layout,
            hash_algorithm=hash_algorithm,
            scheduler_options=scheduler_options or {},
            kv_events=kv_events,
            speculation=speculation,
            num_draft_tokens=num_draft_tokens,
        )
        self.engine = SimEngine(config, runner, on_worker, self._salt_of, self._admitted)

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration objects."""
        return self.engine.config

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.engine.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler side's connector, or None."""
        return self.scheduler.connector

    @property
    def worker_connectors(self) -> list[Any]:
        """The workers' connectors, by rank."""
        return [worker.connector for worker in self.engine.workers]

    @property
    def block_pool(self) -> Any:
        """The engine's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self,
        prompt_tokens: Iterable[int],
        max_tokens: int = 1,
        id: str | None = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool | None = None,
        priority: int = 0,
    ) -> HarnessRequest:
        """Add a request; nothing is computed before the next step.

        id: defaults to "r0", "r1", ... An id may be used again once its request has ended.
        cache_salt: the engine's; requests of different salts must not share KV.
        """
        from vllm import SamplingParams
        from vllm.v1.request import Request

        record = HarnessRequest(
            id=id if id is not None else f"r{next(self._ids)}",
            prompt=list(prompt_tokens),
            max_tokens=max_tokens,
            salt=cache_salt or "",
        )
        if record.id in self.scheduler.requests:
            raise ValueError(f"request {record.id!r} has not ended yet")
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, skip_reading_prefix_cache=skip_reading_prefix_cache
        )
        self.requests[record.id] = record
        self.scheduler.add_request(
            Request(
                record.id,
                list(record.prompt),
                params,
                None,
                cache_salt=cache_salt,
                priority=priority,
                block_hasher=self.engine.hasher,
            )
        )
        return record

    def abort(self, id: str, mid_step: bool = False) -> None:
        """Abort a request; with `mid_step`, while the next step is executing."""
        if mid_step:
            self._mid_step_aborts.append(id)
            return
        from vllm.v1.request import RequestStatus

        if self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED):
            self.requests[id].finish_reason = "abort"

    def preempt(self, id: str) -> bool:
        """Preempt a running request as the scheduler does; False if it is not running."""
        scheduler = self.scheduler
        request = scheduler.requests.get(id)
        if request is None or request not in scheduler.running:
            return False
        scheduler.running.remove(request)
        # Dropping what is in flight, and the workers' record of it, is what the engine does when
        # the request may resume in the very next step.
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(id)
        return True

    def reset_prefix_cache(self, reset_connector: bool = False, reset_running_requests: bool = False) -> bool:
        """The engine's own call; False where the engine refuses."""
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector))

    def pause(self, mode: Literal["none", "new", "all"]) -> None:
        """Set what the scheduler holds back: nothing, new requests, or everything."""
        from vllm.v1.core.sched.interface import PauseState

        states = {
            "none": PauseState.UNPAUSED,
            "new": PauseState.PAUSED_NEW,
            "all": PauseState.PAUSED_ALL,
        }
        self.scheduler.set_pause_state(states[mode])

    def has_work(self) -> bool:
        """True while the engine would go on stepping."""
        return self.engine.num_inflight > 0 or bool(self.scheduler.has_requests())

    def step(self) -> bool:
        """One step of the engine's loop, also if it has no tokens to compute.

        Returns True if something moved: tokens were computed, or a transfer or request ended.
        """
        before = self._progress()
        self.num_steps += 1
        computed, outputs = self.engine.step(self._mid_step)
        for item in outputs:
            record = self.requests[item.request_id]
            record.take(item.new_token_ids)
            if item.finish_reason is not None:
                record.finish_reason = str(item.finish_reason)
        return computed or self._progress() != before

    def run_until_idle(self, max_steps: int = 100_000, stall_seconds: float = 10.0) -> int:
        """Step until the engine has no work left; returns the number of steps.

        Raises Hang after `max_steps`, or when nothing has moved for `stall_seconds`.
        """
        return self.run_until(lambda: not self.has_work(), max_steps, stall_seconds)

    def run_until(
        self, condition: Callable[[], bool], max_steps: int = 100_000, stall_seconds: float = 10.0
    ) -> int:
        """Step until `condition()`, as `run_until_idle`."""
        idle_steps = 0
        idle_since = time.monotonic()
        for steps in range(max_steps):
            if condition():
                return steps
            if self.step():
                idle_steps = 0
                continue
            # Both limits: a few steps on a slow machine are no hang, nor are many fast ones.
            idle_steps += 1
            if idle_steps == 1:
                idle_since = time.monotonic()
            elif idle_steps > _IDLE_STEPS and time.monotonic() - idle_since > stall_seconds:
                raise Hang(f"nothing moved in {idle_steps} steps, {stall_seconds} s: {self.describe()}")
            # Only a connector's own threads can move things now: poll, but let them run.
            time.sleep(_POLL_SECONDS)
        if condition():
            return max_steps
        raise Hang(f"not done after {max_steps} steps: {self.describe()}")

    def describe(self) -> str:
        """Who is where, for error messages."""
        states = ", ".join(
            f"{name}: {request.status.name} {request.num_computed_tokens}/{request.num_tokens}"
            for name, request in self.scheduler.requests.items()
        )
        free = self.block_pool.get_num_free_blocks()
        total = self.config.num_blocks
        return f"step {self.num_steps}, {free} of {total} blocks free; {states or 'no requests'}"

    def check_idle(self) -> None:
        """Raise LeakError unless the engine is idle and has every block back.

        Also StrayWrite if memory that nobody holds, or the null block, was written.
        """
        self.engine.check_memory()
        held = [block.block_id for block in self.block_pool.blocks[1:] if block.ref_cnt]
        free = self.block_pool.get_num_free_blocks()
        problems = []
        if self.engine.num_inflight or self.scheduler.requests:
            problems.append("requests or steps are left")
        if held or free != self.config.num_blocks - 1:
            problems.append(f"blocks still held: {held[:20]}, free {free} of {self.config.num_blocks - 1}")
        if self.scheduler.deferred_frees:
            problems.append("blocks wait to be freed")
        if self.connector is not None and self.connector.has_pending_push_work():
            problems.append("the connector has work left")
        if self.connector is not None and self.connector.has_pending_block_frees():
            problems.append("the connector says that it pins blocks")
        if problems:
            raise LeakError(f"not idle: {'; '.join(problems)}; {self.describe()}")

    def shutdown(self) -> None:
        """Shut the connectors down, as the engine does at its end. May be called twice."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _salt_of(self, id: str) -> str:
        return self.requests[id].salt

    def _admitted(self, id: str, local: int, external: int, asynchronous: bool, preempted: bool) -> None:
        self.requests[id].admissions.append(
            Admission(self.num_steps, local, external, asynchronous, preempted)
        )

    def _mid_step(self) -> None:
        aborts, self._mid_step_aborts = self._mid_step_aborts, []
        for id in aborts:
            self.abort(id)

    def _progress(self) -> tuple[int, ...]:
        requests = self.scheduler.requests
        return (
            len(requests),
            sum(len(record.admissions) + len(record.output) for record in self.requests.values()),
            len(self.scheduler.finished_recving_kv_req_ids),
            self.block_pool.get_num_free_blocks(),
            self.engine.num_inflight,
        )
