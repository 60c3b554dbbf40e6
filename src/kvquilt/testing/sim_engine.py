"""The engine's loop without a model: real scheduler, real connectors, simulated workers."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kvquilt.testing.harness_records import BlockWatch
from kvquilt.testing.sim_config import EngineConfig
from kvquilt.testing.sim_memory import SimMemory
from kvquilt.testing.sim_worker import RunnerKind, SimWorker

__all__ = ["OnWorker", "SimEngine", "kv_transfer_options"]

OnWorker = Callable[[int, Any, Literal["made", "registered"]], None]


class SimEngine:
    """What the engine core and its executor do in a step, in their order.

    config: the configuration. runner, on_worker: see `SchedulerHarness`. salt_of: the salt of a
    request. admitted: see `BlockWatch`.

    scheduler: vLLM's own. workers: one per rank. hasher: the block hasher that requests get.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: RunnerKind,
        on_worker: OnWorker | None,
        salt_of: Callable[[str], str],
        admitted: Callable[[str, int, int, bool, bool], None],
    ) -> None:
        self.config = config
        if config.speculation is not None and runner == "v1":
            runner = "v1-deferred"
        self.hasher = _request_hasher(config)
        self.workers: list[SimWorker] = []
        self.scheduler: Any = None
        self._inflight: deque[tuple[Any, Any, list[Callable[[], None]]]] = deque()
        self._aggregator: Any = None
        self._closed = False
        try:
            # As in the engine: the workers' connectors exist, and have their memory, before the
            # scheduler's does.
            for rank in range(config.num_ranks):
                self.workers.append(SimWorker(config, config.groups, rank, runner, salt_of))
                self._register(self.workers[rank], on_worker)
            self.scheduler = _make_scheduler(config)
            if runner == "v2":
                self.scheduler.use_v2_model_runner = True
            self._watch = BlockWatch(self.scheduler.kv_cache_manager, admitted)
            if config.num_ranks > 1 and self.scheduler.connector is not None:
                from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

                self._aggregator = KVOutputAggregator.from_connector(
                    self.scheduler.connector, config.num_ranks
                )
        except BaseException:
            self.shutdown()
            raise

    @staticmethod
    def _register(worker: SimWorker, on_worker: OnWorker | None) -> None:
        if worker.connector is None:
            return
        if on_worker:
            on_worker(worker.rank, worker.connector, "made")
        worker.register()
        if on_worker:
            on_worker(worker.rank, worker.connector, "registered")

    @property
    def num_inflight(self) -> int:
        """Steps executed whose output the scheduler has not taken yet."""
        return len(self._inflight)

    def step(self, mid_step: Callable[[], None]) -> tuple[bool, list[Any]]:
        """Returns (tokens were computed, the engine's outputs per request).

        mid_step: called between execution and the scheduler's update, where the engine aborts.
        """
        scheduler = self.scheduler
        computed = False
        if scheduler.has_requests() or not self._inflight:
            scheduled = scheduler.schedule()
            output = self._execute(scheduled)
            self._inflight.append((scheduled, output, [worker.fence() for worker in self.workers]))
            computed = bool(scheduled.num_scheduled_tokens)
        # The engine fills its queue before it waits for a result.
        full = len(self._inflight) >= self.config.vllm.max_concurrent_batches
        if not full and (computed or scheduler.has_requests()):
            return computed, []
        mid_step()
        scheduled, output, fences = self._inflight.popleft()
        for fence in fences:  # the tokens are there when the step has been computed
            fence()
        self._raise_errors()
        outputs = scheduler.update_from_output(scheduled, output)
        if self.config.speculation is not None and computed and not self.config.async_scheduling:
            self._take_drafts()
        return computed, [item for client in outputs.values() for item in client.outputs]

    def _take_drafts(self) -> None:
        from vllm.v1.outputs import DraftTokenIds

        drafts = self.workers[0].drafts()
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def check_memory(self) -> None:
        """Poison what was given back since the last step; StrayWrite if idle memory was written."""
        fresh, freed = self._watch.drain()
        for worker in self.workers:
            worker.launch("recycle", functools.partial(worker.memory.recycle, fresh, freed))
            worker.launch("check", worker.memory.check_idle)
        self._raise_errors()

    def _raise_errors(self) -> None:
        for worker in self.workers:
            if worker.errors:
                raise worker.errors[0]

    def shutdown(self) -> None:
        """Shut down workers' connectors, then the scheduler with its own. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            if self.scheduler is not None:
                stack.callback(self.scheduler.shutdown)
            for worker in self.workers:
                if worker.connector is not None:
                    stack.callback(worker.connector.shutdown)

    def _execute(self, scheduled: Any) -> Any:
        fresh, freed = self._watch.drain()

        def recycle(memory: SimMemory) -> None:
            memory.recycle(fresh, freed)

        if self.config.num_ranks == 1:
            return self.workers[0].execute(scheduled, recycle)
        outputs = [_as_sent(worker.execute(_as_sent(scheduled), recycle)) for worker in self.workers]
        return self._aggregator.aggregate(outputs) if self._aggregator else outputs[0]


def kv_transfer_options(
    connector: str | None,
    module: str,
    extra_config: Mapping[str, Any] | None,
    multi_connector: bool | Sequence[Mapping[str, Any]],
    load_failure_policy: str | None,
) -> dict[str, Any] | None:
    """Fields of the engine's KVTransferConfig; see `SchedulerHarness` for the arguments."""
    if connector is None:
        return None
    policy = {} if load_failure_policy is None else {"kv_load_failure_policy": load_failure_policy}
    own: dict[str, Any] = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config or {}),
    }
    if multi_connector is False:
        return own | policy
    others = [] if multi_connector is True else [dict(other) for other in multi_connector]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [own, *others]},
        **policy,
    }


def _as_sent(message: Any) -> Any:
    """What another process gets of it: the engine's executor sends its own messages like this."""
    return pickle.loads(pickle.dumps(message))  # noqa: S301


def _request_hasher(config: EngineConfig) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    if not config.enable_prefix_caching and config.kv_transfer is None:
        return None
    function = get_hash_fn_by_name(config.hash_algorithm)
    init_none_hash(function)
    return get_request_block_hasher(config.hash_block_size, function)


def _make_scheduler(config: EngineConfig) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    kind = AsyncScheduler if config.async_scheduling else Scheduler
    return kind(
        vllm_config=config.vllm,
        kv_cache_config=config.kv_cache,
        structured_output_manager=StructuredOutputManager(config.vllm),
        block_size=config.scheduler_block_size,
        hash_block_size=config.hash_block_size,
        log_stats=True,
    )
