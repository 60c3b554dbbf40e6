"""Aborts, resets, pauses, preemptions and copies that go wrong: recomputed, nothing lost, nothing held."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from engine.rig import SOME, Rig
from kvquilt.testing.copy_faults import CopyPlan

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TIMEOUT_SECONDS = 0.5
HELD_LOADS = CopyPlan(rates={"silent": 1.0}, directions=("load",))
HELD_SAVES = CopyPlan(rates={"silent": 1.0}, directions=("save",))


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("gemma4-mini")


@pytest.fixture
def impatient(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("gemma4-mini", {"load_timeout_seconds": TIMEOUT_SECONDS})


def stored(rig: Rig, count: int = 1) -> None:
    rig.fill(SOME[:count])
    rig.forget_locally()


def start_load(rig: Rig) -> str:
    """A request whose load is out and held back."""
    key = rig.engine.add(SOME[0], max_tokens=4)
    while not rig.side.loads.under_way():
        rig.engine.step()
    rig.engine.step()
    return key


def assert_hit_again(rig: Rig) -> None:
    rig.forget_locally()
    warm = rig.run(SOME[:1])
    rig.assert_hits(warm, SOME[:1])
    rig.assert_answers(warm, SOME[:1])


# ---- copies that go wrong ----


@pytest.mark.parametrize("fault", ["fail", "tear", "refuse"])
def test_failed_load_is_recomputed_once_and_not_offered_again(rig: Rig, fault: str) -> None:
    stored(rig, 2)
    failures, lookups = rig.total("load_failures"), rig.total("lookups")
    copier = rig.faulty(CopyPlan(at={0: fault}))
    [failed, warm] = rig.run(SOME[:2])
    assert copier.faults[0] == (0, "load", fault)
    assert failed.external_hit_tokens == 0
    rig.assert_answers([failed, warm], SOME[:2])
    rig.assert_hits([warm], SOME[1:2])
    assert rig.total("load_failures") - failures == 1
    assert rig.total("lookups") - lookups == 2, "the hit that failed was looked up again"
    rig.heal()
    assert_hit_again(rig)


def test_several_failed_loads_in_one_step(rig: Rig) -> None:
    stored(rig, 4)
    failures = rig.total("load_failures")
    rig.faulty(CopyPlan(at={0: "refuse", 1: "fail", 2: "tear"}))
    results = rig.run(SOME, concurrency=4)
    assert sorted(r.external_hit_tokens for r in results) == [0, 0, 0, rig.truth.boundary(SOME[3])]
    rig.assert_answers(results, SOME, drift=1e-5)
    assert rig.total("load_failures") - failures == 3
    rig.heal()
    assert_hit_again(rig)


@pytest.mark.parametrize("fault", ["fail", "tear", "refuse"])
def test_failed_save_is_a_later_miss(rig: Rig, fault: str) -> None:
    rig.faulty(CopyPlan(rates={fault: 1.0}, directions=("save",)))
    cold = rig.fill(SOME[:1])
    rig.assert_answers(cold, SOME[:1])
    rig.forget_locally()
    rig.heal()
    missed = rig.fill(SOME[:1])
    assert missed[0].external_hit_tokens == 0
    rig.assert_answers(missed, SOME[:1])
    assert_hit_again(rig)


def test_late_copies_are_waited_for(rig: Rig) -> None:
    rig.faulty(CopyPlan(rates={"late": 0.5, "late report": 0.5}, polls=(1, 9), seed=3))
    rig.fill(SOME, concurrency=4)
    rig.forget_locally()
    warm = rig.run(SOME, concurrency=4)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME, drift=1e-5)


def test_silent_load_times_out_and_its_late_end_gives_everything_back(impatient: Rig) -> None:
    rig = impatient
    stored(rig)
    failures = rig.total("load_failures", "timeout")
    rig.faulty(HELD_LOADS)
    [result] = rig.run(SOME[:1])
    assert result.external_hit_tokens == 0
    rig.assert_answers([result], SOME[:1])
    assert rig.total("load_failures", "timeout") - failures == 1
    assert rig.side.store.audit().leases == 1, "the copy still runs: its slots must not be written"
    assert len(rig.side.pins) > 0, "the copy still runs: its blocks must not be written"
    rig.heal()
    rig.engine.run(SOME[1:2], max_tokens=1, concurrency=1)  # a step, to hear of the end
    rig.assert_clean()
    assert_hit_again(rig)


def test_idle_engine_does_not_wait_for_a_silent_copy_for_ever(impatient: Rig) -> None:
    rig = impatient
    stored(rig)
    rig.faulty(CopyPlan(rates={"silent": 1.0}))
    rig.run(SOME[:2])
    steps = rig.engine.step_until_idle(deadline_seconds=60)
    assert steps > 0
    rig.heal()
    rig.engine.run(SOME[2:3], max_tokens=1, concurrency=1)
    rig.assert_clean()


# ---- aborts ----


def test_abort_before_the_load(rig: Rig) -> None:
    stored(rig)
    key = rig.engine.add(SOME[0], max_tokens=4)
    rig.connector.get_num_new_matched_tokens(rig.engine.scheduler.requests[key], 0)
    assert rig.side.store.audit().leases == 1
    rig.engine.abort([key])
    assert rig.side.store.audit().leases == 0, "the lease must go with the request, not with a time-out"
    assert_hit_again(rig)


def test_abort_during_the_load(rig: Rig) -> None:
    stored(rig)
    rig.faulty(HELD_LOADS)
    key = start_load(rig)
    rig.engine.abort([key])
    rig.engine.step()
    held = rig.engine.block_pool.num_gpu_blocks - 1 - rig.engine.num_free_blocks()
    assert held > 0, "the copy still writes: its blocks must not be given away"
    rig.heal()
    rig.assert_clean()
    assert_hit_again(rig)


def test_abort_during_a_load_that_fails(rig: Rig) -> None:
    stored(rig)
    rig.faulty(CopyPlan(rates={"late report": 1.0}, directions=("load",), polls=(4, 4)))
    key = start_load(rig)
    rig.engine.abort([key])
    rig.connector.reset_cache()  # what was to end well is now to be reported failed
    rig.assert_clean()
    rig.heal()
    rig.fill(SOME[:1])
    assert_hit_again(rig)


def test_abort_after_the_load_and_twice(rig: Rig) -> None:
    stored(rig)
    key = rig.engine.add(SOME[0], max_tokens=100)
    while rig.total("loaded_pages") == 0 or rig.side.loads.under_way():
        rig.engine.step()
    rig.engine.step()
    rig.engine.abort([key])
    rig.engine.abort([key])
    rig.assert_clean()
    assert_hit_again(rig)


def test_abort_with_saves_in_flight(rig: Rig) -> None:
    rig.faulty(HELD_SAVES)
    key = rig.engine.add(SOME[0], max_tokens=100)
    while not rig.side.saves.under_way():
        rig.engine.step()
    rig.engine.step()
    rig.engine.abort([key])
    assert len(rig.side.pins) > 0
    rig.heal()
    rig.assert_clean()
    assert_hit_again(rig)  # what was saved before the abort is good


# ---- resets ----


@pytest.mark.parametrize("reset_connector", [False, True])
def test_reset_with_saves_in_flight(rig: Rig, reset_connector: bool) -> None:
    rig.faulty(HELD_SAVES)
    rig.run(SOME[:1])
    assert rig.side.saves.under_way() > 0
    assert rig.engine.reset_prefix_cache(reset_connector=reset_connector), "pins of saves must not refuse it"
    assert len(rig.side.pins) == 0
    rig.heal()
    rig.engine.step_until_idle()
    [result] = rig.run(SOME[:1])
    if reset_connector:
        assert result.external_hit_tokens == 0, "a copy that landed after the reset was served"
    rig.assert_answers([result], SOME[:1])
    rig.engine.step_until_idle()
    assert_hit_again(rig)


@pytest.mark.parametrize("reset_connector", [False, True])
def test_reset_with_a_load_in_flight(rig: Rig, reset_connector: bool) -> None:
    stored(rig)
    rig.faulty(HELD_LOADS)
    key = start_load(rig)
    assert not rig.engine.reset_prefix_cache(reset_connector=reset_connector), "the engine itself refuses"
    rig.heal()
    rig.engine.step_until_idle()
    result = rig.engine.take_result(key)
    rig.assert_answers([result], SOME[:1])
    assert result.external_hit_tokens == (0 if reset_connector else rig.truth.boundary(SOME[0]))
    rig.engine.step_until_idle()
    assert_hit_again(rig)


def test_reset_empties_the_store(rig: Rig) -> None:
    rig.fill(SOME)
    assert rig.engine.reset_prefix_cache(reset_connector=True)
    assert sum(arena.used for arena in rig.side.store.audit().arenas) == 0
    assert {r.external_hit_tokens for r in rig.fill(SOME)} == {0}
    assert_hit_again(rig)


def test_pause_that_clears_with_saves_in_flight(rig: Rig) -> None:
    rig.faulty(HELD_SAVES)
    running = rig.engine.add(SOME[0], max_tokens=100)
    while not rig.side.saves.under_way():
        rig.engine.step()
    core = rig.engine.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=True)
    core.resume_scheduler()
    rig.engine.abort([running])
    rig.heal()
    rig.engine.step_until_idle()
    [result] = rig.fill(SOME[:1])
    assert (result.local_hit_tokens, result.external_hit_tokens) == (0, 0), (
        "the pause was to clear everything"
    )
    rig.assert_answers([result], SOME[:1])
    assert_hit_again(rig)


def test_pause_that_clears_with_a_load_in_flight_is_refused_by_the_engine(rig: Rig) -> None:
    stored(rig)
    rig.faulty(HELD_LOADS)
    key = start_load(rig)
    core = rig.engine.llm_engine.engine_core.engine_core
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        core.pause_scheduler(mode="abort", clear_cache=True)
    core.resume_scheduler()
    rig.engine.abort([key])
    rig.heal()
    rig.assert_clean()
    assert_hit_again(rig)


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_with_saves_in_flight(rig: Rig, level: int) -> None:
    rig.faulty(HELD_SAVES)
    rig.run(SOME[:1])
    assert rig.side.saves.under_way() > 0
    core = rig.engine.llm_engine.engine_core.engine_core
    core.sleep(level)
    core.wake_up(["scheduling"] if level == 0 else None)
    rig.heal()
    rig.engine.step_until_idle()
    [result] = rig.fill(SOME[:1])
    assert result.external_hit_tokens == 0
    assert result.local_hit_tokens == (rig.truth.boundary(SOME[0]) if level == 0 else 0)
    rig.assert_answers([result], SOME[:1])
    assert_hit_again(rig)


# ---- preemption ----


def test_preempted_requests_resume_with_equal_outputs(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("gemma4-mini", num_blocks=90, max_model_len=512)
    rig.fill(SOME, concurrency=4)
    rig.forget_locally()
    preemptions = []
    preempt = rig.engine.scheduler._preempt_request

    def counted(request: object, *args: object, **kwargs: object) -> None:
        preemptions.append(request)
        preempt(request, *args, **kwargs)

    rig.engine.scheduler._preempt_request = counted
    try:
        results = rig.run(SOME, max_tokens=110, concurrency=4)
    finally:
        rig.engine.scheduler._preempt_request = preempt
    assert preemptions, "the pool is not small enough to preempt"
    assert sum(r.external_hit_tokens for r in results) > 0
    for result, prompt in zip(results, SOME, strict=True):
        want = rig.truth.of(prompt)
        assert result.tokens[: len(want.tokens)] == want.tokens
    rig.forget_locally()
    again = rig.run(SOME, max_tokens=110, concurrency=1)
    assert sum(r.external_hit_tokens for r in again) > 0
    assert [r.tokens for r in again] == [r.tokens for r in results]


def test_preempted_by_force_and_resumed(rig: Rig) -> None:
    """Tables are replaced while saves of the old blocks are out; what is saved is never wrong."""
    rig.faulty(CopyPlan(rates={"late": 1.0}, directions=("save",), polls=(3, 6)))
    key = rig.engine.add(SOME[0], max_tokens=4)
    for _ in range(3):
        rig.engine.step()
        assert rig.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.engine.step_until_idle()
    result = rig.engine.take_result(key)
    rig.assert_answers([result], SOME[:1], drift=1e-5)
    rig.heal()
    rig.forget_locally()
    # Copies that the resets overtook are dropped, whatever they read; what was kept is right.
    rig.assert_answers(rig.fill(SOME[:1]), SOME[:1], drift=1e-5)
    assert_hit_again(rig)


# ---- errors inside our own hooks ----


@pytest.mark.parametrize("owner", ["scheduler side", "worker side"])
def test_hook_that_raises_costs_a_hit_and_nothing_else(
    rig: Rig, owner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored(rig, 2)
    target, name = (rig.side, "match") if owner == "scheduler side" else (rig.worker, "start_saves")

    def broken(*args: object) -> None:
        raise RuntimeError("on purpose")

    errors = [rig.connector._hook_errors, rig.worker_connector._hook_errors]
    with caplog.at_level(logging.ERROR, logger="kvquilt"):
        monkeypatch.setattr(target, name, broken)
        results = rig.run(SOME[:2])
        monkeypatch.undo()
    rig.assert_answers(results, SOME[:2])
    assert sum(sum(counter.values()) for counter in errors) > 0
    shown = [record for record in caplog.records if "the engine goes on without it" in record.message]
    assert len(shown) == 1, "once per hook and cause"
    for counter in errors:
        counter.clear()
    rig.engine.step_until_idle()
    assert_hit_again(rig)
