"""Field cases of the kinds (c) leaks, hangs, crashes and (g) races, in the engine's own scheduler.

Each engine ends with `check_end`: no lease, ticket or pin, every block back. Wrong KV, KV of
another request, and writes to blocks that nobody holds are errors of the harness itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.connector_support import LAYOUTS, Quilt, full, sliding, tokens
from kvquilt.testing.faults import MethodFault
from kvquilt.vllm import worker as worker_module

FULL_AND_SLIDING = LAYOUTS["full 32 + sliding 16"]
PROMPT = tokens(1, 500)
HIT = 480


def ask(q: Quilt, id: str, local_tokens: int = 0) -> tuple[int | None, bool]:
    """The engine's question, for a request that it has."""
    answer: tuple[int | None, bool] = q.connector.get_num_new_matched_tokens(
        q.h.scheduler.requests[id], local_tokens
    )
    return answer


def saved(q: Quilt, prompt: list[int] = PROMPT, max_tokens: int = 1) -> Any:
    """Serve a prompt and let the engine forget it, so that the next such request hits the store."""
    record = q.serve(prompt, max_tokens=max_tokens)
    q.forget()
    return record


# ---- (c) leaks, hangs, crashes ----


def test_b40_nothing_stays_held_when_the_engine_has_as_much_itself() -> None:
    """B40: the tier has no more than the engine; and two look-ups, one retrieval."""
    with Quilt(FULL_AND_SLIDING) as q:
        q.serve(PROMPT)
        record = q.add(PROMPT)
        assert ask(q, record.id, HIT) == (0, False)
        q.run()
        assert (record.local_hit, record.external_hit) == (HIT, 0)
        assert q.store.audit().leases == 0
        q.forget()
        record = q.add(PROMPT)
        assert [ask(q, record.id) for _ in range(1_000)] == [(HIT, True)] * 1_000
        assert q.store.audit().leases == 1
        q.run()
        assert record.external_hit == HIT
        q.check_end()


def test_b41_an_abort_between_look_up_and_allocation_returns_the_lease_at_once() -> None:
    """B41, invariant 26."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        record = q.add(PROMPT)
        assert ask(q, record.id) == (HIT, True)
        assert q.store.audit().leases == 1
        q.h.abort(record.id)
        assert q.store.audit().leases == 0
        q.run()
        q.check_end()


def test_b45_what_a_look_up_found_is_still_there_at_allocation() -> None:
    """B45: between the two, another request's save needs the room."""
    with Quilt([full(16)], ram_bytes=24 * 4096, enable_prefix_caching=False) as q:
        prompt = tokens(1, 16 * 20 + 1)
        q.serve(prompt)
        asked = q.add(prompt)
        assert ask(q, asked.id) == (320, True)
        # The other one is served first.
        q.h.scheduler.waiting.remove_requests([q.h.scheduler.requests[asked.id]])
        q.serve_beside(tokens(2, 16 * 18 + 1))
        assert q.count("saves_skipped", "full") >= 14
        q.h.scheduler.waiting.add_request(q.h.scheduler.requests[asked.id])
        q.run()
        assert asked.external_hit == 320
        q.check_end()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_b46_a_preempted_request_comes_back_with_its_saves_under_way(async_scheduling: bool) -> None:
    """B46: no assertion, and nothing is saved twice."""
    with Quilt(FULL_AND_SLIDING, async_scheduling=async_scheduling, max_num_batched_tokens=128) as q:
        q.fault_at_next("silent", jobs=99)
        record = q.add(PROMPT, max_tokens=20)
        q.step(5)
        assert q.side.saves.under_way() > 0
        for _ in range(2):
            assert q.h.preempt(record.id)
            q.step(3)
        q.heal()
        q.run()
        assert len(record.output) == 20
        assert sum(a.preempted for a in record.admissions) == 2
        committed = {g.name: g.committed_pages for g in q.store.stats().groups}
        assert committed == q.pages()  # every page once
        q.forget()
        assert q.serve(PROMPT, max_tokens=20).external_hit == HIT
        q.check_end()


def test_b47_blocks_that_a_save_still_reads_are_not_free_and_come_back_once() -> None:
    """B47: the engine has 10 blocks, a finished request's save holds 6, the next needs 8."""
    with Quilt([full(16)], num_blocks=11, enable_prefix_caching=False) as q:
        q.fault_at_next("silent")
        q.add(tokens(1, 96))
        q.step(3)
        assert q.h.requests["r0"].finish_reason == "length"
        assert q.h.block_pool.get_num_free_blocks() == 4
        second = q.add(tokens(2, 128))
        q.step(5)
        assert second.admissions == []  # it waits
        q.heal()
        q.run()
        assert second.finish_reason == "length"
        free = [b.block_id for b in q.h.block_pool.free_block_queue.get_all_free_blocks()]
        assert sorted(free) == list(range(1, 11))
        q.check_end()


def test_b47_a_window_that_slides_on_while_its_save_is_under_way() -> None:
    """B47, invariant 32: pins are per job, and independent of the request's life."""
    with Quilt([sliding(16, 32), full(16)], num_blocks=60, max_num_batched_tokens=32) as q:
        q.fault_at_next("silent", jobs=99)
        q.add(tokens(1, 200), max_tokens=4)
        q.step(12)
        assert q.h.requests["r0"].finish_reason == "length"
        assert len(q.side.pins) >= 2 * 10  # all that was filled, long after the windows slid on
        q.heal()
        q.run()
        q.forget()
        assert q.serve(tokens(1, 200)).external_hit == 192
        q.check_end()


def test_b48_a_write_that_never_ends_holds_up_nobody_and_can_be_done_again() -> None:
    """B48: the hit is the prefix before the pending key; after the ticket's time it is free again."""
    with Quilt([full(16)], step_seconds=0.1, load_timeout_seconds=1.0) as q:
        q.store._tickets._clock = q.clock
        prompt = tokens(1, 16 * 5 + 1)
        q.serve(prompt[:33])
        q.forget()
        q.fault_at_next("silent")
        q.serve(prompt[:49], skip_reading_prefix_cache=True)  # block 2 is never written
        assert [job.pinned for job in q.side.saves._jobs.values()] != []
        assert not q.connector.has_pending_push_work()
        assert q.h.reset_prefix_cache()
        assert q.serve(prompt).external_hit == 32
        assert q.saved_blocks(prompt, 0) == [0, 1, 2, 3, 4]  # block 2 only reserved
        q.forget()
        assert q.serve(prompt).external_hit == 32
        q._now += 200.0
        q.forget()
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt).external_hit == 80
        q.settle()
        q.check_end()


@pytest.mark.parametrize("when", ["before submission", "in flight", "before its notice", "twice"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_b51_an_aborted_load_gives_its_blocks_back_once_and_not_before_the_copy_ended(
    when: str, async_scheduling: bool
) -> None:
    """B51, B82, invariant 26."""
    with Quilt(FULL_AND_SLIDING, late={0: 0}, async_scheduling=async_scheduling) as q:
        saved(q)
        if when == "before its notice":
            q.late[0]._steps = None  # the copy ends; nobody hears of it
        else:
            q.fault_at_next("late report" if when == "twice" else "silent")
        record = q.add(PROMPT)
        if when == "before submission":
            q.h.abort(record.id, mid_step=True)
            q.step(3)
        else:
            q.step(3)
            q.h.abort(record.id)
        assert record.external_hit == HIT
        if when == "twice":
            q.h.abort(record.id)
        if when != "twice":
            held = {i for load in q.side.loads._loads.values() for i in load.pinned}
            assert len(held) == 15 + 4
            assert all(q.h.block_pool.blocks[i].ref_cnt > 0 for i in held)
            # Whoever comes now gets other blocks.
            other = q.add(tokens(2, 300))
            q.step(2)
            for table in q.h.scheduler.kv_cache_manager.get_block_ids(other.id) or ():
                assert not held & set(table)
        q.heal()
        q.run()
        q.check_end()


def test_b52_a_local_length_that_no_boundary_allows_is_no_question() -> None:
    """B52: the count ran ahead of the blocks."""
    with Quilt([full(32), sliding(16, 64)]) as q:
        saved(q)
        record = q.add(PROMPT)
        assert ask(q, record.id, 48) == (0, False)
        assert ask(q, record.id, 64) == (HIT - 64, True)
        q.run()
        assert record.external_hit == HIT
        q.check_end()


def test_11_a_changed_local_length_releases_the_old_lease() -> None:
    """Invariants 10 and 11."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        record = q.add(PROMPT)
        assert ask(q, record.id, 0) == (HIT, True)
        slots = q.store.stats().leased_slots
        assert ask(q, record.id, 64) == (HIT - 64, True)
        assert (q.store.stats().leases, q.store.stats().leased_slots) == (1, slots - 2)
        assert ask(q, record.id, 0) == (HIT, True)
        assert (q.store.stats().leases, q.store.stats().leased_slots) == (1, slots)
        q.run()
        assert record.external_hit == HIT
        q.check_end()


def test_16_what_the_engine_finally_takes_rules() -> None:
    """Invariants 16 and 17: a shorter boundary is leased anew, slots for destinations one to one;
    what is no boundary is refused, and the request is computed."""
    for cut, loads in ((32, True), (16, False)):
        with Quilt([full(32), sliding(16, 64)]) as q:
            saved(q)

            def shorter(real: Any, request: Any, local: int, cut: int = cut) -> Any:
                found, later = real(request, local)
                return (found - cut, later) if found else (found, later)

            with MethodFault(q.side, "match", instead=shorter):
                record = q.add(PROMPT)
                q.run()
            assert [a.external for a in record.admissions] == ([HIT - cut] if loads else [HIT - cut, 0])
            assert q.count("loaded_pages", "full") == (14 if loads else 0)
            q.check_end()


def test_silent_save_does_not_keep_the_engine_busy_for_ever() -> None:
    """`has_pending_push_work` ends; a later step takes the late end in."""
    with Quilt(FULL_AND_SLIDING, step_seconds=0.05, load_timeout_seconds=1.0) as q:
        q.fault_at_next("silent")
        q.add(PROMPT)
        q.step()
        assert q.connector.has_pending_push_work()
        q.run()
        assert q.side.saves.under_way() == 1
        assert not q.connector.has_pending_push_work()
        q.settle()
        q.forget()
        assert q.serve(PROMPT).external_hit == HIT
        q.check_end()


# ---- (g) races between save, reuse, preemption, abort ----


def test_b78_saves_and_loads_of_any_delay_see_the_right_bytes() -> None:
    """B78: copies that run steps after they were asked for, over reused blocks."""
    from kvquilt.testing.faults import CopyPlan

    plan = CopyPlan(rates={"late": 0.8}, polls=(1, 9), seed=3)
    with Quilt([sliding(16, 32), full(16)], copies=plan, num_blocks=80, max_num_batched_tokens=64) as q:
        for turn in range(4):
            for number in range(6):
                q.add(tokens(number % 3, 150) + tokens(turn * 10 + number, 20), max_tokens=6)
            q.run()
            q.h.reset_prefix_cache()
        assert q.count("hit_tokens") > 0
        q.settle()
        q.check_end()


def test_b81_blocks_of_a_preempted_request_are_not_overwritten_under_a_save() -> None:
    """B81: ids are wanted at once by another request; the preemption hook comes twice."""
    with Quilt([full(16)], num_blocks=42, enable_prefix_caching=False, max_num_batched_tokens=128) as q:
        q.fault_at_next("late", jobs=6)
        record = q.add(tokens(1, 300), max_tokens=10)
        q.step(2)
        assert q.side.saves.under_way() > 0
        pinned = set(q.side.pins._pins)
        q.h.preempt(record.id)
        other = q.add(tokens(2, 200), max_tokens=3, priority=-1)
        q.step()
        (metadata,) = [q.workers[0]._last_metadata]
        q.workers[0].handle_preemptions(metadata)
        q.workers[0].handle_preemptions(metadata)
        tables = [q.h.scheduler.kv_cache_manager.get_block_ids(i)[0] for i in q.h.scheduler.requests]
        if q.side.saves.under_way():
            assert all(not (set(q.side.pins._pins) & pinned & set(table)) for table in tables)
        q.settle()
        assert (len(record.output), len(other.output)) == (10, 3)
        for prompt, hit in ((record.prompt, 288), (other.prompt, 192)):
            assert q.serve(prompt).external_hit == hit
        q.check_end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_b82_a_time_out_frees_nothing_that_a_copy_still_writes(num_ranks: int) -> None:
    """B82, invariants 23 and 27: the request is told failed once and computed; lease, slots and
    blocks live until the copy has ended on every rank."""
    with Quilt(FULL_AND_SLIDING, step_seconds=0.05, load_timeout_seconds=1.0, num_ranks=num_ranks) as q:
        first = saved(q, max_tokens=3)
        q.fault_at_next("late", rank=num_ranks - 1)
        q.copiers[-1]._plan = type(q.copiers[-1]._plan)(
            at=q.copiers[-1]._plan.at, polls=(1_000_000, 1_000_000)
        )
        record, other = q.add(PROMPT, max_tokens=3), q.add(tokens(2, 100))
        q.run()
        assert other.finish_reason == "length"
        assert [a.external for a in record.admissions] == [HIT, 0]
        assert record.output == first.output
        assert q.count("load_failures", "timeout") == 1
        assert q.store.audit().leases == 1
        (load,) = q.side.loads._loads.values()
        assert load.ranks_left == {num_ranks - 1}
        assert all(q.h.block_pool.blocks[i].ref_cnt > 0 for i in load.pinned)
        # The copy runs now, into blocks that nobody else has got meanwhile.
        q.settle()
        assert q.store.audit().leases == 0
        q.check_end()


def test_27_a_silent_rank_does_not_hang_the_others() -> None:
    """Invariant 27: requests that load nothing go on while one rank's reports do not come."""
    with Quilt(FULL_AND_SLIDING, num_ranks=2, late={1: 0}) as q:
        saved(q)
        q.late[1]._steps = None
        loading = q.add(PROMPT)
        others = [q.add(tokens(seed, 300), max_tokens=5) for seed in range(2, 6)]
        q.h.run_until(lambda: all(other.finish_reason for other in others))
        assert loading.finish_reason is None
        assert q.side.loads.under_way() == 1
        q.heal()
        q.run()
        assert loading.external_hit == HIT
        q.check_end()


def test_32_sources_are_pinned_until_every_rank_has_reported() -> None:
    """Invariants 32, 35: and not visible before."""
    with Quilt(FULL_AND_SLIDING, num_ranks=2) as q:
        q.fault_at_next("silent", rank=1)
        q.add(PROMPT)
        q.h.run_until(lambda: any(job.ranks_left == {1} for job in q.side.saves._jobs.values()))
        assert len(q.side.pins) > 0
        assert q.store.audit().tickets == 1
        assert sum(q.pages().values()) == 0
        q.heal()
        q.run()
        assert sum(q.pages().values()) > 0
        q.forget()
        assert q.serve(PROMPT).external_hit == HIT
        q.check_end()


@pytest.mark.parametrize("fault", ["fail", "tear", "refuse"])
def test_35_a_page_that_one_rank_could_not_write_is_never_visible(fault: str) -> None:
    """Invariants 19, 35, 37: the request ends, pins are released, nothing stays reserved."""
    with Quilt(FULL_AND_SLIDING, num_ranks=2) as q:
        q.fault_at_next(fault, rank=1)
        record = q.serve(PROMPT)
        assert record.finish_reason == "length"
        assert sum(q.pages().values()) == 0
        assert q.count("saves_failed") == 1
        audit = q.store.audit()
        assert (audit.tickets, sum(arena.reserved for arena in audit.arenas)) == (0, 0)
        q.forget()
        assert q.serve(PROMPT).external_hit == 0
        q.forget()
        assert q.serve(PROMPT).external_hit == HIT  # the second time it was saved
        q.check_end()


@pytest.mark.parametrize("fault", ["fail", "tear", "refuse"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_23_a_failed_load_is_told_once_and_not_offered_again(fault: str, num_ranks: int) -> None:
    """B20, invariant 23: a failure of one group's bytes fails the whole load of one request; the
    others are unharmed, and no block is ever named as bad."""
    with Quilt(FULL_AND_SLIDING, num_ranks=num_ranks) as q:
        first = saved(q, max_tokens=3)
        told: list[str] = []

        def listen(real: Any, output: Any) -> None:
            assert not output.invalid_block_ids
            told.extend(output.finished_recving or ())
            assert output.failed_recving <= (output.finished_recving or set())
            real(output)

        q.fault_at_next(fault)
        with MethodFault(q.side, "on_output", instead=listen):
            bad, good = q.add(PROMPT, max_tokens=3), q.add(tokens(2, 200), max_tokens=3)
            q.step(3)
            q.h.preempt(bad.id)
            q.run()
        assert told == [bad.id]
        assert [a.external for a in bad.admissions][:2] == [HIT, 0]
        assert all(a.external == 0 for a in bad.admissions[1:])
        assert bad.output == first.output
        assert good.finish_reason == "length"
        q.forget()
        assert q.serve(PROMPT).external_hit == HIT  # another request may try
        q.check_end()


@pytest.mark.parametrize("wait", ["late", "late report", "silent"])
def test_flushed_saves_are_failed_and_keep_their_slots_until_the_copy_ended(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset takes the pins of a save whose copy is late: what it reads from now on may be another
    request's, and where it writes must not be another page's."""
    monkeypatch.setattr(worker_module, "FLUSH_SECONDS", 0.0)
    with Quilt([full(16)], num_blocks=40, ram_bytes=40 * 4096) as q:
        q.fault_at_next(wait)
        copier = q.copiers[0]
        copier._plan = type(copier._plan)(at=copier._plan.at, polls=(10_000, 10_000))
        q.add(tokens(1, 400))
        q.step(2)
        assert q.store.audit().tickets == 1
        assert q.h.reset_prefix_cache()
        assert len(q.side.pins) == 0
        second = q.add(tokens(2, 500))  # over the same blocks
        q.step(4)
        assert second.finish_reason == "length"
        reserved = sum(arena.reserved for arena in q.store.audit().arenas)
        assert reserved >= 25  # the slots that the late copy writes
        q.settle()
        assert q.count("saves_failed") == 1
        assert q.saved_blocks(tokens(1, 400), 0) == []
        q.forget()
        assert q.serve(tokens(1, 400)).external_hit == 0
        q.forget()
        assert q.serve(tokens(1, 400)).external_hit == 384
        q.check_end()


def test_a_reset_waits_for_no_save() -> None:
    """With only saves under way, the engine's reset succeeds, and what was read in time is kept."""
    with Quilt(FULL_AND_SLIDING) as q:
        q.add(PROMPT)
        q.step()
        assert q.h.requests["r0"].finish_reason == "length"
        assert q.h.reset_prefix_cache()
        q.run()
        record = q.serve(PROMPT)
        assert record.local_hit == 0
        assert record.external_hit in (0, HIT)  # the copy may not have begun
        q.check_end()


def test_b23_after_a_reset_of_the_connector_nothing_is_served() -> None:
    """B23: neither what was there nor what was in flight."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        q.fault_at_next("late report", jobs=3)
        q.add(tokens(2, 500))
        q.step(2)
        assert q.store.audit().tickets > 0
        assert q.h.reset_prefix_cache(reset_connector=True)
        q.settle()
        assert q.pages() == {"full": 0, "sliding": 0}
        for seed in (1, 2):
            assert q.serve(tokens(seed, 500)).external_hit == 0
            q.forget()
            assert q.serve(tokens(seed, 500)).external_hit == HIT
        q.check_end()


@pytest.mark.parametrize("retention", ["dense", "prompt_end"])
def test_b23_what_the_engine_kept_through_a_reset_that_it_refused_is_not_saved_again(retention: str) -> None:
    with Quilt(FULL_AND_SLIDING, retention=retention) as q:
        q.start()
        running = q.add(PROMPT, max_tokens=80)
        q.h.run_until(lambda: len(running.output) >= 30)
        assert not q.h.reset_prefix_cache(reset_connector=True)  # refused: a request is running
        again = q.serve(PROMPT)
        assert again.local_hit == HIT  # the engine itself still serves it
        q.run()
        assert sum(q.pages().values()) == 0
        assert q.h.reset_prefix_cache()  # idle now: the engine has emptied its own cache
        assert q.serve(PROMPT).external_hit == 0
        q.forget()
        assert q.serve(PROMPT).external_hit == HIT
        q.check_end()


@pytest.mark.parametrize("fault", ["silent", "late report", "late"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_b23_a_load_in_flight_at_a_reset_is_reported_failed(fault: str, num_ranks: int) -> None:
    with Quilt(FULL_AND_SLIDING, num_ranks=num_ranks) as q:
        saved(q)
        q.fault_at_next(fault)
        record = q.add(PROMPT)
        q.step()
        assert record.external_hit == HIT
        q.h.reset_prefix_cache(reset_connector=True)
        q.step(2)
        q.heal()
        q.run()
        assert [a.external for a in record.admissions] == [HIT, 0]
        assert q.count("load_failures", "reset") == 1
        q.check_end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_b23_a_reset_that_overtakes_a_finished_load_still_fails_it(num_ranks: int) -> None:
    """All ranks have told their success; it has not reached the scheduler when the reset comes."""
    with Quilt(FULL_AND_SLIDING, num_ranks=num_ranks, late=dict.fromkeys(range(num_ranks), 0)) as q:
        saved(q)
        for late in q.late.values():
            late._steps = None
        record = q.add(PROMPT)
        q.step(3)
        q.h.reset_prefix_cache(reset_connector=True)
        q.heal()
        q.run()
        assert [a.external for a in record.admissions] == [HIT, 0]
        assert q.count("load_failures", "reset") == 1
        q.check_end()


def test_b51_blocks_of_an_aborted_load_are_not_saved() -> None:
    """The store has just forgotten them, so they would be wanted; but they were never filled."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        q.fault_at_next("late")
        q.copiers[0]._plan = type(q.copiers[0]._plan)(at=q.copiers[0]._plan.at, polls=(10_000, 10_000))
        record = q.add(PROMPT)
        q.step()
        assert record.external_hit == HIT
        q.h.reset_prefix_cache(reset_connector=True)
        q.h.abort(record.id)
        q.step(3)
        q.settle()
        assert sum(q.pages().values()) == 0
        assert saved(q).external_hit == 0
        assert q.serve(PROMPT).external_hit == HIT
        q.check_end()
