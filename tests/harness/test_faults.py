"""The fault wrappers: each does what its plan says, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.helpers import FULL_AND_SLIDING, dict_harness, tokens
from kvquilt.errors import TransferError
from kvquilt.testing.faults import CopyPlan, FaultyCopier, LateWorker, MethodFault, full_store
from kvquilt.testing.harness_records import Hang
from kvquilt.transfer import ArenaView, GroupPages, HostCopier, PageCopies, layer_pages

DEADLINE = 60.0
PAGE = 8
FAULTS = ("fail", "tear", "late", "late report", "silent", "refuse")


class Rig:
    """Four blocks and four slots behind a faulty copier."""

    def __init__(self, plan: CopyPlan) -> None:
        self.blocks = torch.zeros((5, PAGE), dtype=torch.uint8)
        self.blocks += torch.arange(5, dtype=torch.uint8)[:, None]
        self.slots = np.zeros((4, 64), dtype=np.uint8)
        self.inner = HostCopier(
            [GroupPages("g", (layer_pages("layer", self.blocks, 5),))], [0], num_threads=1
        )
        self.copier = FaultyCopier(self.inner, plan)
        self.copier.attach([ArenaView.of(self.slots, 64)])

    def copies(self) -> PageCopies:
        return PageCopies(np.zeros(4, dtype=np.int32), np.arange(1, 5), np.arange(4))

    def save(self, job: int) -> None:
        self.copier.save(job, self.copies())
        assert self.inner.wait(job, DEADLINE)

    @property
    def saved(self) -> list[int]:
        return [int(value) for value in self.slots[:, 0]]


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(CopyPlan(at={0: request.param}, polls=(3, 3)) if request.param else CopyPlan())
    yield rig
    rig.copier.close()


def plan(fault: str | None) -> Any:
    return pytest.mark.parametrize("rig", [fault], indirect=True, ids=[str(fault)])


@plan(None)
def test_without_a_plan_it_is_the_inner_copier(rig: Rig) -> None:
    rig.save(5)
    assert rig.copier.wait(5, 0)
    (done,) = rig.copier.poll()
    assert (done.job_id, done.ok, done.pages, rig.saved) == (5, True, 4, [1, 2, 3, 4])
    assert rig.copier.faults == []
    assert rig.copier.pending() == 0


@plan("fail")
def test_fail_copies_nothing(rig: Rig) -> None:
    rig.save(5)
    assert rig.copier.wait(5, 0)
    (done,) = rig.copier.poll()
    assert (done.job_id, done.ok, done.pages, rig.saved) == (5, False, 0, [0, 0, 0, 0])
    assert rig.copier.faults == [(0, "save", "fail")]


@plan("tear")
def test_tear_copies_half_and_says_that_it_failed(rig: Rig) -> None:
    rig.save(5)
    (done,) = rig.copier.poll()
    assert (done.ok, done.pages, done.num_bytes, rig.saved) == (False, 0, 0, [1, 2, 0, 0])


@plan("late")
def test_late_copies_later(rig: Rig) -> None:
    rig.save(5)
    assert rig.copier.poll() == rig.copier.poll() == []
    assert (rig.saved, rig.copier.pending(), rig.copier.wait(5, 0)) == ([0, 0, 0, 0], 1, False)
    with pytest.raises(TransferError, match="still pending"):
        rig.copier.save(5, rig.copies())
    early = rig.copier.poll()
    assert rig.inner.wait(5, DEADLINE)
    (done,) = early or rig.copier.poll()
    assert (done.ok, rig.saved) == (True, [1, 2, 3, 4])


@plan("late report")
def test_late_report_copies_at_once(rig: Rig) -> None:
    rig.save(5)
    assert not rig.copier.wait(5, 0)
    reports = [len(rig.copier.poll()) for _ in range(5)]
    assert (reports, rig.saved) == ([0, 0, 0, 1, 0], [1, 2, 3, 4])


@plan("silent")
def test_silent_says_nothing_until_healed(rig: Rig) -> None:
    rig.save(5)
    assert [rig.copier.poll() for _ in range(20)] == [[]] * 20
    assert (rig.copier.pending(), rig.copier.wait(5, None)) == (1, False)
    rig.copier.heal()
    (done,) = rig.copier.poll()
    assert (done.ok, rig.copier.pending()) == (True, 0)


@plan("refuse")
def test_refuse_raises_once(rig: Rig) -> None:
    with pytest.raises(TransferError, match="refused by plan"):
        rig.copier.save(5, rig.copies())
    rig.save(5)
    assert rig.copier.poll()[0].ok


@plan("late")
def test_closing_fails_what_has_not_begun(rig: Rig) -> None:
    rig.save(5)
    rig.copier.close()
    (done,) = rig.copier.poll()
    assert (done.ok, rig.saved) == (False, [0, 0, 0, 0])


@settings(max_examples=12)
@given(
    at=st.dictionaries(st.integers(0, 7), st.sampled_from(FAULTS)),
    rate=st.floats(0, 0.3),
    seed=st.integers(0, 9),
)
def test_every_job_ends_exactly_once(at: Any, rate: float, seed: int) -> None:
    rig = Rig(CopyPlan(at=at, rates={"late": rate, "tear": rate, "fail": rate}, seed=seed))
    refused = set()
    for job in range(8):
        try:
            rig.save(job)
        except TransferError:
            refused.add(job)
    ended = [done.job_id for _ in range(10) for done in rig.copier.poll()]
    rig.copier.heal()
    for job in range(8):
        assert rig.inner.wait(job, DEADLINE)
        ended += [done.job_id for done in rig.copier.poll()]
    rig.copier.close()
    assert sorted(ended) == sorted(set(range(8)) - refused)
    assert refused == {job for job, fault in at.items() if fault == "refuse"}
    assert {job for job, _, _ in rig.copier.faults} >= set(at)


def test_a_plan_is_repeatable_and_keeps_its_rates() -> None:
    plan = CopyPlan(rates={"fail": 0.2, "late": 0.3}, directions=("load",), seed=3)
    fates = [plan.decide(job, "load") for job in range(1_000)]
    assert fates == [plan.decide(job, "load") for job in range(1_000)]
    assert 120 < sum(fault == "fail" for fault, _ in fates) < 280
    assert 200 < sum(fault == "late" for fault, _ in fates) < 400
    assert {plan.decide(job, "save")[0] for job in range(1_000)} == {None}


@pytest.mark.parametrize(
    "wrong", [{"at": {0: "explode"}}, {"rates": {"fail": 0.6, "late": 0.6}}, {"polls": (0, 1)}]
)
def test_impossible_plans_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).removeprefix("at") or "explode"):
        CopyPlan(**wrong)


class Target:
    def __init__(self) -> None:
        self.effects: list[int] = []

    def work(self, value: int) -> int:
        self.effects.append(value)
        return value


def test_method_faults() -> None:
    target = Target()
    with MethodFault(target, "work", error=OSError("disk"), at={1}) as fault:
        assert target.work(0) == 0
        with pytest.raises(OSError, match="disk"):
            target.work(1)
        assert target.work(2) == 2
    assert (fault.num_calls, fault.num_faults, target.effects) == (3, 1, [0, 2])
    with MethodFault(target, "work", error=ValueError, after=True), pytest.raises(ValueError):
        target.work(3)
    with MethodFault(target, "work", instead=lambda real, value: real(value) + 10):
        assert target.work(4) == 14
    assert target.work(5) == 5
    assert target.effects == [0, 2, 3, 4, 5]


def test_a_fault_on_a_class_or_upon_a_fault_leaves_what_was_there() -> None:
    target = Target()
    with MethodFault(Target, "work", error=OSError), pytest.raises(OSError):
        target.work(0)
    assert target.work(1) == 1
    with MethodFault(target, "work", error=OSError) as first:
        with MethodFault(target, "work", error=ValueError), pytest.raises(ValueError):
            target.work(2)
        with pytest.raises(OSError):
            target.work(3)
    assert first.num_faults == 1
    assert target.work(4) == 4


def test_method_faults_by_rate_are_repeatable() -> None:
    def failures(seed: int) -> list[int]:
        target, failed = Target(), []
        with MethodFault(target, "work", error=OSError, rate=0.5, seed=seed):
            for value in range(40):
                try:
                    target.work(value)
                except OSError:
                    failed.append(value)
        return failed

    assert failures(1) == failures(1) != failures(2)
    assert 8 < len(failures(1)) < 32


def test_a_full_store_grants_nothing() -> None:
    class Store:
        def reserve(self, owner: str, wants: list[int]) -> list[int]:
            return wants

    store = Store()
    with full_store(store, at={0}):
        assert store.reserve("a", [1, 2]) == []
        assert store.reserve("a", [1, 2]) == [1, 2]


def test_a_hook_that_raises_stops_the_harness_as_it_would_the_engine() -> None:
    with dict_harness(FULL_AND_SLIDING) as h:
        h.add(tokens(1, 50))
        with (
            MethodFault(h.connector, "build_connector_meta", error=RuntimeError("hook")),
            pytest.raises(RuntimeError, match="hook"),
        ):
            h.step()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_late_worker_only_delays(rank: int) -> None:
    late: list[LateWorker] = []

    def on_worker(number: int, connector: Any, stage: str) -> None:
        if stage == "made" and number == rank:
            late.append(LateWorker(connector, steps=4))

    def steps(**options: Any) -> int:
        with dict_harness(FULL_AND_SLIDING, num_ranks=2, **options) as h:
            for _ in range(2):
                h.add(tokens(1, 500), max_tokens=3)
                total = h.run_until_idle()
                h.reset_prefix_cache()
            h.check_idle()
            assert [r.external_hit for r in h.requests.values()] == [0, 480]
            return total

    assert steps(on_worker=on_worker) == steps() + 4


def test_a_silent_worker_hangs_its_request_until_healed() -> None:
    late: list[LateWorker] = []

    def on_worker(number: int, connector: Any, stage: str) -> None:
        if stage == "made":
            late.append(LateWorker(connector, steps=None))

    with dict_harness(FULL_AND_SLIDING, on_worker=on_worker) as h:
        h.add(tokens(1, 500))
        h.run_until_idle()
        h.reset_prefix_cache()
        record = h.add(tokens(1, 500))
        with pytest.raises(Hang, match="WAITING_FOR_REMOTE_KVS"):
            h.run_until_idle(stall_seconds=0.01)
        late[0].heal()
        h.run_until_idle()
        assert record.external_hit == 480
        h.check_idle()
