"""What once went wrong: KV that another connector had not brought yet, copies that hang, errors at
the worst moment, checkpoints lost at a boundary."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from harness.connector_support import Quilt, full, sliding, tokens
from harness.sibling_connector import SIBLING, ClaimingSibling, Wishes
from kvquilt.testing.copy_faults import CopyPlan
from kvquilt.testing.faults import MethodFault

GROUPS = [full(32), sliding(16, 64)]


@pytest.fixture
def sibling() -> Iterator[Wishes]:
    ClaimingSibling.wishes = Wishes()
    yield ClaimingSibling.wishes
    ClaimingSibling.wishes = Wishes()


@pytest.mark.parametrize("policy", ["recompute", None])
def test_a_request_aborted_while_another_connector_loads_it_leaves_nothing(
    sibling: Wishes, policy: str | None
) -> None:
    prompt = tokens(7, 500)
    with Quilt(GROUPS, multi=True, multi_connector=[SIBLING], load_failure_policy=policy) as q:
        q.start()
        sibling.claim = True
        loading = q.add(prompt, max_tokens=2)
        q.step(3)
        assert q.side.layout.groups
        assert not q.saved_blocks(prompt, 0)
        q.h.abort(loading.id)
        q.step(5)
        assert not q.saved_blocks(prompt, 0)
        assert not q.saved_blocks(prompt, 1)
        sibling.claim, sibling.end = False, True
        q.run()
        assert q.serve(prompt).external_hit == 0
        q.forget()
        assert q.serve(prompt).external_hit == 480


def test_a_request_whose_load_another_connector_failed_leaves_nothing(sibling: Wishes) -> None:
    prompt = tokens(8, 500)
    with Quilt(GROUPS, multi=True, multi_connector=[SIBLING], load_failure_policy="fail") as q:
        q.start()
        sibling.claim = sibling.end = sibling.fail = True
        q.add(prompt, max_tokens=2)
        q.run()
        assert not q.saved_blocks(prompt, 0)
        assert not q.saved_blocks(prompt, 1)


def test_copies_that_never_end_do_not_stop_the_engine() -> None:
    """Every save hangs: its pins are given up when the engine needs the blocks, and it fails later."""
    plan = CopyPlan(seed=1, rates={"silent": 1.0})
    q = Quilt(
        [full(16), sliding(16, 64)],
        num_blocks=200,
        max_num_seqs=8,
        max_model_len=600,
        pin_cap=None,
        load_timeout_seconds=2.0,
        copies=plan,
    )
    requests = [q.h.add(tokens(i, 300), max_tokens=40) for i in range(20)]
    deadline = time.monotonic() + 60
    while any(r.finish_reason is None for r in requests):
        assert time.monotonic() < deadline, q.h.describe()
        q.h.step()
    assert q.side.saves.under_way(), "nothing hung"
    q.heal()
    q.h.run_until_idle()
    assert q.count("saves_failed") > 0
    assert not len(q.side.pins)
    assert q.store.audit().tickets == 0
    q.h.shutdown()


@pytest.mark.parametrize("where", ["candidates", "hashes"])
def test_an_error_while_a_request_is_finished_returns_its_pins(where: str) -> None:
    with Quilt(GROUPS, retention="prompt_end") as q:
        q.start()
        request = q.add(tokens(3, 100), max_tokens=80)
        q.h.run_until(lambda: len(request.output) >= 70)
        state = q.side._states[request.id]
        assert state.checkpoint_pins
        target = (q.side.saves, "_candidates") if where == "candidates" else (state, "sync_hashes")
        with MethodFault(*target, error=MemoryError):
            q.h.abort(request.id)
        q.run()
        assert not len(q.side.pins)
        assert q.h.reset_prefix_cache()


def test_reports_of_a_step_that_failed_are_taken_in_later() -> None:
    prompt = tokens(3, 200)
    with Quilt(GROUPS, load_timeout_seconds=2.0) as q:
        q.start()
        q.serve(prompt)
        q.forget()
        loading = q.add(prompt, max_tokens=30)
        with MethodFault(q.side, "on_output", error=ValueError):
            q.step(6)
        q.run()
        assert loading.external_hit == 192
        audit = q.store.audit()
        assert audit.leases == audit.tickets == len(q.side.pins) == 0
        assert q.h.reset_prefix_cache()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("written", [126, 127, 128, 129])
def test_the_end_of_a_generation_can_be_resumed(asynchronous: bool, written: int) -> None:
    """Also where it ends exactly at a boundary and no further step comes."""
    prompt = tokens(3, 70)
    with Quilt(GROUPS, retention="prompt_end", async_scheduling=asynchronous) as q:
        first = q.serve(prompt, max_tokens=written - 70 + 1)
        q.forget()
        again = q.serve(prompt + first.output + tokens(5, 40))
        assert again.external_hit == written // 32 * 32


def test_a_checkpoint_stays_until_the_next_one_can_be_pinned() -> None:
    with Quilt(GROUPS, retention="prompt_end", num_blocks=200) as q:
        q.start()
        request = q.add(tokens(3, 100), max_tokens=120)
        q.h.run_until(lambda: len(request.output) >= 35)
        state = q.side._states[request.id]
        assert state.checkpoint == 128
        cap, q.side.pins.cap = q.side.pins.cap, 0
        q.h.run_until(lambda: len(request.output) >= 110)
        assert state.checkpoint == 128
        assert q.count("saves_skipped", "pin_cap") > 0
        q.side.pins.cap = cap
        q.run()


def test_ranks_have_the_more_time_to_attach_the_larger_the_pools_are() -> None:
    """To pin hundreds of GiB takes minutes: in the time that a load has they would never get there."""
    began = time.monotonic()
    with Quilt(GROUPS, ram_bytes="256MiB", load_timeout_seconds=7.0) as q:
        made = time.monotonic()
        assert began + 14.9 <= q.side._attach_until <= made + 15.0
        q.side.clock = lambda: q.side._attach_until - 0.1
        assert q.side.has_push_work()
        q.side.clock = lambda: q.side._attach_until + 0.1
        assert not q.side.has_push_work()
        assert q.side._broken
