"""`CudaCopier`: engine tensors on an accelerator, copied on own streams.

Order is kept by events, never by blocking the engine's thread. At submission an event is
recorded on the engine's stream: a save begins after the forward pass that wrote its blocks, a
load after every step in flight that still reads its destination. What comes after a copy needs
no event: blocks and slots stay pinned until the Completion, so the step that reads a loaded
block, or writes a saved one anew, is given to the device only later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import TransferError
from kvquilt.transfer.base import ArenaView, Completion, GroupPages, PageCopies
from kvquilt.transfer.device import Device
from kvquilt.transfer.plan import ArenaOf, PagePlan, Triples

__all__ = ["KERNEL_BELOW_BYTES", "CudaCopier", "GroupPath"]

logger = logging.getLogger(__name__)

KERNEL_BELOW_BYTES = 28 << 10
"""Copy engines are slow on pieces smaller than this; a kernel copies those."""
KERNEL_FROM_PIECES = 16
"""Fewer pieces are not worth a kernel launch."""
WORD = 8
QUERY_SECONDS = 0.0005
"""Between two looks at an event while somebody waits with a time-out."""


@dataclass(frozen=True)
class GroupPath:
    """How the pages of one group are copied: pieces per block by the kernel and by copy engines."""

    name: str
    kernel_pieces: int
    engine_pieces: int


@dataclass
class _Job:
    job_id: int
    copies: PageCopies
    zero: PageCopies | None
    save: bool
    submitted: float
    after: Any = None
    end: Any = None
    error: str | None = None
    num_bytes: int = 0
    alive: list[Any] = field(default_factory=list)


class CudaCopier:
    """A `Copier` (see there) for tensors on an accelerator.

    `save` and `load` only record an event and queue the job; an own thread checks it, makes
    its list of copies and gives them to the stream. Loads and saves have a stream each, and
    loads are given first. Arenas are pinned at `attach`.

    device: the accelerator; CUDA by torch if None. threaded: False leaves `launch_next` to the
    caller.
    """

    pins_memory = True

    def __init__(
        self,
        groups: Sequence[GroupPages | None],
        arena_of: ArenaOf,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        device: Device | None = None,
        threaded: bool = True,
    ) -> None:
        self._device = device if device is not None else _torch_device(groups)
        self._plan = PagePlan(groups, arena_of, rank, num_ranks, self._device.device_type)
        self._streams = {save: self._device.new_stream() for save in (False, True)}
        self._registered: list[ArenaView] = []
        self._kernel = False
        # Guards everything below; never held while the device is asked to do something slow.
        self._changed = threading.Condition()
        self._queues: dict[bool, deque[_Job]] = {False: deque(), True: deque()}
        self._flying: dict[bool, deque[_Job]] = {False: deque(), True: deque()}
        self._pending: dict[int, _Job] = {}
        self._done: list[Completion] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="kvquilt-launch", daemon=True)
            self._thread.start()

    def attach(self, arenas: Sequence[ArenaView]) -> None:
        """See `Copier.attach`. Memory that cannot be pinned is used as it is, with a warning."""
        self._device.bind_thread()
        refused = 0
        for arena in arenas:
            if self._device.register(arena.address, arena.num_slots * arena.slot_stride):
                self._registered.append(arena)
            else:
                refused += arena.num_slots * arena.slot_stride
        if refused:
            logger.warning("%d bytes of host memory could not be pinned: copies will be slower", refused)
        self._kernel = self._device.has_kernel and not refused
        self._plan.attach(arenas)

    def paths(self) -> list[GroupPath]:
        """How each group's pages are copied (of a job large enough for the kernel)."""
        table, out = self._plan.tables, []
        for g, group in enumerate(self._plan.groups):
            if group is not None:
                lo, hi = int(table.first[g]), int(table.first[g + 1])
                pieces = slice(lo, hi)
                words = table.address[pieces] | table.stride[pieces] | table.offset[pieces]
                small = int(self._small(words, table.size[pieces]).sum())
                out.append(GroupPath(group.name, small, hi - lo - small))
        return out

    def save(self, job_id: int, copies: PageCopies) -> None:
        """See `Copier.save`."""
        self._submit(job_id, copies, None, True)

    def load(self, job_id: int, copies: PageCopies, zero: PageCopies | None = None) -> None:
        """See `Copier.load`."""
        self._submit(job_id, copies, zero, False)

    def poll(self) -> list[Completion]:
        """See `Copier.poll`."""
        with self._changed:
            self._collect()
            done, self._done = self._done, []
        return done

    def pending(self) -> int:
        """See `Copier.pending`."""
        with self._changed:
            self._collect()
            return len(self._pending)

    def wait(self, job_id: int, timeout: float | None) -> bool:
        """See `Copier.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._thread is None:
            while self.launch_next():
                pass
        with self._changed:
            while True:
                self._collect()
                if job_id not in self._pending:
                    return True
                left = QUERY_SECONDS if deadline is None else min(QUERY_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)

    def close(self) -> None:
        """See `Copier.close`. Memory is unpinned only after the last copy has ended."""
        with self._changed:
            self._closed = True
            for queue in self._queues.values():
                while queue:
                    self._end(queue.popleft(), "the copier was closed")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            flying = [job for queue in self._flying.values() for job in queue]
        for job in flying:
            self._fence(job)
        with self._changed:
            self._collect()
            registered, self._registered = self._registered, []
        for arena in registered:
            self._device.unregister(arena.address)

    def launch_next(self) -> bool:
        """Give the next queued job to its stream; False if none is queued."""
        with self._changed:
            queue = self._queues[False] or self._queues[True]
            if not queue:
                return False
            job = queue.popleft()
        error = self._launch(job)
        with self._changed:
            job.error = error
            if job.end is None:
                self._end(job, error)
            else:
                self._flying[job.save].append(job)
            self._changed.notify_all()
        return True

    def _submit(self, job_id: int, copies: PageCopies, zero: PageCopies | None, save: bool) -> None:
        with self._changed:
            if self._closed:
                raise TransferError("the copier is closed")
            if job_id in self._pending:
                raise TransferError(f"job {job_id} is pending already")
            job = self._pending[job_id] = _Job(job_id, copies, zero, save, time.perf_counter())
            try:
                job.after = self._device.record(self._device.current_stream())
            except Exception as failure:  # noqa: BLE001 - a lost device must not stop the engine's hook
                self._end(job, _reason(job, failure))
                return
            self._queues[save].append(job)
            self._changed.notify_all()

    def _run(self) -> None:
        self._device.bind_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(self._queues.values()) or self._closed)
                if not any(self._queues.values()):
                    return
            self.launch_next()

    def _launch(self, job: _Job) -> str | None:
        """Check `job` and give its copies to its stream; the reason if that failed.

        `job.end` is set as soon as a copy may be under way, also after a failure: part of the
        list can be in flight, and the job ends only when that has ended.
        """
        device, stream = self._device, self._streams[job.save]
        try:
            self._plan.check(job.copies, save=job.save)
            if job.zero is not None:
                self._plan.check_blocks(job.zero)
            device.wait_event(stream, job.after)
        except Exception as failure:  # noqa: BLE001 - the launching thread outlives any one job
            return _reason(job, failure)
        error = None
        try:
            self._give(job, stream)
        except Exception as failure:  # noqa: BLE001 - what was given still has to end
            error = _reason(job, failure)
        try:
            job.end = device.record(stream)
        except Exception as failure:  # noqa: BLE001 - the device is gone, and with it every copy
            error = error or _reason(job, failure)
        return error

    def _give(self, job: _Job, stream: Any) -> None:
        device, plan = self._device, self._plan
        job.num_bytes = plan.num_bytes(job.copies)
        triples = plan.triples(job.copies)
        words = triples.engine | triples.host
        small = self._small(words, triples.size)
        if small.sum() < KERNEL_FROM_PIECES:
            small[:] = False
        for mask, kernel in ((~small, False), (small, True)):
            if mask.any():
                engine, host, size = (column[mask] for column in triples)
                dst, src = (host, engine) if job.save else (engine, host)
                job.alive.append(device.copy(stream, dst, src, size, to_host=job.save, kernel=kernel))
        if job.zero is not None and len(job.zero):
            blocks: Triples = plan.triples(job.zero)
            device.zero(stream, blocks.engine, blocks.size)

    def _small(self, words: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Pieces for the kernel: by the bytes really copied at a time, not by the page."""
        fits = (size < KERNEL_BELOW_BYTES) & ((words | size) % WORD == 0)
        return np.asarray(fits & self._kernel)

    def _collect(self) -> None:
        """Move jobs whose copies have ended to the done list. Called with the lock held."""
        for queue in self._flying.values():
            while queue:
                try:
                    if not self._device.done(queue[0].end):
                        break
                    error = queue[0].error
                except Exception as failure:  # noqa: BLE001 - the device is gone, nothing copies
                    error = _reason(queue[0], failure)
                self._end(queue.popleft(), error)

    def _fence(self, job: _Job) -> None:
        try:
            self._device.synchronize(job.end)
        except Exception as failure:  # noqa: BLE001 - closing goes on without the device
            logger.warning("copy job %d: %s", job.job_id, _reason(job, failure))

    def _end(self, job: _Job, error: str | None) -> None:
        """Called with the lock held."""
        ok = error is None
        seconds = time.perf_counter() - job.submitted
        pages, num_bytes = (len(job.copies), job.num_bytes) if ok else (0, 0)
        del self._pending[job.job_id]
        self._done.append(Completion(job.job_id, ok, pages, num_bytes, seconds, error))
        self._changed.notify_all()


def _reason(job: _Job, failure: Exception) -> str:
    if isinstance(failure, TransferError):
        return str(failure)
    logger.warning("copy job %d failed: %s", job.job_id, failure)
    return f"{type(failure).__name__}: {failure}"


def _torch_device(groups: Sequence[GroupPages | None]) -> Device:
    from kvquilt.transfer.torch_device import TorchDevice

    tensors = [
        layer.tensor for group in groups if group for layer in group.layers if layer.tensor is not None
    ]
    return TorchDevice(tensors[0].device if tensors else None)
