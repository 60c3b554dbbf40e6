"""One rank's copies with a copier that does as it is told: each job ends once, whatever happens."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvquilt import CacheGroup, CacheLayout
from kvquilt.errors import LayoutError, TransferError
from kvquilt.store import Arena
from kvquilt.transfer import Completion, PageCopies
from kvquilt.vllm.handover import PoolServer, layout_fingerprint
from kvquilt.vllm.metadata import (
    CopyList,
    LoadJob,
    SaveJob,
    StepPlan,
    WorkerReport,
    decode_reports,
    encode_plan,
)
from kvquilt.vllm.worker import WorkerSide

NUM_BLOCKS = 8
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
LAYOUT = CacheLayout(
    [
        CacheGroup(
            "full", kind="full", tokens_per_block=16, page_bytes=2 * SPEC.page_size_bytes, layers=("a", "b")
        )
    ]
)


class ScriptedCopier:
    """Ends jobs when a test says so."""

    pins_memory = False

    def __init__(self) -> None:
        self.pending_jobs: dict[int, str] = {}
        self.completed: list[Completion] = []
        self.refuse = False
        self.poll_error: Exception | None = None
        self.arenas: Any = None
        self.closed = 0
        self.waits: list[tuple[int, float | None]] = []

    def attach(self, arenas: Any) -> None:
        self.arenas = arenas

    def save(self, job_id: int, copies: PageCopies) -> None:
        self._take(job_id, "save")

    def load(self, job_id: int, copies: PageCopies, zero: PageCopies | None = None) -> None:
        self._take(job_id, "load")

    def _take(self, job_id: int, direction: str) -> None:
        if self.refuse:
            raise TransferError("refused on purpose")
        assert job_id not in self.pending_jobs
        self.pending_jobs[job_id] = direction

    def end(self, direction: str, ok: bool = True) -> None:
        """All pending jobs of one direction end."""
        for job_id in [job for job, kind in self.pending_jobs.items() if kind == direction]:
            del self.pending_jobs[job_id]
            self.completed.append(Completion(job_id, ok, 1, 1, 0.1, None if ok else "on purpose"))

    def poll(self) -> list[Completion]:
        if self.poll_error is not None:
            raise self.poll_error
        done, self.completed = self.completed, []
        return done

    def wait(self, job_id: int, timeout: float | None) -> bool:
        self.waits.append((job_id, timeout))
        return job_id not in self.pending_jobs

    def pending(self) -> int:
        return len(self.pending_jobs)

    def close(self) -> None:
        self.closed += 1


class Rank:
    """A worker side with its copier, clock and the ends that it has reported."""

    def __init__(self, server: PoolServer | None) -> None:
        self.now = 100.0
        self.copier = ScriptedCopier()
        config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[KVCacheGroupSpec(["a", "b"], SPEC)])
        self.side = WorkerSide(
            config,  # type: ignore[arg-type]
            LAYOUT,
            partition="solved",
            rank=0,
            num_ranks=1,
            clock=lambda: self.now,
            copier_factory=lambda *args, **kwargs: self.copier,
        )
        self.side.register(caches("a", "b"))
        self.path = server.path if server is not None else "/nowhere/pools.sock"
        self.told: list[tuple[set[str], set[str]]] = []
        self.reports: list[WorkerReport] = []

    def step(self, plan: StepPlan | None = None) -> tuple[set[str], set[str]]:
        """One engine step; (finished, failed) loads that the engine hears of in it."""
        taken = self.side.take_plan(encode_plan(plan or StepPlan()))
        self.side.before_forward(taken)
        self.side.start_loads()
        self.side.start_saves()
        with contextlib.suppress(RuntimeError):  # what the guard around the hook does
            self.side.poll()
        told = self.side.take_told()
        self.reports += decode_reports(self.side.report())
        return told

    def attach(self) -> None:
        self.step(StepPlan(attach_path=self.path))
        end = time.monotonic() + 30
        while not self.reports:
            assert time.monotonic() < end
            self.step()

    def ends(self, kind: str) -> dict[int, bool]:
        """Job -> ok, of all saves or loads that have ended."""
        found: dict[int, bool] = {}
        for report in self.reports:
            for end in getattr(report, kind):
                assert end.job_id not in found, "a job ended twice"
                found[end.job_id] = end.ok
        return found


@pytest.mark.parametrize("pins", [True, False])
def test_a_copier_that_pins_finds_all_memory_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arena, seen = Arena(0, "full", 8, 4096), []
    server = PoolServer([arena], layout_fingerprint(LAYOUT))
    rank = Rank(server)
    rank.copier.pins_memory = pins
    monkeypatch.setattr(rank.copier, "attach", lambda _: seen.append(os.fstat(arena.fd).st_blocks * 512))
    rank.attach()
    assert seen == [8 * 4096 if pins else 0]
    rank.side.close()
    server.close()
    arena.close()


def caches(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(NUM_BLOCKS, 1, 16, 16) for name in names}


def pages(*blocks: int) -> CopyList:
    ids = np.asarray(blocks, dtype=np.int64)
    return CopyList.of(np.zeros(len(blocks), dtype=np.int32), ids, ids)


def load(job: int, request: str, timeout: float = 5.0, **more: Any) -> LoadJob:
    return LoadJob(job, request, pages(1, 2), timeout, **more)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolServer]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arena = Arena(0, "full", 8, 4096)
    server = PoolServer([arena], layout_fingerprint(LAYOUT))
    yield server
    server.close()
    arena.close()


@pytest.fixture
def rank(server: PoolServer) -> Iterator[Rank]:
    rank = Rank(server)
    rank.attach()
    rank.reports.clear()
    yield rank
    rank.side.close()


# ---- steps without work ----


def test_a_step_that_computes_nothing_gives_its_loads_a_moment(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a load that ends at once saves its request a whole step; one that does not costs no more."""
    monkeypatch.setattr("kvquilt.vllm.worker.LINGER_SECONDS", 60.0)  # however slow this machine is
    rank.copier.waits.clear()
    rank.step(StepPlan(idle=True, loads=(load(1, "a"), load(2, "b"))))
    waited = dict(rank.copier.waits)
    assert set(waited) == {2 * 1 + 1, 2 * 2 + 1}
    assert all(timeout is not None and 0 < timeout <= 60.0 for timeout in waited.values())
    rank.copier.end("load")
    assert rank.step() == ({"a", "b"}, set())


def test_a_step_that_computes_waits_for_no_load(rank: Rank) -> None:
    rank.copier.waits.clear()
    rank.step(StepPlan(loads=(load(1, "a"),)))
    assert rank.copier.waits == []


def test_loads_told_as_failed_get_no_moment(rank: Rank) -> None:
    rank.step(StepPlan(loads=(load(1, "a"),)))
    rank.now += 6.0
    assert rank.step() == ({"a"}, {"a"})
    rank.copier.waits.clear()
    rank.step(StepPlan(idle=True))
    assert rank.copier.waits == []


# ---- attaching ----


def test_jobs_wait_until_the_pools_are_there(server: PoolServer) -> None:
    rank = Rank(server)
    rank.step(StepPlan(saves=(SaveJob(1, pages(1)),), loads=(load(2, "r"),)))
    assert rank.copier.pending() == 0
    rank.attach()
    assert rank.reports[0].attached
    assert sorted(rank.copier.pending_jobs.values()) == ["load", "save"]
    rank.side.close()


def test_pools_out_of_reach_fail_all_jobs_and_are_told_once(tmp_path: Path) -> None:
    rank = Rank(None)
    rank.step(StepPlan(saves=(SaveJob(1, pages(1)),), loads=(load(2, "r"),)))
    rank.attach()
    told = rank.step(StepPlan(attach_path=rank.path, saves=(SaveJob(3, pages(1)),), loads=(load(4, "s"),)))
    # The attaching ends on a thread of its own: "r" is told in this step or in one before.
    assert told[0] == told[1]
    assert told[0] - {"r"} == {"s"}
    assert rank.ends("saves") == {1: False, 3: False}
    assert rank.ends("loads") == {2: False, 4: False}
    assert [bool(report.error) for report in rank.reports].count(True) == 1
    assert not any(report.attached for report in rank.reports)
    rank.side.close()


def test_quiet_steps_report_nothing(rank: Rank) -> None:
    assert rank.step() == (set(), set())
    assert rank.reports == []


# ---- ends ----


def test_load_is_told_once_and_reported_once(rank: Rank) -> None:
    assert rank.step(StepPlan(loads=(load(1, "r"),))) == (set(), set())
    rank.copier.end("load")
    assert rank.step() == ({"r"}, set())
    assert rank.step() == (set(), set())
    assert rank.ends("loads") == {1: True}


def test_failed_load_is_told_as_finished_and_failed(rank: Rank) -> None:
    rank.step(StepPlan(loads=(load(1, "r"), load(2, "s"))))
    rank.copier.end("load", ok=False)
    assert rank.step() == ({"r", "s"}, {"r", "s"})
    assert rank.ends("loads") == {1: False, 2: False}


def test_save_and_load_of_one_number_are_two_jobs(rank: Rank) -> None:
    rank.step(StepPlan(saves=(SaveJob(1, pages(1)),), loads=(load(1, "r"),)))
    rank.copier.end("save")
    assert rank.step() == (set(), set())
    rank.copier.end("load")
    assert rank.step() == ({"r"}, set())
    assert rank.ends("saves") == rank.ends("loads") == {1: True}


def test_refused_submissions_lose_no_other_job(rank: Rank) -> None:
    rank.copier.refuse = True
    plan = StepPlan(saves=tuple(SaveJob(i, pages(1)) for i in (1, 2)), loads=(load(3, "r"), load(4, "s")))
    assert rank.step(plan) == ({"r", "s"}, {"r", "s"})
    assert rank.ends("saves") == {1: False, 2: False}
    assert rank.ends("loads") == {3: False, 4: False}


def test_doomed_load_fails_without_a_copy(rank: Rank) -> None:
    assert rank.step(StepPlan(loads=(load(1, "r", doomed=True),))) == ({"r"}, {"r"})
    assert rank.copier.pending() == 0
    assert rank.ends("loads") == {1: False}


# ---- time ----


def test_late_load_is_told_failed_and_its_end_comes_later(rank: Rank) -> None:
    rank.step(StepPlan(loads=(load(1, "r", timeout=5.0),)))
    rank.now += 4.9
    assert rank.step() == (set(), set())
    rank.now += 0.2
    assert rank.step() == ({"r"}, {"r"})
    assert rank.ends("loads") == {}, "its copy still runs"
    assert [report.timed_out for report in rank.reports] == [(1,)]
    rank.now += 100
    assert rank.step() == (set(), set())
    rank.copier.end("load")
    assert rank.step() == (set(), set()), "told twice"
    assert rank.ends("loads") == {1: True}


def test_copier_that_always_raises_still_times_loads_out(rank: Rank) -> None:
    rank.step(StepPlan(loads=(load(1, "r"), load(2, "s", timeout=50.0))))
    rank.copier.poll_error = RuntimeError("device lost")
    rank.now += 10
    assert rank.step() == ({"r"}, {"r"})
    rank.now += 50
    assert rank.step() == ({"s"}, {"s"})


# ---- resets ----


def test_cancelled_load_is_told_failed_at_its_end(rank: Rank) -> None:
    rank.step(StepPlan(loads=(load(1, "r"),)))
    assert rank.step(StepPlan(cancel=(1,))) == (set(), set()), "its blocks are still written"
    rank.copier.end("load")
    assert rank.step() == ({"r"}, {"r"})


def test_load_that_was_told_good_can_be_told_failed_once(rank: Rank) -> None:
    rank.step(StepPlan(loads=(load(1, "r"),)))
    rank.copier.end("load")
    assert rank.step() == ({"r"}, set())
    plan = StepPlan(refail=((1, "r"),))
    assert rank.step(plan) == ({"r"}, {"r"})
    assert rank.step(plan) == (set(), set())
    assert rank.step(StepPlan(refail=((77, "x"),))) == (set(), set()), "a job that it never had"


def test_flush_waits_before_the_forward_pass(rank: Rank) -> None:
    rank.step(StepPlan(saves=(SaveJob(1, pages(1)),)))
    rank.copier.end("save")
    rank.step(StepPlan(flush=(1,)))
    assert [job for job, _ in rank.copier.waits] == [2]
    assert rank.ends("saves") == {1: True}


def test_flush_that_comes_too_late_withdraws_the_pages(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy may have read what the step wrote over it: good or not, it is not to be committed."""
    rank.step(StepPlan(saves=(SaveJob(1, pages(1)), SaveJob(2, pages(2)))))
    rank.step(StepPlan(flush=(1,)))
    timeouts = [timeout for _, timeout in rank.copier.waits]
    assert all(timeout is not None and 0 < timeout <= 10 for timeout in timeouts), "it must not wait for ever"
    assert rank.ends("saves") == {}, "its slots are still written"
    rank.copier.end("save")
    rank.step()
    assert rank.ends("saves") == {1: False, 2: True}


def test_flush_of_unknown_jobs_is_nothing(rank: Rank) -> None:
    rank.step(StepPlan(flush=(5, 6)))
    assert rank.ends("saves") == {}


# ---- registration ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda all: all.pop("b"), "layer 'b' was not registered"),
        (lambda all: all.update(b=torch.zeros(NUM_BLOCKS, 1, 16, 8)), "layer 'b' holds 512 bytes per block"),
        (lambda all: all.update(c=torch.zeros(NUM_BLOCKS, 1, 16, 16)), "layer 'c' is in no cache group"),
    ],
)
def test_layers_that_do_not_fit_the_groups_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    rank = Rank(None)
    wrong = caches("a", "b")
    change(wrong)
    with pytest.raises(LayoutError, match=words):
        rank.side.register(wrong)


def test_layer_that_shares_anothers_memory_is_fine() -> None:
    rank = Rank(None)
    shared = caches("a", "b")
    rank.side.register({**shared, "c": shared["a"]})


def test_close_twice(rank: Rank) -> None:
    rank.side.close()
    rank.side.close()
    assert rank.copier.closed >= 1
