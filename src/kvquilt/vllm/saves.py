"""Saves: what to copy out of the engine's blocks, and the tickets and pins of copies under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvquilt.config import Options
from kvquilt.errors import KVQuiltError
from kvquilt.layout import CacheLayout
from kvquilt.retention import wanted_blocks
from kvquilt.store import Store, Want
from kvquilt.vllm.candidates import Candidate
from kvquilt.vllm.checkpoints import BlockTables, Checkpoints
from kvquilt.vllm.drafters import HollowBlocks
from kvquilt.vllm.metadata import CopyList, JobEnd, SaveJob
from kvquilt.vllm.metrics import Meter
from kvquilt.vllm.pins import PinBook
from kvquilt.vllm.requests import RequestState
from kvquilt.vllm.states import HandedOver, StateFilter

if TYPE_CHECKING:
    from kvquilt.vllm.layout import EngineGroups

__all__ = ["BlockTables", "Progress", "SaveBook"]

IntArray = NDArray[np.int64]


class Progress(NamedTuple):
    """One request in one engine step.

    written: tokens whose KV is there after the step. tables: its block tables. handed_over: the
    states that the step leaves.
    """

    state: RequestState
    written: int
    tables: Callable[[], BlockTables]
    handed_over: HandedOver = ()


@dataclass
class _Job:
    """A ticket whose copies are under way. pinned: its sources, until they are given back."""

    job_id: int
    ticket_id: int
    pinned: list[int]
    ranks_left: set[int]
    pages_of_group: IntArray
    started: float
    failed: bool = False
    sent: bool = False
    message: SaveJob | None = field(default=None, repr=False)


class SaveBook:
    """Plans saves step by step and ends them when all ranks have reported.

    committed: told which pages have become visible.

    Used on the scheduler's thread only.
    """

    def __init__(
        self,
        store: Store,
        groups: EngineGroups,
        options: Options,
        meter: Meter,
        *,
        owner: str,
        num_ranks: int,
        clock: Callable[[], float],
        committed: Callable[[Sequence[Want]], None] | None = None,
    ) -> None:
        layout: CacheLayout = groups.layout
        self._store = store
        self._layout = layout
        self._options = options
        self._meter = meter
        self._owner = owner
        self._num_ranks = num_ranks
        self._clock = clock
        self._committed = committed
        self._pins: PinBook | None = None
        self._jobs: dict[int, _Job] = {}
        self._next_job = 1
        self._flush: list[int] = []
        self._spoil: list[int] = []
        saved = [i for i, g in enumerate(layout.groups) if g.cacheable and g.page_bytes]
        self._states = StateFilter(layout, groups.handed_over & set(saved), options, meter)
        self._saved = [i for i in saved if i not in self._states.groups]
        self._hollow = HollowBlocks(layout, [i for i in saved if layout.groups[i].name in groups.drafters])
        self._checkpoints = Checkpoints(layout, self._saved, meter)
        # Nothing could resume from windows alone where states are kept at prompt ends only.
        no_states = bool(self._states.groups) and groups.state_interval == 0
        retained = options.retention == "prompt_end" and options.retain_generated
        self._keeps_checkpoints = retained and not no_states
        self.record_keys = False

    def bind(self, pins: PinBook) -> None:
        self._pins = pins

    def under_way(self, *, newer_than: float = float("-inf")) -> int:
        """Jobs that have not ended, those only that started after `newer_than`."""
        return sum(job.started > newer_than for job in self._jobs.values())

    def plan(self, scheduled: Iterable[Progress]) -> None:
        """Reserve slots for what each request has newly filled, and for the states handed over."""
        candidates: list[Candidate] = []
        states: list[Candidate] = []
        for state, written, tables, handed_over in scheduled:
            if handed_over and self._pins is not None:
                state.sync_hashes()
                states += self._states.candidates(state, handed_over, self._pins)
            if written < state.next_check:
                continue
            state.sync_hashes()
            table = tables()
            candidates += self._candidates(state, written, table)
            self._move_checkpoint(state, written, table)
        self._reserve(candidates, states)

    def finish(self, state: RequestState, written: int, table: BlockTables) -> None:
        """Save what a request leaves behind: blocks whose hash came late, and its checkpoint.

        Its blocks are freed right after this call, so all new pins hold blocks alone.
        """
        try:
            state.sync_hashes()
            candidates = self._candidates(state, written, table)
            pins_to_come = sum(c.blocks.size for c in candidates)
            self._move_checkpoint(state, written, table)
            candidates += Checkpoints.candidates(state)
            self._reserve(candidates, freed_next=True, pins_to_come=pins_to_come)
        finally:
            self.drop_checkpoint(state)

    def drop_checkpoint(self, state: RequestState) -> None:
        """Return the pins on a request's newest window."""
        self._checkpoints.drop(state, self._pins)

    def _move_checkpoint(self, state: RequestState, written: int, table: BlockTables) -> None:
        if self._keeps_checkpoints and self._pins is not None:
            self._checkpoints.move(state, written, table, self._pins)

    def take_messages(self) -> tuple[SaveJob, ...]:
        """Jobs to send in this step's metadata."""
        messages = []
        for job in self._jobs.values():
            if not job.sent and job.message is not None:
                job.sent = True
                messages.append(job.message)
                job.message = None
        return tuple(messages)

    def take_flush(self) -> tuple[int, ...]:
        """Jobs that workers must end before their next forward pass."""
        flush, self._flush = tuple(self._flush), []
        return flush

    def on_end(self, rank: int, end: JobEnd) -> None:
        """One rank's copies of a job have ended. Unknown jobs are ignored."""
        job = self._jobs.get(end.job_id)
        if job is None or rank not in job.ranks_left:
            return
        job.ranks_left.discard(rank)
        job.failed |= not end.ok
        if job.ranks_left:
            return
        del self._jobs[end.job_id]
        self._unpin(job)
        if job.failed:
            self._store.abort(job.ticket_id, self._owner)
            self._meter.count("saves_failed")
            return
        try:
            visible = self._store.commit(job.ticket_id, self._owner)
        except Exception:
            with contextlib.suppress(KVQuiltError):
                self._store.abort(job.ticket_id, self._owner)
            raise
        self._meter.sample("save_seconds", self._clock() - job.started)
        for index in np.flatnonzero(job.pages_of_group):
            group, pages = self._layout.groups[index], int(job.pages_of_group[index])
            self._meter.count("saved_pages", pages, group.name)
            self._meter.count("saved_bytes", pages * group.slot_content_bytes(self._num_ranks), group.name)
        if self._committed is not None:
            self._committed(visible)

    def fail_all(self) -> None:
        """Withdraw every save under way: what it reads has turned out to be wrong."""
        for job in self._jobs.values():
            job.failed = True

    def give_up_slow(self, older_than: float, oldest: float) -> None:
        """Return the pins of jobs that started before `oldest`, and, while pins hold more blocks
        alone than they may, of those before `older_than`. Such a job fails when its copy ends."""
        if not self._jobs or self._pins is None:
            return
        for job in list(self._jobs.values()):
            if job.started >= older_than:
                break  # jobs are in the order of their start
            if not job.pinned or (job.started >= oldest and self._pins.exclusive() <= self._pins.cap):
                continue
            self._unpin(job)
            if job.sent:
                self._spoil.append(job.job_id)
            else:
                del self._jobs[job.job_id]
                self._store.abort(job.ticket_id, self._owner)

    def take_spoiled(self) -> tuple[int, ...]:
        """Jobs whose sources were given away while the copy ran."""
        spoil, self._spoil = tuple(self._spoil), []
        return spoil

    def release_pins(self, states: Iterable[RequestState]) -> None:
        """Return all pins, for a cache reset. Copies under way are ended by the workers before the
        next forward pass could overwrite their sources; jobs not yet sent are dropped."""
        for state in states:
            self.drop_checkpoint(state)
        for job in list(self._jobs.values()):
            self._unpin(job)
            if job.sent:
                self._flush.append(job.job_id)
            else:
                del self._jobs[job.job_id]
                self._store.abort(job.ticket_id, self._owner)

    def close(self) -> None:
        """Abort all tickets and return all pins."""
        for job in list(self._jobs.values()):
            self._unpin(job)
            self._store.abort(job.ticket_id, self._owner)
        self._jobs.clear()

    def _unpin(self, job: _Job) -> None:
        if job.pinned and self._pins is not None:
            self._pins.unpin(job.pinned)
        job.pinned = []

    def _candidates(self, state: RequestState, written: int, table: BlockTables) -> list[Candidate]:
        end = None if self._options.retain_generated else state.request.num_prompt_tokens
        out = []
        for index in self._saved:
            group = self._layout.groups[index]
            barred = -(-state.barred_tokens // group.tokens_per_block)
            first = max(state.next_block[index], barred)
            last = min(written // group.tokens_per_block, state.chain.num_blocks(index), len(table[index]))
            if last <= first and not state.retry[index]:
                continue
            fresh = np.arange(first, max(last, first), dtype=np.int64)
            wanted = wanted_blocks(
                self._layout,
                group,
                first,
                max(last, first),
                retention=self._options.retention,
                boundaries=state.boundaries,
                end_tokens=end,
            )
            retried = np.asarray([i for i in state.retry[index] if barred <= i < last], dtype=np.int64)
            self._meter.count("saves_skipped", int((~wanted).sum()), "not_worth")
            blocks = np.concatenate([retried, fresh[wanted]])
            if index in self._hollow.groups:
                blocks = self._hollow.without(state, index, blocks)
            block_ids = np.asarray([table[index][i] for i in blocks], dtype=np.int64)
            held = block_ids != 0  # the null block is dropped together with its key
            num_fresh = int(held[retried.size :].sum())
            out.append(Candidate(state, index, blocks[held], block_ids[held], num_fresh))
            state.next_block[index] = max(last, first)
            state.retry[index] = []
        state.next_check = min(
            ((state.next_block[i] + 1) * self._layout.groups[i].tokens_per_block for i in self._saved),
            default=0,
        )
        return [c for c in out if c.blocks.size]

    def _reserve(
        self,
        candidates: list[Candidate],
        states: Sequence[Candidate] = (),
        *,
        freed_next: bool = False,
        pins_to_come: int = 0,
    ) -> None:
        """Take a ticket for the candidates and pin their blocks, or postpone them at the pin cap.

        states: cannot be postponed; they are few, and are saved in spite of the cap.
        freed_next: the request frees its blocks right away, so pins_to_come more will be held by
        pins alone, and there is no later step to retry in.
        """
        if self._pins is None:
            return
        room = self._pins.cap - (self._pins.exclusive() if len(self._pins) else 0)
        if room < pins_to_come:
            self._postpone(candidates, retry=not freed_next)
            candidates = []
        candidates = [*candidates, *states]
        if not candidates:
            return
        ticket = self._store.reserve(
            self._owner, [Want(c.state.chain, c.group, c.blocks) for c in candidates]
        )
        for reason, skipped in (
            ("present", ticket.skipped_present),
            ("ticketed", ticket.skipped_ticketed),
            ("full", ticket.skipped_full),
        ):
            self._meter.count("saves_skipped", sum(skipped.values()), reason)
        if ticket.ticket_id is None:
            return
        groups, ids, slots, keys = [], [], [], []
        for grant in ticket.grants:
            candidate = candidates[grant.want]
            chosen = candidate.block_ids[np.searchsorted(candidate.blocks, grant.blocks)]
            groups.append(np.full(chosen.size, candidate.group, dtype=np.int32))
            ids.append(chosen)
            slots.append(grant.slots)
            if self.record_keys:
                keys.append(candidate.state.chain.keys(candidate.group)[grant.blocks].tobytes())
        self._start(
            ticket.ticket_id,
            np.concatenate(groups),
            np.concatenate(ids),
            np.concatenate(slots).astype(np.int64),
            b"".join(keys),
        )

    def _start(
        self, ticket_id: int, groups: NDArray[np.int32], ids: IntArray, slots: IntArray, keys: bytes
    ) -> None:
        pinned: list[int] = ids.tolist()
        try:
            if self._pins is not None:
                self._pins.pin(pinned)
        except Exception:
            self._store.abort(ticket_id, self._owner)
            raise
        job = _Job(
            job_id=self._next_job,
            ticket_id=ticket_id,
            pinned=pinned,
            ranks_left=set(range(self._num_ranks)),
            pages_of_group=np.bincount(groups, minlength=len(self._layout.groups)),
            started=self._clock(),
            message=SaveJob(self._next_job, CopyList.of(groups, ids, slots, keys)),
        )
        self._jobs[job.job_id] = job
        self._next_job += 1

    def _postpone(self, candidates: list[Candidate], *, retry: bool) -> None:
        self._meter.count("saves_skipped", sum(c.num_fresh for c in candidates), "pin_cap")
        if retry:
            for candidate in candidates:
                candidate.state.retry[candidate.group] = candidate.blocks.tolist()
                candidate.state.next_check = 0
