"""The main job in a real engine: what was saved is found and put back, and the output is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from engine.rig import ANSWER_TOKENS, BRANCH, EDGES, SOME, TURN_1, Rig
from kvquilt.testing import PageRecorder

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module", params=("gemma3-mini", "gemma4-mini", "plain-mini"))
def model(request: pytest.FixtureRequest) -> str:
    """Full and sliding groups: `test_kinds.py` has the other kinds.

    Of module scope, so that all tests of one model follow one another in one engine.
    """
    return str(request.param)


@pytest.fixture
def rig(model: str, make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(model)


def test_hit_is_the_longest_boundary_and_output_is_equal(rig: Rig) -> None:
    cold = rig.fill(SOME)
    assert {r.external_hit_tokens for r in cold} == {0}
    rig.assert_answers(cold, SOME)
    rig.forget_locally()
    warm = rig.run(SOME)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME)
    assert rig.total("load_failures") == rig.total("hook_errors") == 0


def test_prompts_that_end_on_a_boundary_compute_their_last_token(rig: Rig) -> None:
    rig.fill(EDGES)
    rig.forget_locally()
    warm = rig.run(EDGES)
    longest = [rig.truth.boundary(prompt) for prompt in EDGES]
    assert [r.external_hit_tokens for r in warm] == longest
    assert (
        sum(hit == 0 for hit in longest)
        <= 1
        < sum(hit == len(p) - 1 for hit, p in zip(longest, EDGES, strict=True))
    )
    rig.assert_answers(warm, EDGES, drift=1e-5)
    for result, prompt in zip(warm, EDGES, strict=True):
        own = rig.truth.own_hits[tuple(prompt)]
        assert own.local_hit_tokens == result.external_hit_tokens
        assert (own.tokens, own.logprobs) == (result.tokens, result.logprobs)


def test_prompt_that_leaves_another_resumes_where_they_part(rig: Rig) -> None:
    rig.fill(SOME)
    rig.forget_locally()
    warm = rig.run(BRANCH)
    lattice = rig.truth.layout.lattice_tokens
    rig.assert_hits(warm, BRANCH, 220 // lattice * lattice)
    rig.assert_answers(warm, BRANCH)


def test_second_turn_hits_past_the_first_prompt(rig: Rig) -> None:
    rig.fill(TURN_1, max_tokens=ANSWER_TOKENS)
    rig.forget_locally()
    warm = rig.run(rig.truth.turn_2)
    written = len(TURN_1[0]) + ANSWER_TOKENS - 1  # the KV of the last generated token was never computed
    lattice = rig.truth.layout.lattice_tokens
    assert written // lattice * lattice > rig.truth.boundary(TURN_1[0])
    rig.assert_hits(warm, rig.truth.turn_2, written // lattice * lattice)
    # The answer's KV was computed token by token, the truth's all at once: the last bits differ.
    rig.assert_answers(warm, rig.truth.turn_2, drift=1e-5)


def test_many_at_once_hit_and_say_the_same(rig: Rig) -> None:
    rig.fill(SOME, concurrency=4)
    rig.forget_locally()
    warm = rig.run(SOME, concurrency=4)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME, drift=1e-5)  # batching itself moves the last bits


def test_pages_in_the_engine_are_those_that_were_saved(rig: Rig) -> None:
    recorder = PageRecorder(rig.engine.kv_caches, rig.engine.kv_cache_config)
    rig.side.saves.record_keys = rig.side.loads.record_keys = True
    rig.worker.observer = recorder
    try:
        rig.fill(SOME)
        rig.forget_locally()
        rig.assert_hits(rig.run(SOME), SOME)
        rig.engine.step_until_idle()
    finally:
        rig.worker.observer = None
        rig.side.saves.record_keys = rig.side.loads.record_keys = False
    report = recorder.report()
    assert report.compared == report.equal > 0


def test_why_says_what_limited_the_hit(rig: Rig) -> None:
    rig.fill(SOME[:1])
    rig.forget_locally()
    rig.assert_hits(rig.run(SOME[:1]), SOME[:1])
    full = rig.connector.lookups(1)[0]
    assert (full.limited_by, full.hit_tokens) == (None, rig.truth.boundary(SOME[0]))
    assert "longest boundary" in full.why
    rig.forget_locally()
    rig.run(BRANCH[:1])
    short = rig.connector.lookups(1)[0]
    assert short.limited_by in {group.name for group in rig.truth.layout.groups}
    assert short.limited_by in short.why
