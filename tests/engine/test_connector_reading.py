"""Who may hit what, and how a hit fits together with what the engine holds itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from engine.rig import ANSWER_TOKENS, BRANCH, SOME, TURN_1, Rig
from kvquilt.testing.copy_faults import CopyPlan

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig("gemma4-mini")


def test_request_that_skips_the_prefix_cache_gets_nothing(rig: Rig) -> None:
    rig.fill(SOME[:1])
    rig.forget_locally()
    key = rig.engine.add(SOME[0], max_tokens=4, skip_reading_prefix_cache=True)
    rig.engine.step_until_idle()
    skipped = rig.engine.take_result(key)
    assert (skipped.local_hit_tokens, skipped.external_hit_tokens) == (0, 0)
    rig.assert_answers([skipped], SOME[:1])
    rig.forget_locally()
    rig.assert_hits(rig.run(SOME[:1]), SOME[:1])


def test_salt_separates(rig: Rig) -> None:
    rig.fill(SOME[:2], cache_salt="mine")
    rig.forget_locally()
    assert {r.external_hit_tokens for r in rig.fill(SOME[:2], cache_salt="yours")} == {0}
    rig.forget_locally()
    assert {r.external_hit_tokens for r in rig.fill(SOME[:2])} == {0}
    for salt in ("mine", "yours", None):
        rig.forget_locally()
        again = rig.run(SOME[:2], cache_salt=salt)
        rig.assert_hits(again, SOME[:2])
        rig.assert_answers(again, SOME[:2])


def test_two_identical_prompts_load_once(rig: Rig) -> None:
    rig.fill(SOME[:1])
    rig.forget_locally()
    loaded = rig.total("loaded_pages")
    both = rig.run([SOME[0], SOME[0]], concurrency=2)
    first, second = ((r.local_hit_tokens, r.external_hit_tokens) for r in both)
    boundary = rig.truth.boundary(SOME[0])
    assert first == (0, boundary)
    assert second == (boundary, 0)
    rig.assert_answers(both, [SOME[0]] * 2, drift=1e-5)
    once = rig.total("loaded_pages") - loaded
    rig.forget_locally()
    rig.assert_hits(rig.run(SOME[:1]), SOME[:1])
    assert rig.total("loaded_pages") - loaded == 2 * once


def test_prompt_waits_for_a_prefix_that_is_being_loaded(rig: Rig) -> None:
    """Two prompts share 220 tokens and part there; the shorter hit comes first."""
    rig.fill(SOME[:1])
    rig.fill(BRANCH[:1])
    rig.forget_locally()
    rig.faulty(CopyPlan(rates={"late report": 1.0}, directions=("load",), polls=(5, 5)))
    both = rig.run([SOME[0], SOME[0], BRANCH[0]], concurrency=3)
    boundary = rig.truth.boundary(SOME[0])
    assert [r.local_hit_tokens + r.external_hit_tokens for r in both] == [boundary] * 3
    assert both[0].external_hit_tokens == boundary
    assert both[1].external_hit_tokens == 0
    rig.assert_answers(both, [SOME[0], SOME[0], BRANCH[0]], drift=1e-5)


def test_store_goes_on_where_the_engine_ends(rig: Rig) -> None:
    """The engine holds the first turn, the store the second one too."""
    rig.fill(TURN_1[:1], max_tokens=ANSWER_TOKENS)
    rig.forget_locally()
    rig.run([TURN_1[0][:200]], max_tokens=1)  # brings a prefix back into the engine
    [warm] = rig.run(rig.truth.turn_2[:1])
    lattice = rig.truth.layout.lattice_tokens
    assert warm.external_hit_tokens > 0
    assert warm.local_hit_tokens == 200 // lattice * lattice
    assert warm.local_hit_tokens + warm.external_hit_tokens == 393 // lattice * lattice
    rig.assert_answers([warm], rig.truth.turn_2[:1], drift=1e-5)


def test_engine_that_holds_as_much_is_not_helped(rig: Rig) -> None:
    rig.fill(SOME[:1])
    [own] = rig.run(SOME[:1])
    assert (own.local_hit_tokens, own.external_hit_tokens) == (rig.truth.boundary(SOME[0]), 0)
    rig.engine.step_until_idle()
    assert rig.side.store.audit().leases == 0, "a lease for a hit that nobody needs"
    assert "the engine's own prefix" in rig.connector.lookups(1)[0].why
    rig.forget_locally()
    rig.assert_hits(rig.run(SOME[:1]), SOME[:1])


def test_blocks_of_a_local_hit_that_the_store_lacks_are_saved(rig: Rig) -> None:
    rig.fill(SOME[:2])
    rig.forget_stored()
    own = rig.fill(SOME[:2], max_tokens=1)
    assert {r.local_hit_tokens for r in own} == {rig.truth.boundary(SOME[0])}
    rig.forget_locally()
    warm = rig.run(SOME[:2])
    rig.assert_hits(warm, SOME[:2])
    rig.assert_answers(warm, SOME[:2])


def test_loaded_blocks_are_not_saved_again(rig: Rig) -> None:
    rig.fill(SOME[:1])
    rig.forget_locally()
    saved = rig.total("saved_pages")
    [warm] = rig.run(SOME[:1], max_tokens=1)
    rig.assert_hits([warm], SOME[:1])
    rig.engine.step_until_idle()
    boundary, tokens = rig.truth.boundary(SOME[0]), len(SOME[0])
    rest = sum(tokens // g.tokens_per_block - boundary // g.tokens_per_block for g in rig.truth.layout.groups)
    assert rig.total("saved_pages") - saved <= rest


def test_asking_again_and_again_costs_one_lookup_and_one_lease(rig: Rig) -> None:
    """The engine asks in a loop while it cannot admit a request; here, while none may start."""
    from vllm.v1.core.sched.interface import PauseState

    rig.fill(SOME[:1])
    rig.forget_locally()
    before = rig.total("lookups")
    key = rig.engine.add(SOME[0], max_tokens=4)
    request = rig.engine.scheduler.requests[key]
    answers = {rig.connector.get_num_new_matched_tokens(request, 0) for _ in range(1000)}
    assert answers == {(rig.truth.boundary(SOME[0]), True)}
    assert rig.total("lookups") - before == 1
    assert rig.side.store.audit().leases == 1
    rig.engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(20):
        rig.engine.step()
    rig.engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    rig.engine.step_until_idle()
    result = rig.engine.take_result(key)
    rig.assert_hits([result], SOME[:1])
    rig.assert_answers([result], SOME[:1])


def test_what_the_engine_takes_rules(rig: Rig) -> None:
    """It takes one boundary less than was offered: exactly that much is loaded."""
    rig.fill(SOME[:1])
    rig.forget_locally()
    side, lattice = rig.side, rig.truth.layout.lattice_tokens
    offer = side.match

    def less(request: object, local: int) -> tuple[int | None, bool]:
        tokens, later = offer(request, local)
        return (tokens - lattice if tokens and tokens > lattice else tokens), later

    side.match = less
    try:
        warm = rig.run(SOME[:1])
    finally:
        del side.match
    rig.assert_hits(warm, SOME[:1], rig.truth.boundary(SOME[0]) - lattice)
    rig.assert_answers(warm, SOME[:1], drift=1e-5)
    assert rig.total("hook_errors") == 0
