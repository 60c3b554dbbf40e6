"""Copies that fail, tear, come late or never report, on purpose."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from kvquilt.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvquilt.transfer.base import ArenaView, Completion, Copier, PageCopies

__all__ = ["CopyFault", "CopyPlan", "FaultyCopier"]

CopyFault = Literal["fail", "tear", "late", "late report", "silent", "refuse"]
"""fail: nothing is copied, and that is reported. tear: half is copied, and failure reported.
late: the copy itself happens some polls later. late report: copied at once, reported later.
silent: copied, and never reported until `FaultyCopier.heal`. refuse: the submission raises."""

Direction = Literal["save", "load"]


@dataclass(frozen=True)
class CopyPlan:
    """Which copy jobs go wrong, and how.

    at: job number -> fault, counting saves and loads together from 0. rates: fault -> share of the
    remaining jobs, drawn from `seed`. directions: which jobs `rates` applies to.
    polls: for late jobs, the least and most polls to wait.

    Raises ValueError for an unknown fault or rates that add up to more than 1.
    """

    at: Mapping[int, CopyFault] = field(default_factory=dict)
    rates: Mapping[CopyFault, float] = field(default_factory=dict)
    directions: Collection[Direction] = ("save", "load")
    polls: tuple[int, int] = (1, 5)
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = {*self.at.values(), *self.rates} - set(get_args(CopyFault))
        if unknown:
            raise ValueError(f"faults {sorted(unknown)}: allowed are {', '.join(get_args(CopyFault))}")
        if any(rate < 0 for rate in self.rates.values()) or sum(self.rates.values()) > 1:
            raise ValueError(f"rates {dict(self.rates)}: must be at least 0 and add up to at most 1")
        if not 0 < self.polls[0] <= self.polls[1]:
            raise ValueError(f"polls={self.polls}: must be (least, most) with 0 < least <= most")

    def decide(self, job: int, direction: Direction) -> tuple[CopyFault | None, int]:
        """(fault or None, polls to wait) of the job with this number; the same at every call."""
        draw = random.Random(f"{self.seed}/{job}")
        polls = draw.randint(*self.polls)
        if job in self.at:
            return self.at[job], polls
        if direction in self.directions:
            point = draw.random()
            for fault, rate in self.rates.items():
                point -= rate
                if point < 0:
                    return fault, polls
        return None, polls


@dataclass
class _Held:
    """A job not passed on yet (submit), or a completion not passed on yet (completion)."""

    polls: float
    submit: Callable[[], None] | None = None
    completion: Completion | None = None

    @property
    def ended(self) -> bool:
        """True if the completion is there and may be known."""
        return self.completion is not None and self.polls <= 0


class FaultyCopier:
    """A Copier around another one, with faults by plan.

    It keeps the contract that a job's blocks and slots belong to it until its Completion is out: a
    late or silent job stays pending, and whoever frees its blocks before is at fault.

    faults: what was done so far, one (job number, direction, fault) each.
    """

    def __init__(self, inner: Copier, plan: CopyPlan) -> None:
        self._inner = inner
        # Guards everything below; not held while waiting.
        self._lock = threading.RLock()
        self._plan = plan
        self._num_jobs = 0
        self._fates: dict[int, tuple[CopyFault, int]] = {}
        self._held: dict[int, _Held] = {}
        self.faults: list[tuple[int, Direction, CopyFault]] = []

    @property
    def pins_memory(self) -> bool:
        """As the inner copier."""
        return self._inner.pins_memory

    def attach(self, arenas: Sequence[ArenaView]) -> None:
        """As the inner copier."""
        self._inner.attach(arenas)

    def save(self, job_id: int, copies: PageCopies) -> None:
        """Blocks -> slots; TransferError also by plan."""
        with self._lock:
            self._submit(job_id, "save", copies, None)

    def load(self, job_id: int, copies: PageCopies, zero: PageCopies | None = None) -> None:
        """Slots -> blocks; TransferError also by plan."""
        with self._lock:
            self._submit(job_id, "load", copies, zero)

    def poll(self) -> list[Completion]:
        """Jobs that ended and that the plan lets be known."""
        with self._lock:
            for job_id, held in list(self._held.items()):
                held.polls -= 1
                if held.submit is not None and held.polls <= 0:
                    del self._held[job_id]
                    held.submit()
            self._drain()
            due = [job_id for job_id, held in self._held.items() if held.ended]
            return [done for job_id in due if (done := self._held.pop(job_id).completion) is not None]

    def wait(self, job_id: int, timeout: float | None) -> bool:
        """As the inner copier. A job that the plan holds back has not ended: False, at once."""
        with self._lock:
            held, (fault, _) = self._held.get(job_id), self._fates.get(job_id, ("", 0))
            if held is not None:
                return held.ended
        return self._inner.wait(job_id, timeout) and fault not in ("late report", "silent")

    def pending(self) -> int:
        """Jobs submitted that have not ended, or whose end the plan holds back."""
        with self._lock:
            self._drain()
            return self._inner.pending() + sum(not held.ended for held in self._held.values())

    def heal(self) -> None:
        """No more faults, and nothing held back any more."""
        with self._lock:
            self._plan = CopyPlan()
            self.release()

    def release(self) -> None:
        """Jobs held back run, and completions held back come, at the next poll; later ones may fail."""
        with self._lock:
            self._fates = {job_id: fate for job_id, fate in self._fates.items() if fate[0] == "tear"}
            for held in self._held.values():
                held.polls = 0

    def close(self) -> None:
        """Close the inner copier; jobs held back that have not begun end as failed."""
        with self._lock:
            self._inner.close()
            self.heal()
            for job_id, held in self._held.items():
                if held.submit is not None:
                    self._held[job_id] = _Held(0, completion=_failed(job_id))

    def _submit(self, job_id: int, direction: Direction, copies: PageCopies, zero: PageCopies | None) -> None:
        if job_id in self._held:
            raise TransferError(f"job {job_id} is still pending")
        number, self._num_jobs = self._num_jobs, self._num_jobs + 1
        fault, polls = self._plan.decide(number, direction)

        def submit() -> None:
            part = _half(copies) if fault == "tear" else copies
            if direction == "save":
                self._inner.save(job_id, part)
            else:
                self._inner.load(job_id, part, zero)

        if fault is None:
            submit()
            return
        self.faults.append((number, direction, fault))
        if fault == "refuse":
            raise TransferError(f"job {job_id}: refused by plan")
        if fault == "late":
            self._held[job_id] = _Held(polls, submit=submit)
        elif fault == "fail":
            self._held[job_id] = _Held(0, completion=_failed(job_id))
        else:
            submit()
            self._fates[job_id] = (fault, polls)

    def _drain(self) -> None:
        for completion in self._inner.poll():
            fault, polls = self._fates.pop(completion.job_id, ("", 0))
            if fault == "tear":
                completion = replace(completion, ok=False, pages=0, num_bytes=0, error="torn by plan")
            wait = {"late report": float(polls), "silent": float("inf")}.get(fault, 0.0)
            self._held[completion.job_id] = _Held(wait, completion=completion)


def _half(copies: PageCopies) -> PageCopies:
    from kvquilt.transfer.base import PageCopies

    end = len(copies) // 2
    return PageCopies(copies.group[:end], copies.block[:end], copies.slot[:end])


def _failed(job_id: int) -> Completion:
    from kvquilt.transfer.base import Completion

    return Completion(job_id, ok=False, pages=0, num_bytes=0, seconds=0.0, error="failed by plan")
