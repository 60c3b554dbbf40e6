"""`KVQuiltConnector`: the engine's hooks, handed to the scheduler side or the worker side."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.stats import CacheHitSource

from kvquilt.config import parse_options
from kvquilt.errors import ConfigError
from kvquilt.vllm.events import KVEvents, events_wanted
from kvquilt.vllm.guard import guarded
from kvquilt.vllm.layout import engine_groups
from kvquilt.vllm.lookups import LookupRecord
from kvquilt.vllm.metadata import StepMetadata, StepPlan, WorkerMetadata, encode_plan
from kvquilt.vllm.metrics import KVQuiltPromMetrics, KVQuiltStats
from kvquilt.vllm.namespace import engine_namespace
from kvquilt.vllm.scheduler import SchedulerSide
from kvquilt.vllm.start import warn_of_stray_drafts
from kvquilt.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["TESTED_VLLM", "KVQuiltConnector"]

logger = logging.getLogger(__name__)
TESTED_VLLM = "0.32"
_EMPTY_PLAN = encode_plan(StepPlan())
_warned_versions: set[str] = set()


class KVQuiltConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of each cache group in host RAM and puts it back, asynchronously.

    Use it with `kv_connector="KVQuiltConnector"`, `kv_connector_module_path="kvquilt.vllm"`,
    `kv_role="kv_both"`; `kvquilt.config.Options` lists what `kv_connector_extra_config` takes.

    Raises ConfigError, LayoutError or SizingError at start; afterwards no error of ours
    reaches the engine.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _share_engine_log()
        transfer = vllm_config.kv_transfer_config
        options = parse_options(transfer.kv_connector_extra_config)
        _check_engine(vllm_config)
        self._hook_errors: Counter[tuple[str, str]] = Counter()
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        self._last_metadata: StepMetadata | None = None
        self._undoomed: list[tuple[Request, int]] = []
        groups = engine_groups(kv_cache_config, vllm_config)
        layout = groups.layout
        parallel = vllm_config.parallel_config
        if role == KVConnectorRole.SCHEDULER:
            # The scheduler reads it right after it has constructed us; a failed load must be
            # recomputed, not turned into a failed request.
            transfer.kv_load_failure_policy = "recompute"
            warn_of_stray_drafts(vllm_config, len(layout.groups))
            namespace = engine_namespace(vllm_config, kv_cache_config, layout, salt=options.namespace_salt)
            self._scheduler_side = SchedulerSide(
                options,
                groups,
                num_ranks=parallel.world_size,
                tokens_per_step=vllm_config.scheduler_config.max_num_batched_tokens,
                engine_caches=bool(vllm_config.cache_config.enable_prefix_caching),
                namespace=namespace,
                events=KVEvents(kv_cache_config, layout) if events_wanted(vllm_config) else None,
                data_parallel=_data_parallel(parallel),
            )
        else:
            self._worker_side = WorkerSide(
                kv_cache_config,
                layout,
                partition=options.group_partition,
                rank=parallel.rank,
                num_ranks=parallel.world_size,
            )

    # ---- for tests, the bench and operators ----

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler side; RuntimeError in a worker."""
        if self._scheduler_side is None:
            raise RuntimeError("this is the worker role of KVQuiltConnector")
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        """The worker side; RuntimeError in the scheduler."""
        if self._worker_side is None:
            raise RuntimeError("this is the scheduler role of KVQuiltConnector")
        return self._worker_side

    def lookups(self, count: int = 10) -> list[LookupRecord]:
        """The last look-ups, with why each hit had its length."""
        return self.scheduler_side.finder.ring.last(count)

    def on_hook_error(self, hook: str, error: Exception) -> bool:
        """Count an error inside a hook; True if it is the first of its kind."""
        cause = (hook, type(error).__name__)
        self._hook_errors[cause] += 1
        if self._scheduler_side is not None:
            self._scheduler_side.meter.count("hook_errors", 1, hook)
        return self._hook_errors[cause] == 1

    # ---- scheduler side ----

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """May the engine offer what its full-attention groups hold beyond its recurrent states?"""
        return self._scheduler_side is not None and self._scheduler_side.divergent.may_run_ahead

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is only a later miss."""
        return False

    @guarded(lambda self, manager: None)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    @guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.match(request, num_computed_tokens)

    @guarded(lambda self, request, blocks, tokens: self._doom(request, tokens))
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def _doom(self, request: Request, num_external_tokens: int) -> None:
        try:
            self.scheduler_side.doom(request, num_external_tokens)
        except Exception as error:  # noqa: BLE001 - the engine waits for this load until we say that it failed
            self.on_hook_error("doom", error)
            self._undoomed.append((request, num_external_tokens))

    @guarded(lambda self, output: StepMetadata(self._plan_without_saves()))
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        undoomed, self._undoomed = self._undoomed, []
        for request, num_external_tokens in undoomed:
            self._doom(request, num_external_tokens)
        return StepMetadata(self.scheduler_side.build_step(scheduler_output))

    def _plan_without_saves(self) -> bytes:
        try:
            return self.scheduler_side.encode_step()
        except Exception:  # noqa: BLE001 - logged by the guard that called us
            return _EMPTY_PLAN

    @guarded(lambda self, output: self.scheduler_side.miss_output(output))
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.on_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda self, request, block_ids: self._drop(request))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.finished(request, block_ids)
        return False, None

    def _drop(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.drop(request)
        return False, None

    @guarded(lambda self: [])
    def take_events(self) -> list[KVCacheEvent]:
        return self.scheduler_side.take_events()

    @guarded(lambda self: False)
    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_push_work()

    @guarded(lambda self: False)
    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side.has_block_frees()

    @guarded(lambda self: False)
    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset()

    # ---- worker side ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    @guarded(lambda self, meta: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Before anything of this step writes to a block: zeroing and block copies come first.
        self._take_plan(kv_connector_metadata)

    @guarded(lambda self, meta: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._take_plan(connector_metadata)  # steps without a forward pass start here

    def _take_plan(self, metadata: KVConnectorMetadata) -> None:
        if isinstance(metadata, StepMetadata) and metadata is not self._last_metadata:
            self._last_metadata = metadata
            plan = self.worker_side.take_plan(metadata.payload)
            self.worker_side.before_forward(plan)

    @guarded(lambda self, context, **kwargs: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker_side.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no running request waits for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the forward pass."""

    @guarded(lambda self: None)
    def wait_for_save(self) -> None:
        self.worker_side.start_saves()

    @guarded(lambda self, finished: self._results())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self.worker_side.poll()
        return self._results()

    def _results(self) -> KVConnectorTransferResults:
        try:
            finished, failed = self.worker_side.take_told()
        except Exception:  # noqa: BLE001 - kept for the next step
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    @guarded(lambda self: None)
    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        payload = self.worker_side.report()
        return WorkerMetadata(payload) if payload else None

    # ---- both ----

    @guarded(lambda self: None)
    def get_kv_connector_stats(self) -> KVQuiltStats | None:
        return self._scheduler_side.stats() if self._scheduler_side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVQuiltStats:
        return KVQuiltStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVQuiltPromMetrics:
        return KVQuiltPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(lambda self: None)
    def shutdown(self) -> None:
        if self._worker_side is not None:
            self._worker_side.close()
        if self._scheduler_side is not None:
            self._scheduler_side.close()


def _data_parallel(parallel: ParallelConfig) -> tuple[int, int]:
    """This core's index and the number of cores. Independent cores are told that they are one of
    one; what they were before is left in the bound of elastic ranks."""
    index = int(parallel.data_parallel_index)
    known = (parallel.data_parallel_size, getattr(parallel, "elastic_ep_max_dp_size", None) or 1, index + 1)
    return index, max(known)


def _share_engine_log() -> None:
    """Log where the engine logs, at its level: its logger does not serve other packages."""
    engine, ours = logging.getLogger("vllm"), logging.getLogger("kvquilt")
    if ours.handlers:
        return
    reached = logging.getLogger().handlers  # by propagation: a line is to come once
    for handler in engine.handlers:
        if handler not in reached:
            ours.addHandler(handler)
    ours.setLevel(engine.level)


def _check_engine(vllm_config: VllmConfig) -> None:
    """Refuse what would be served wrong; warn once about a version that was never tried."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f"kv_role={transfer.kv_role!r}: kvquilt saves and loads, so it needs 'kv_both' (to save only, "
            "set kv_connector_extra_config {'mode': 'save_only'})"
        )
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name}={size}: only 1 is served")
    backend = parallel.distributed_executor_backend
    if backend in ("ray", "external_launcher"):
        raise ConfigError(
            f"distributed_executor_backend={backend!r}: the pools are shared memory of one scheduler and "
            "its workers on one host; served are 'mp' and 'uni'"
        )
    version = vllm.__version__
    if not version.startswith(f"{TESTED_VLLM}.") and version not in _warned_versions:
        _warned_versions.add(version)
        logger.warning(
            "kvquilt was tested with vLLM %s, this is %s; check outputs before relying on it",
            TESTED_VLLM,
            version,
        )
