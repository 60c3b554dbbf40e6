"""The worker side: one rank's copies, and what it reports of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvquilt.errors import KVQuiltError, LayoutError, TransferError
from kvquilt.layout import CacheLayout
from kvquilt.sizing import Partition, arena_indices
from kvquilt.transfer import (
    ArenaView,
    Completion,
    Copier,
    GroupPages,
    LayerPages,
    PageCopies,
    check_shared_memory,
    layer_pages,
)
from kvquilt.transfer.factory import make_copier
from kvquilt.vllm.handover import fetch_arenas, layout_fingerprint
from kvquilt.vllm.layout import layer_page_bytes
from kvquilt.vllm.metadata import (
    CopyList,
    JobEnd,
    LoadJob,
    SaveJob,
    StepPlan,
    WorkerReport,
    decode_plan,
    encode_reports,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["PageObserver", "WorkerSide"]

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 0.25
LINGER_SECONDS = 0.001
"""In a step that computes nothing the engine sleeps about as long itself."""
_REMEMBERED = 4096


class PageObserver(Protocol):
    """Sees pages in the engine's own tensors: at save, and after a load before it is reported."""

    def saved(self, pages: CopyList) -> None: ...

    def loaded(self, pages: CopyList) -> None: ...


@dataclass
class _Load:
    job: LoadJob
    deadline: float
    told: bool = False
    cancelled: bool = False


class WorkerSide:
    """Runs one rank's copies off the engine's thread and times its own loads out.

    Each load is told to the engine exactly once (`take_told`); the end of its copies, which may
    come later, is reported to the scheduler side (`report`). Used on the worker's thread only,
    but for the thread that attaches the pools.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        layout: CacheLayout,
        *,
        partition: Partition,
        rank: int,
        num_ranks: int,
        clock: Callable[[], float] = time.monotonic,
        copier_factory: Callable[..., Copier] = make_copier,
    ) -> None:
        self._num_blocks = kv_cache_config.num_blocks
        # Only layers that own KV: those that share another layer's come with `register` alone.
        self._layer_bytes = [layer_page_bytes(group) for group in kv_cache_config.kv_cache_groups]
        self._layout = layout
        self._arena_of = arena_indices(layout, partition)
        self._replicated = np.array([group.replicated for group in layout.groups], dtype=np.bool_)
        self._rank = rank
        self._num_ranks = num_ranks
        self._clock = clock
        self._factory = copier_factory
        self.copier: Copier | None = None
        self.observer: PageObserver | None = None
        self._plans: deque[StepPlan] = deque()
        self._new_saves: deque[SaveJob] = deque()
        self._new_loads: deque[LoadJob] = deque()
        self._spoiled: set[int] = set()
        self._idle = False
        self._attaching: threading.Thread | None = None
        self._arenas: list[ArenaView] | None = None
        self._attached = False
        self._error = ""
        self._error_told = False
        self._attach_told = False
        self._waiting: list[SaveJob | LoadJob] = []
        self._saves: dict[int, SaveJob] = {}
        self._loads: dict[int, _Load] = {}
        self._reported: OrderedDict[int, bool] = OrderedDict()
        self._ended_saves: list[JobEnd] = []
        self._ended_loads: list[JobEnd] = []
        self._timed_out: list[int] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    # ---- start ----

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where the engine's pages lie.

        Raises LayoutError or TransferError if a registered layer is in no group, or if a
        group's layers do not hold what the layout says.
        """
        pages = [self._group_pages(i, kv_caches) for i in range(len(self._layout.groups))]
        check_shared_memory(group for group in pages if group)
        self._check_strays(kv_caches, [layer for group in pages if group for layer in group.layers])
        devices = {tensor.device.type for tensor in kv_caches.values()}
        if len(devices) != 1:
            raise TransferError(f"the engine's layers are on several kinds of device: {sorted(devices)}")
        self.copier = self._factory(
            pages,
            self._arena_of,
            self._rank,
            self._num_ranks,
            device_type=devices.pop(),
            cpus=_engine_cpus(),
        )

    def _group_pages(self, index: int, kv_caches: Mapping[str, torch.Tensor]) -> GroupPages | None:
        group = self._layout.groups[index]
        if not group.cacheable or not group.page_bytes:
            return None
        layers = []
        for name, expected in self._layer_bytes[index].items():
            if name not in kv_caches:
                raise LayoutError(
                    f"cache group {group.name!r}: layer {name!r} was not registered by the engine"
                )
            layer = layer_pages(name, kv_caches[name], self._num_blocks)
            if layer.page_bytes != expected:
                raise LayoutError(
                    f"cache group {group.name!r}: layer {name!r} holds {layer.page_bytes} bytes per block, "
                    f"its spec says {expected}"
                )
            layers.append(layer)
        held = sum(layer.page_bytes for layer in layers)
        if held > group.page_bytes:  # less where the engine pads layers of unequal size
            raise LayoutError(
                f"cache group {group.name!r}: its layers hold {held} bytes per block, the layout says "
                f"{group.page_bytes}"
            )
        return GroupPages(group.name, tuple(layers), held, group.replicated)

    def _check_strays(self, kv_caches: Mapping[str, torch.Tensor], known: Sequence[LayerPages]) -> None:
        """A layer that no group owns may only be one that shares another's KV."""
        owned = {name for layers in self._layer_bytes for name in layers}
        places = {(layer.base_address, layer.block_stride_bytes, layer.fragments) for layer in known}
        for name, tensor in kv_caches.items():
            if name in owned:
                continue
            layer = layer_pages(name, tensor, self._num_blocks)
            if (layer.base_address, layer.block_stride_bytes, layer.fragments) not in places:
                raise LayoutError(f"layer {name!r} is in no cache group and shares no other layer's KV")

    # ---- one engine step ----

    def take_plan(self, payload: bytes) -> StepPlan:
        """Remember what a step is to do. Saves to be flushed count as spoiled until they are."""
        plan = decode_plan(payload)
        # Queues: what a failing step leaves undone, the next one does.
        self._plans.append(plan)
        self._new_loads += plan.loads
        self._new_saves += plan.saves
        self._spoiled.update(plan.flush)
        self._spoiled.update(plan.spoil)
        self._idle = plan.idle
        return plan

    def before_forward(self, plan: StepPlan) -> None:
        """End the saves whose sources this step may overwrite."""
        self._attach(plan.attach_path)
        deadline = time.monotonic() + FLUSH_SECONDS
        for job_id in plan.flush:
            if self._flushed(job_id, deadline):
                self._spoiled.discard(job_id)

    def _flushed(self, job_id: int, deadline: float) -> bool:
        """Has the copy ended, so that its sources may be overwritten? If not, it goes on, its slots
        stay reserved until it ends, and then the job fails."""
        job = self._saves.get(job_id)
        if job is None:  # not submitted yet, or reported already
            return all(new.job_id != job_id for new in self._new_saves)
        if self.copier is None or job in self._waiting:
            return False
        return self.copier.wait(_save_id(job_id), max(0.0, deadline - time.monotonic()))

    def start_loads(self) -> None:
        """Submit this step's loads, and cancel what a reset has overtaken."""
        while self._new_loads:
            job = self._new_loads.popleft()
            self._loads[job.job_id] = _Load(job, self._clock() + job.timeout_seconds)
            if job.doomed:
                self._tell(self._loads[job.job_id], failed=True)
                self._end_load(JobEnd(job.job_id, ok=False, error="doomed"))
            else:
                self._submit(job)
        while self._plans:
            plan = self._plans.popleft()
            for job_id in plan.cancel:
                if job_id in self._loads:
                    self._loads[job_id].cancelled = True
            for job_id, request_id in plan.refail:
                if not self._reported.get(job_id, True):
                    self._reported[job_id] = True
                    self._finished.add(request_id)
                    self._failed.add(request_id)

    def start_saves(self) -> None:
        """Submit this step's saves; the forward pass that writes their sources has been submitted."""
        while self._new_saves:
            job = self._new_saves.popleft()
            self._saves[job.job_id] = job
            self._submit(job)

    def _submit(self, job: SaveJob | LoadJob) -> None:
        if self._error:
            self._end(job, ok=False, error=self._error)
        elif not self._attached:
            self._waiting.append(job)
        else:
            try:
                self._copy(job)
            except Exception as error:  # noqa: BLE001 - told to the scheduler side: no job is ever lost
                self._end(job, ok=False, error=f"the copy could not be started: {error}")

    def _copy(self, job: SaveJob | LoadJob) -> None:
        if self.copier is None:
            raise KVQuiltError("the engine has not registered its KV caches")
        if isinstance(job, SaveJob):
            if self.observer is not None:
                self.observer.saved(job.pages)
            self.copier.save(_save_id(job.job_id), self._own_share(job.pages.copies()))
        else:
            zero = job.zero.copies() if job.zero is not None else None
            self.copier.load(_load_id(job.job_id), job.pages.copies(), zero)

    def _own_share(self, copies: PageCopies) -> PageCopies:
        """What this rank writes: of groups whose bytes all ranks hold, the first rank's copy is enough."""
        if self._rank == 0 or not self._replicated.any():
            return copies
        mine = ~self._replicated[copies.group]
        return PageCopies(copies.group[mine], copies.block[mine], copies.slot[mine])

    def poll(self) -> None:
        """Collect copies that have ended, and time out loads that take too long."""
        try:
            self._finish_attaching()
            self._linger()
            for done in self.copier.poll() if self.copier is not None else ():
                self._on_completion(done)
        finally:
            now = self._clock()
            for load in self._loads.values():
                if not load.told and now >= load.deadline:
                    self._timed_out.append(load.job.job_id)
                    self._tell(load, failed=True)

    def _linger(self) -> None:
        """Give loads a moment in a step without work: a load that ends in the step that began it
        saves its request a whole step."""
        if not self._idle or self.copier is None:
            return
        end = time.monotonic() + LINGER_SECONDS
        for job_id, load in self._loads.items():
            left = end - time.monotonic()
            if left <= 0:
                return
            if not load.told:
                self.copier.wait(_load_id(job_id), left)

    def _on_completion(self, done: Completion) -> None:
        job_id, is_load = divmod(done.job_id, 2)
        end = JobEnd(job_id, done.ok, done.seconds, done.error or "")
        if not is_load:
            self._end_save(end)
        elif job_id in self._loads:
            self._end_load(end)

    def _end(self, job: SaveJob | LoadJob, *, ok: bool, error: str) -> None:
        end = JobEnd(job.job_id, ok, error=error)
        if isinstance(job, SaveJob):
            self._end_save(end)
        else:
            self._end_load(end)

    def _end_save(self, end: JobEnd) -> None:
        if self._saves.pop(end.job_id, None) is None:
            return
        if end.job_id in self._spoiled:
            self._spoiled.discard(end.job_id)
            end = JobEnd(end.job_id, ok=False, seconds=end.seconds, error="its blocks were given away")
        self._ended_saves.append(end)

    def _end_load(self, end: JobEnd) -> None:
        load = self._loads.pop(end.job_id)
        if end.ok and self.observer is not None:
            self.observer.loaded(load.job.pages)
        self._ended_loads.append(end)
        if not load.told:
            self._tell(load, failed=not end.ok or load.cancelled)

    def _tell(self, load: _Load, *, failed: bool) -> None:
        load.told = True
        self._reported[load.job.job_id] = failed
        while len(self._reported) > _REMEMBERED:
            self._reported.popitem(last=False)
        self._finished.add(load.job.request_id)
        if failed:
            self._failed.add(load.job.request_id)

    def take_told(self) -> tuple[set[str], set[str]]:
        """(finished, failed) request ids of loads to tell the engine of, each once."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def report(self) -> bytes:
        """What the scheduler side is to hear of this step; empty if there is nothing new."""
        news = self._ended_saves or self._ended_loads or self._timed_out
        if not news and self._attached == self._attach_told and bool(self._error) == self._error_told:
            return b""
        self._attach_told = self._attached
        error = "" if self._error_told else self._error
        self._error_told = bool(self._error)
        report = WorkerReport(
            rank=self._rank,
            attached=self._attached,
            saves=tuple(self._ended_saves),
            loads=tuple(self._ended_loads),
            timed_out=tuple(self._timed_out),
            error=error,
        )
        self._ended_saves, self._ended_loads, self._timed_out = [], [], []
        return encode_reports([report])

    # ---- pools ----

    def _attach(self, path: str) -> None:
        """Fetch and map the pools in the background; jobs wait for it, the engine does not."""
        if self._attached or self._attaching is not None or self._error or not path:
            return

        def attach() -> None:
            try:
                if self.copier is None:
                    raise KVQuiltError("the engine has not registered its KV caches")
                arenas = fetch_arenas(
                    path, layout_fingerprint(self._layout), populate=self.copier.pins_memory
                )
                self.copier.attach(arenas)
                self._arenas = arenas
            except Exception as error:  # noqa: BLE001 - told to the scheduler side with the next report
                self._error = f"cannot attach the pools, nothing is saved or loaded: {error}"

        self._attaching = threading.Thread(target=attach, name="kvquilt-attach", daemon=True)
        self._attaching.start()

    def _finish_attaching(self) -> None:
        if self._attaching is None or self._attaching.is_alive():
            return
        self._attaching.join()
        self._attaching = None
        self._attached = not self._error
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._submit(job)

    def close(self) -> None:
        """End the copies and threads. Safe to call twice."""
        if self._attaching is not None:
            self._attaching.join()
        if self.copier is not None:
            self.copier.close()
        self._arenas = None


def _save_id(job_id: int) -> int:
    return 2 * job_id


def _load_id(job_id: int) -> int:
    return 2 * job_id + 1


def _engine_cpus() -> set[int]:
    """CPUs of all threads of this process: the engine binds each of its threads to one, and new
    threads would inherit that of the thread that starts them."""
    cpus: set[int] = set()
    for thread_id in os.listdir("/proc/self/task"):
        try:
            cpus |= os.sched_getaffinity(int(thread_id))
        except OSError:  # the thread has ended
            continue
    return cpus
