"""Tiny models in a real engine: their groups, and that their outputs depend on every group's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import get_group_id

from kvquilt.testing import Engine, Result, model_spec, pool_blocks_for, zero_pages

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = 12
PROMPT_TOKENS = 330
OUTPUT_TOKENS = 8


def prompts(count: int = PROMPTS, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    return np.random.default_rng(7).integers(3, 2048, (count, tokens)).tolist()


def same_tokens(left: list[Result], right: list[Result]) -> int:
    return sum(a.tokens == b.tokens for a, b in zip(left, right, strict=True))


def run(engine: Engine, **changes: object) -> list[Result]:
    arguments: dict[str, object] = {"max_tokens": OUTPUT_TOKENS, "concurrency": 1, **changes}
    return engine.run(prompts(), **arguments)  # type: ignore[arg-type]


def cached_blocks(engine: Engine, group: int) -> list[int]:
    """Ids of the blocks that the engine's own prefix cache holds for one group."""
    blocks = engine.block_pool.blocks
    return [b.block_id for b in blocks if b.block_hash is not None and get_group_id(b.block_hash) == group]


@pytest.fixture(scope="module", params=("gemma3-mini", "gemma4-mini", "plain-mini"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(name: str) -> Iterator[Engine]:
    layout = model_spec(name).layout
    blocks = pool_blocks_for(layout, [PROMPT_TOKENS] * PROMPTS, output_tokens=OUTPUT_TOKENS)
    with Engine(name, num_blocks=blocks, max_model_len=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def truth(engine: Engine) -> list[Result]:
    results = run(engine)
    assert all(result.local_hit_tokens == 0 for result in results)
    return results


@pytest.fixture
def cold(engine: Engine) -> Callable[[], None]:
    def empty() -> None:
        engine.step_until_idle()
        assert engine.reset_prefix_cache()

    empty()
    return empty


def test_groups_are_what_the_spec_says(engine: Engine, name: str) -> None:
    spec = model_spec(name)
    found = []
    for group in engine.kv_cache_config.kv_cache_groups:
        cache = group.kv_cache_spec
        window = getattr(cache, "sliding_window", None)
        page_bytes = cache.page_size_bytes * len(group.layer_names)
        found.append((window, cache.block_size, page_bytes, tuple(group.layer_names)))
    assert found == [(g.window, g.tokens_per_block, g.page_bytes, g.layers) for g in spec.groups]
    assert engine.kv_cache_config.hash_block_size == spec.layout.tokens_per_hash
    assert engine.kv_cache_config.cache_hit_alignment_tokens == spec.layout.lattice_tokens


def test_gemma4_blocks_differ_between_groups() -> None:
    blocks = {group.kind: group.tokens_per_block for group in model_spec("gemma4-mini").groups}
    assert blocks == {"sliding": 64, "full": 32}


def test_outputs_repeat_exactly(engine: Engine, truth: list[Result], cold: Callable[[], None]) -> None:
    again = run(engine)
    assert [r.tokens for r in again] == [r.tokens for r in truth]
    assert [r.logprobs for r in again] == [r.logprobs for r in truth]
    assert len({r.tokens for r in truth}) > PROMPTS // 2, "the model says the same whatever it is asked"
    assert all(len(r.tokens) == len(r.logprobs) == OUTPUT_TOKENS for r in truth)
    assert all(logprob < 0 for r in truth for logprob in r.logprobs)
    assert {r.finish_reason for r in truth} == {"length"}


def test_own_prefix_hit_gives_equal_outputs(
    engine: Engine, name: str, truth: list[Result], cold: Callable[[], None]
) -> None:
    run(engine, concurrency=4)
    warm = run(engine)
    boundary = model_spec(name).layout.max_boundary(PROMPT_TOKENS)
    assert boundary > 0
    assert {r.local_hit_tokens for r in warm} == {boundary}
    assert {r.external_hit_tokens for r in warm} == {0}
    assert [r.tokens for r in warm] == [r.tokens for r in truth]
    drift = max(
        abs(x - y)
        for a, b in zip(warm, truth, strict=True)
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )
    assert drift <= 1e-5


def test_zeros_in_any_one_group_change_most_outputs(
    engine: Engine, truth: list[Result], cold: Callable[[], None]
) -> None:
    unchanged = {}
    for group, spec in enumerate(engine.kv_cache_config.kv_cache_groups):
        cold()
        run(engine, max_tokens=1, concurrency=4)
        blocks = cached_blocks(engine, group)
        assert blocks, f"the engine holds nothing of {spec.layer_names}"
        zero_pages(engine.kv_caches, engine.kv_cache_config, group, blocks)
        damaged = run(engine, concurrency=4)
        assert min(r.local_hit_tokens for r in damaged) > 0
        unchanged[group] = same_tokens(damaged, truth)
    cold()
    assert max(unchanged.values()) < PROMPTS / 2, unchanged


def test_results_come_in_prompt_order(engine: Engine, truth: list[Result], cold: Callable[[], None]) -> None:
    seen: list[tuple[int, int]] = []
    names = [f"mine-{i}" for i in range(PROMPTS)]
    results = run(
        engine, order="reversed", concurrency=1, ids=names, progress=lambda done, n: seen.append((done, n))
    )
    assert same_tokens(results, truth) == PROMPTS
    assert [r.request_id.startswith(n) for r, n in zip(results, names, strict=True)] == [True] * PROMPTS
    assert seen == [(i + 1, PROMPTS) for i in range(PROMPTS)]


def test_salt_separates_prefixes(engine: Engine, cold: Callable[[], None]) -> None:
    run(engine, max_tokens=1)
    assert all(r.local_hit_tokens == 0 for r in run(engine, max_tokens=1, cache_salt="other"))


def test_abort_and_reset(engine: Engine, cold: Callable[[], None]) -> None:
    free = engine.num_free_blocks()
    running = engine.add(prompts()[0], max_tokens=100)
    engine.step()
    assert engine.num_free_blocks() < free
    assert not engine.reset_prefix_cache(), "a reset with blocks in use must say so"
    engine.abort([running])
    engine.step_until_idle()
    assert engine.take_result(running).finish_reason == "abort"
    assert engine.num_free_blocks() == free
    assert engine.reset_prefix_cache()


def test_time_out_of_idle_says_what_is_left(engine: Engine, cold: Callable[[], None]) -> None:
    running = engine.add(prompts()[0], max_tokens=100)
    with pytest.raises(TimeoutError, match="1 known to the scheduler"):
        engine.step_until_idle(deadline_seconds=0.0)
    engine.abort([running])
    engine.step_until_idle()
