"""Each option in a real engine, the engine's own options that matter, and what is refused at start."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from engine.rig import ANSWER_TOKENS, BRANCH, RAM_BYTES, SOME, TURN_1, Keeper, Rig
from kvquilt.errors import ConfigError, KVQuiltError, SizingError
from kvquilt.layout import needed_blocks
from kvquilt.testing import Engine
from kvquilt.testing.scheduler_harness import SchedulerHarness
from kvquilt.testing.sim_shapes import GroupShape
from kvquilt.vllm import connector as connector_module

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MakeRig = Callable[..., Rig]
GROUPS = [GroupShape("full", 32), GroupShape("sliding", 64, window=64)]


def bytes_resident(rig: Rig) -> int:
    return sum(group.bytes_used for group in rig.side.store.stats().groups)


def assert_warm(rig: Rig) -> None:
    rig.forget_locally()
    warm = rig.run(SOME)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME)


# ---- what is kept ----


def test_prompt_end_keeps_the_same_warm_hits_in_fewer_bytes(make_rig: MakeRig) -> None:
    rig = make_rig(options={"retention": "prompt_end"})
    rig.fill(SOME)
    groups = rig.truth.layout.groups
    dense = sum(g.page_bytes * (331 // g.tokens_per_block) for g in groups)
    full = sum(g.page_bytes for g in groups if g.kind == "full") * (331 // 32)
    windows = sum(g.page_bytes for g in groups if g.kind == "sliding") * 2  # two boundaries, one block each
    assert bytes_resident(rig) == len(SOME) * (full + windows) < len(SOME) * dense / 1.5
    assert_warm(rig)
    branched = rig.run(BRANCH)
    assert {r.external_hit_tokens for r in branched} == {0}, "no checkpoint lies before the branch"
    rig.assert_answers(branched, BRANCH)


@pytest.mark.parametrize("slack", [True, False])
def test_prompt_end_resumes_one_boundary_earlier_by_slack(make_rig: MakeRig, slack: bool) -> None:
    """A prompt that differs in its last tokens, past the last boundary but one."""
    rig = make_rig(options={"retention": "prompt_end"} | ({} if slack else {"retain_slack": False}))
    rig.fill(SOME)
    assert_warm(rig)
    rig.forget_locally()
    near = [prompt[:300] + BRANCH[0][-31:] for prompt in SOME[:2]]
    hits = [r.external_hit_tokens for r in rig.run(near, max_tokens=1)]
    assert hits == ([256, 256] if slack else [0, 0])


def test_prompt_end_keeps_one_checkpoint_at_the_end_of_the_generation(make_rig: MakeRig) -> None:
    rig = make_rig(options={"retention": "prompt_end", "retain_slack": False})
    rig.fill(TURN_1[:1], max_tokens=ANSWER_TOKENS)
    sliding = [g for g in rig.truth.layout.groups if g.kind == "sliding"]
    expected = set()
    for boundary in (320, 384):  # the prompt's last one, and that of 370 + 24 - 1 written tokens
        expected |= set(range(*needed_blocks(sliding[0], boundary)))
    pages = {g.name: g.pages for g in rig.side.store.stats().groups}
    assert {pages[g.name] for g in sliding} == {len(expected)}


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"retention": "prompt_end"}, 370 + ANSWER_TOKENS - 1),
        ({"retention": "prompt_end", "retain_generated": False}, 370),
        ({"retain_generated": False}, 370),
    ],
)
def test_generated_tokens_are_kept_or_not(make_rig: MakeRig, options: dict[str, Any], end: int) -> None:
    rig = make_rig(options=options)
    rig.fill(TURN_1, max_tokens=ANSWER_TOKENS)
    rig.forget_locally()
    turn_2 = rig.truth.turn_2
    warm = rig.run(turn_2)
    rig.assert_hits(warm, turn_2, end // 64 * 64)
    rig.assert_answers(warm, turn_2, drift=1e-5)


def test_shared_rows_serves_the_same_hits(make_rig: MakeRig) -> None:
    rig = make_rig(options={"group_partition": "shared_rows"})
    assert len(rig.side.store.arenas) == 1
    rig.fill(SOME)
    assert_warm(rig)
    assert all(r.external_hit_tokens == 192 for r in rig.run(BRANCH))


def test_half_the_working_set_evicts_and_stays_right(make_rig: MakeRig) -> None:
    """Every page of the four prompts is 1.9 MiB each; half of that fits."""
    rig = make_rig(options={"ram_bytes": "4MiB"})
    rig.fill(SOME)
    rig.forget_locally()
    warm = rig.run(SOME[::-1])
    assert sum(r.external_hit_tokens for r in warm) > 0
    assert sum(r.external_hit_tokens for r in warm) < sum(map(rig.truth.boundary, SOME))
    rig.assert_answers(warm, SOME[::-1], drift=1e-5)
    rig.engine.step_until_idle()
    assert sum(g.evictions for g in rig.side.store.stats().groups) > 0


def test_save_only_never_looks_up(make_rig: MakeRig) -> None:
    rig = make_rig(options={"mode": "save_only"})
    rig.fill(SOME)
    saved = rig.total("saved_pages")
    assert saved > 0
    rig.forget_locally()
    again = rig.fill(SOME)
    assert {r.external_hit_tokens for r in again} == {0}
    assert rig.total("lookups") == 0
    assert rig.total("saved_pages") == saved, "what is there is not written again"
    rig.assert_answers(again, SOME)


# ---- the engine's own options ----


def test_with_the_engines_prefix_caching_off(make_rig: MakeRig) -> None:
    rig = make_rig(enable_prefix_caching=False)
    rig.fill(SOME)
    warm = rig.run(SOME)  # nothing to forget: the engine holds nothing
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME)
    both = rig.run([SOME[0], SOME[0]], concurrency=2)
    rig.assert_hits(both, [SOME[0]] * 2)
    rig.assert_answers(both, [SOME[0]] * 2, drift=1e-5)
    rig.fill(TURN_1, max_tokens=ANSWER_TOKENS)
    turn_2 = rig.run(rig.truth.turn_2)
    lattice = rig.truth.layout.lattice_tokens
    rig.assert_hits(turn_2, rig.truth.turn_2, 393 // lattice * lattice)
    rig.assert_answers(turn_2, rig.truth.turn_2, drift=1e-5)


def test_prompt_computed_in_many_chunks(make_rig: MakeRig) -> None:
    rig = make_rig(max_num_batched_tokens=96)
    rig.fill(SOME, concurrency=3)
    rig.forget_locally()
    warm = rig.run(SOME)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME, drift=1e-5)


def test_ngram_speculation_is_served(make_rig: MakeRig) -> None:
    """Drafts without a cache of their own: rejected tokens are never saved."""
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    rig = make_rig("gemma3-mini", speculative_config=speculation)
    rig.fill(TURN_1, max_tokens=ANSWER_TOKENS)
    rig.forget_locally()
    warm = rig.run(rig.truth.turn_2)
    rig.assert_hits(warm, rig.truth.turn_2, 393 // 32 * 32)
    assert [r.tokens for r in warm] == [rig.truth.of(p).tokens for p in rig.truth.turn_2]


def write_adapter(folder: Path, seed: int) -> str:
    """A rank-4 adapter of plain-mini's query and value projections, large enough to change outputs."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], '
        '"task_type": "CAUSAL_LM", "bias": "none"}'
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = 0.3 * torch.randn(4, 128, generator=generator)
            tensors[f"{base}.lora_B.weight"] = 0.3 * torch.randn(width, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def test_adapters_are_separate(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig("plain-mini", enable_lora=True, max_lora_rank=8, max_loras=2)
    adapters = {
        name: LoRARequest(name, number, write_adapter(tmp_path / name, number))
        for number, name in enumerate(("a", "b"), start=1)
    }
    cold = {}
    for name in (None, "a", "b"):
        cold[name] = rig.fill(SOME[:2], lora_request=adapters.get(name or ""))
        assert {r.external_hit_tokens for r in cold[name]} == {0}, "KV of another adapter was served"
        rig.forget_locally()
    assert len({tuple(r.tokens for r in results) for results in cold.values()}) == 3
    for name in (None, "a", "b"):
        warm = rig.run(SOME[:2], lora_request=adapters.get(name or ""))
        rig.assert_hits(warm, SOME[:2])
        assert [(r.tokens, r.logprobs) for r in warm] == [(r.tokens, r.logprobs) for r in cold[name]]
        rig.forget_locally()


# ---- refused at start ----


def refused(options: Mapping[str, Any], error: type[KVQuiltError], *words: str, **more: Any) -> None:
    with pytest.raises(error) as caught:
        SchedulerHarness(GROUPS, num_blocks=64, extra_config=options, **more)
    for word in words:
        assert word in str(caught.value)


def test_bad_option_in_a_real_engine_leaves_nothing_running(keeper: Keeper, make_rig: MakeRig) -> None:
    keeper.close()
    with pytest.raises(ConfigError, match="'ram_byte'; did you mean 'ram_bytes'"):
        Engine("plain-mini", connector={"ram_byte": RAM_BYTES}, max_model_len=512)
    rig = make_rig("plain-mini", max_model_len=512)  # the next one starts
    rig.fill(SOME[:1])


def test_budgets_that_cannot_be(keeper: Keeper) -> None:
    keeper.close()
    refused({"ram_bytes": 1}, SizingError, "1", "least")
    refused({"ram_bytes": "10TiB"}, SizingError, str(10 << 40), "GiB", "available")
    refused({"ram_bytes": 0}, ConfigError, "ram_bytes", "at least 1")
    refused({"ram_bytes": "plenty"}, ConfigError, "ram_bytes", "plenty")


def test_role_that_only_saves_or_only_loads() -> None:
    transfer = {"kv_connector": "KVQuiltConnector", "kv_connector_module_path": "kvquilt.vllm"}
    for role in ("kv_producer", "kv_consumer"):
        with pytest.raises(ConfigError, match=f"kv_role='{role}'.*'kv_both'.*save_only"):
            Engine("plain-mini", connector={**transfer, "kv_role": role}, max_model_len=512)


def test_untested_version_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connector_module.vllm, "__version__", "0.99.1")
    with caplog.at_level(logging.WARNING, logger="kvquilt"):
        for _ in range(2):
            SchedulerHarness(GROUPS, num_blocks=64, extra_config={"ram_bytes": "1MiB"}).shutdown()
    warned = [
        r.getMessage()
        for r in caplog.records
        if re.search(r"tested with vLLM \S+, this is 0\.99\.1", r.getMessage())
    ]
    assert len(warned) == 1
