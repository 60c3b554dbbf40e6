"""`HostCopier`: engine tensors in host memory, copied by own threads."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvquilt.errors import TransferError
from kvquilt.transfer import kernels
from kvquilt.transfer.base import ArenaView, Completion, GroupPages, PageCopies
from kvquilt.transfer.plan import ArenaOf, PagePlan

__all__ = ["HostCopier"]

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""A thread copies this much at a stretch (about 1 ms); a load waits no longer for a save."""
MIN_PIECE_BYTES = 1 << 20
"""Less is not worth a second thread."""


@dataclass
class _Job:
    job_id: int
    copies: PageCopies
    zero: PageCopies | None
    save: bool
    submitted: float
    pieces: int = 1
    error: str | None = None
    num_bytes: int = 0


@dataclass
class _State:
    """What the threads share; every field is guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    loads: deque[tuple[_Job, Callable[[], None]]] = field(default_factory=deque)
    saves: deque[tuple[_Job, Callable[[], None]]] = field(default_factory=deque)
    pending: dict[int, _Job] = field(default_factory=dict)
    done: list[Completion] = field(default_factory=list)
    closed: bool = False


class HostCopier:
    """A `Copier` (see there) for tensors in host memory.

    Jobs run on `num_threads` long-lived threads, loads before saves, each job in a few large
    pieces. Host memory needs no events: `save` and `load` are called when the step that wrote
    or read the blocks is over, and what a job wrote is visible once its Completion is out.

    cpus: CPUs that the threads may use; an engine that binds its own thread to one core would
    otherwise bind these too.
    """

    pins_memory = False

    def __init__(
        self,
        groups: Sequence[GroupPages | None],
        arena_of: ArenaOf,
        rank: int = 0,
        num_ranks: int = 1,
        num_threads: int = 2,
        *,
        cpus: Iterable[int] | None = None,
    ) -> None:
        if num_threads < 1:
            raise TransferError(f"num_threads={num_threads}: must be at least 1")
        self._plan = PagePlan(groups, arena_of, rank, num_ranks)
        self._cpus = None if cpus is None else set(cpus)
        self._arenas: tuple[ArenaView, ...] = ()
        self._state = _State()
        self._warm_up()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvquilt-copy-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _warm_up(self) -> None:
        """Compile now: the first job must not wait for the compiler."""
        none = np.zeros(0, dtype=np.int64)
        nothing = PageCopies(none, none, none)
        self._copy(nothing, save=True)
        self._zero(nothing)

    def attach(self, arenas: Sequence[ArenaView]) -> None:
        """See `Copier.attach`."""
        self._arenas = tuple(arenas)
        self._plan.attach(self._arenas)

    def save(self, job_id: int, copies: PageCopies) -> None:
        """See `Copier.save`."""
        self._submit(_Job(job_id, copies, None, True, time.perf_counter()))

    def load(self, job_id: int, copies: PageCopies, zero: PageCopies | None = None) -> None:
        """See `Copier.load`."""
        self._submit(_Job(job_id, copies, zero, False, time.perf_counter()))

    def poll(self) -> list[Completion]:
        """See `Copier.poll`."""
        with self._state.changed:
            done, self._state.done = self._state.done, []
        return done

    def wait(self, job_id: int, timeout: float | None) -> bool:
        """See `Copier.wait`."""
        state = self._state
        with state.changed:
            return state.changed.wait_for(lambda: job_id not in state.pending, timeout)

    def pending(self) -> int:
        """See `Copier.pending`."""
        with self._state.changed:
            return len(self._state.pending)

    def close(self) -> None:
        """See `Copier.close`."""
        state = self._state
        with state.changed:
            state.closed = True
            for queue in (state.loads, state.saves):
                while queue:
                    job, _ = queue.popleft()
                    self._end_piece(job, "the copier was closed")
            state.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, job: _Job) -> None:
        state = self._state
        with state.changed:
            if state.closed:
                raise TransferError("the copier is closed")
            if job.job_id in state.pending:
                raise TransferError(f"job {job.job_id} is pending already")
            state.pending[job.job_id] = job
            self._queue(job).append((job, lambda: self._begin(job)))
            state.changed.notify_all()

    def _queue(self, job: _Job) -> deque[tuple[_Job, Callable[[], None]]]:
        return self._state.saves if job.save else self._state.loads

    def _run(self) -> None:
        if self._cpus is not None:
            os.sched_setaffinity(0, self._cpus)
        state = self._state
        while True:
            with state.changed:
                state.changed.wait_for(lambda: state.loads or state.saves or state.closed)
                queue = state.loads or state.saves
                if not queue:
                    return
                job, piece = queue.popleft()
            error = None
            try:
                piece()
            except TransferError as failure:
                error = str(failure)
            except Exception as failure:  # the thread outlives any one job
                logger.exception("copy job %d failed", job.job_id)
                error = f"{type(failure).__name__}: {failure}"
            with state.changed:
                self._end_piece(job, error)

    def _begin(self, job: _Job) -> None:
        """Check the whole job, then queue its pieces; nothing is copied if any entry is bad."""
        plan = self._plan
        plan.check(job.copies, save=job.save)
        if job.zero is not None:
            plan.check_blocks(job.zero)
        job.num_bytes = plan.num_bytes(job.copies)
        pieces = [(job, self._piece(job, part)) for part in self._split(job)]
        if job.zero is not None and len(job.zero):
            zero = job.zero
            pieces.append((job, lambda: self._zero(zero)))
        with self._state.changed:
            if self._state.closed:
                raise TransferError("the copier was closed")
            job.pieces += len(pieces)
            # To the front: a job that was begun is finished before the next one.
            self._queue(job).extendleft(reversed(pieces))
            self._state.changed.notify_all()

    def _piece(self, job: _Job, part: PageCopies) -> Callable[[], None]:
        return lambda: self._copy(part, save=job.save)

    def _split(self, job: _Job) -> list[PageCopies]:
        copies, threads = job.copies, len(self._threads)
        target = max(MIN_PIECE_BYTES, min(PIECE_BYTES, -(-job.num_bytes // threads)))
        count = max(1, min(len(copies), -(-job.num_bytes // target))) if len(copies) else 0
        before = np.cumsum(self._plan.page_bytes[copies.group]) if count else np.zeros(0)
        cuts = np.searchsorted(before, np.arange(1, count) * (job.num_bytes / max(1, count)))
        edges = [0, *cuts.tolist(), len(copies)]
        parts = [slice(lo, hi) for lo, hi in itertools.pairwise(edges) if hi > lo]
        return [PageCopies(copies.group[p], copies.block[p], copies.slot[p]) for p in parts]

    def _copy(self, part: PageCopies, *, save: bool) -> None:
        kernels.copy_pages(part.group, part.block, part.slot, *self._plan.tables, save, kernels.STREAMING)

    def _zero(self, part: PageCopies) -> None:
        kernels.zero_pages(part.group, part.block, *self._plan.tables[:4])

    def _end_piece(self, job: _Job, error: str | None) -> None:
        """Called with the lock held."""
        job.error = job.error or error
        job.pieces -= 1
        if job.pieces:
            return
        ok = job.error is None
        seconds = time.perf_counter() - job.submitted
        pages, num_bytes = (len(job.copies), job.num_bytes) if ok else (0, 0)
        del self._state.pending[job.job_id]
        self._state.done.append(Completion(job.job_id, ok, pages, num_bytes, seconds, job.error))
        self._state.changed.notify_all()
