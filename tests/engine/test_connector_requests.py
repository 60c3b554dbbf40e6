"""Requests of every shape: short ones, several answers, log-probabilities of the prompt, odd chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from engine.rig import SOME, Rig, random_prompts
from kvquilt.testing import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig("gemma4-mini")


def ask(engine: Engine, prompt: list[int], **sampling: Any) -> Any:
    """The engine's own output for one request that is not of `Engine`'s plain kind."""
    params = SamplingParams(
        max_tokens=6, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **sampling
    )
    name = f"asked-{id(params)}"
    engine.llm_engine.add_request(name, tokens_input(list(prompt)), params)
    while True:
        for output in engine.llm_engine.step():
            if output.finished and output.request_id == name:
                engine.step_until_idle()
                return output


def test_several_answers_to_one_prompt(rig: Rig) -> None:
    """All of them resume from one load, and go on as they would have without it."""
    sampling = {"n": 3, "temperature": 0.9, "seed": 11}
    cold = ask(rig.engine, SOME[0], **sampling)
    rig.forget_locally()
    hits, loads = rig.total("hit_tokens"), rig.total("lookups", "hit")
    warm = ask(rig.engine, SOME[0], **sampling)
    assert rig.total("hit_tokens") - hits == rig.truth.boundary(SOME[0])
    assert rig.total("lookups", "hit") > loads
    assert [list(o.token_ids) for o in warm.outputs] == [list(o.token_ids) for o in cold.outputs]
    assert len({tuple(o.token_ids) for o in warm.outputs}) > 1


def test_log_probabilities_of_a_prompt_are_computed_not_found(rig: Rig) -> None:
    """The engine reads no prefix for such a request, since every position has to be computed."""
    rig.fill(SOME[:1])
    rig.forget_locally()
    lookups = rig.total("hit_tokens")
    output = ask(rig.engine, SOME[0], temperature=0.0, prompt_logprobs=1)
    assert rig.total("hit_tokens") == lookups
    assert len(output.prompt_logprobs) == len(SOME[0])
    assert tuple(output.outputs[0].token_ids)[:4] == rig.truth.of(SOME[0]).tokens
    rig.forget_locally()
    rig.assert_hits(rig.run(SOME[:1]), SOME[:1])


def test_requests_shorter_than_a_block(rig: Rig) -> None:
    prompts = random_prompts(21, 1, 2, 31, 32, 33, 63)
    cold = rig.fill(prompts)
    rig.forget_locally()
    warm = rig.run(prompts)
    assert {r.external_hit_tokens for r in warm} == {0}
    assert [r.tokens for r in warm] == [r.tokens for r in cold]


def test_prompts_that_differ_in_the_last_token_of_a_block(rig: Rig) -> None:
    lattice = rig.truth.layout.lattice_tokens
    prompt = random_prompts(22, 3 * lattice + 5)[0]
    other = list(prompt)
    other[2 * lattice - 1] = 3 + (other[2 * lattice - 1] + 1) % 1000
    alone = {}
    for name, tokens in (("prompt", prompt), ("other", other)):
        rig.engine.reset_prefix_cache(reset_connector=True)
        alone[name] = rig.fill([tokens])[0].tokens
    rig.engine.reset_prefix_cache(reset_connector=True)
    rig.fill([prompt])
    rig.forget_locally()
    (parted,) = rig.fill([other])
    assert (parted.external_hit_tokens, parted.tokens) == (lattice, alone["other"])
    rig.forget_locally()
    (whole,) = rig.run([prompt])
    assert (whole.external_hit_tokens, whole.tokens) == (3 * lattice, alone["prompt"])


@pytest.mark.parametrize("chunk", [33, 97])
def test_whatever_the_size_of_a_step(make_rig: MakeRig, chunk: int) -> None:
    rig = make_rig("gemma4-mini", max_num_batched_tokens=chunk)
    rig.fill(SOME[:2])
    rig.forget_locally()
    warm = rig.run(SOME[:2])
    rig.assert_hits(warm, SOME[:2])
    rig.assert_answers(warm, SOME[:2], drift=1e-5)


def test_a_request_that_is_aborted_before_it_would_ever_end(rig: Rig) -> None:
    """What it has generated up to then is a prefix like any other."""
    key = rig.engine.add(SOME[0], max_tokens=1200)
    while len(rig.engine._records[key].tokens) < 150:
        rig.engine.step()
    said = list(rig.engine._records[key].tokens)
    rig.engine.abort([key])
    rig.engine.step_until_idle()
    rig.forget_locally()
    turn = [*SOME[0], *said, 7, 8, 9]
    (result,) = rig.run([turn])
    assert result.external_hit_tokens == rig.truth.layout.max_boundary(len(SOME[0]) + len(said))
