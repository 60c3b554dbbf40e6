"""Engines and models from start to end: hits that lie, pools that are too small, files, closing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvquilt.testing import Engine, Result, make_model, model_names, model_spec, pool_blocks_for

PROMPTS = 12
PROMPT_TOKENS = 330
CLAIMING = {
    "kv_connector": "ClaimingConnector",
    "kv_connector_module_path": "engine.claiming_connector",
    "kv_role": "kv_both",
}
engine_test = pytest.mark.engine


def run(engine: Engine, max_tokens: int = 8) -> list[Result]:
    prompts = np.random.default_rng(7).integers(3, 2048, (PROMPTS, PROMPT_TOKENS)).tolist()
    return engine.run(prompts, max_tokens=max_tokens, concurrency=1)


@engine_test
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3-mini", "gemma4-mini", "plain-mini"])
def test_hit_that_brings_zeros_changes_most_outputs(name: str) -> None:
    boundary = model_spec(name).layout.max_boundary(PROMPT_TOKENS)
    with Engine(name, connector=CLAIMING, max_model_len=512) as engine:
        connector, worker = engine.connector, engine.worker_connector
        connector.claim = False
        truth = run(engine)
        assert {r.external_hit_tokens for r in truth} == {0}
        assert engine.reset_prefix_cache()
        connector.claim = True
        wrong = run(engine)
        engine.step_until_idle()
        assert engine.reset_prefix_cache()
    assert {r.external_hit_tokens for r in wrong} == {boundary}
    assert {r.local_hit_tokens for r in wrong} == {0}
    assert sum(a.tokens == b.tokens for a, b in zip(wrong, truth, strict=True)) < PROMPTS / 2
    assert connector.was_shut_down
    assert worker.was_shut_down


@engine_test
def test_closed_engine_says_so() -> None:
    engine = Engine("plain-mini", max_model_len=512)
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.scheduler  # noqa: B018


@engine_test
def test_smaller_pool_than_computed_loses_hits() -> None:
    layout = model_spec("plain-mini").layout
    blocks = pool_blocks_for(layout, [PROMPT_TOKENS] * PROMPTS, output_tokens=1, concurrency=1)
    hits = {}
    for size in (blocks, math.ceil(blocks / 2)):
        with Engine("plain-mini", num_blocks=size, max_model_len=512) as engine:
            run(engine, max_tokens=1)
            hits[size] = sum(r.local_hit_tokens for r in run(engine, max_tokens=1))
    whole = PROMPTS * layout.max_boundary(PROMPT_TOKENS)
    assert hits[blocks] == whole
    assert hits[math.ceil(blocks / 2)] < whole


@pytest.mark.parametrize("name", model_names())
def test_models_are_made_once_and_from_the_seed(tmp_path: Path, name: str) -> None:
    first = make_model(name, tmp_path / "a")
    second = make_model(name, tmp_path / "b")
    other = make_model(name, tmp_path / "a", seed=1)
    weights = (first / "model.safetensors").read_bytes()
    assert weights == (second / "model.safetensors").read_bytes()
    assert weights != (other / "model.safetensors").read_bytes()
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert make_model(name, tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted([first.name, other.name])
