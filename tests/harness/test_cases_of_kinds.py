"""Field cases that need recurrent, chunked, latent or draft groups, and those about capacity and speed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from harness.connector_support import Quilt, chunked, full, latent, sliding, states, tokens
from harness.test_all_kinds import loaded, withdraw
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.sizing import plan_slots
from kvquilt.testing.sim_shapes import GroupShape

STEP_256: dict[str, Any] = {"max_num_batched_tokens": 256, "retention_interval": None}
STATES_256 = [full(256), states(256, 256)]


def serve_and_forget(q: Quilt, prompt: list[int], **more: Any) -> Any:
    record = q.serve(prompt, **more)
    q.forget()
    return record


# ---- (a) wrong hit length ----


@pytest.mark.parametrize(("length", "hit"), [(512, 256), (513, 512)])
def test_b7_a_state_that_holds_the_last_token_is_not_replayed(length: int, hit: int) -> None:
    """B7: states at 256 and 512 are kept; a prompt of 512 tokens resumes at 256, never at 512 or 511."""
    with Quilt(STATES_256, **STEP_256) as q:
        prompt = tokens(1, 600)
        serve_and_forget(q, prompt)
        assert q.saved_blocks(prompt, 1) == [0, 1]
        assert q.serve(prompt[:length], max_tokens=3).external_hit == hit
        q.check_end()


def test_b8_only_the_state_at_the_end_of_a_chunk_is_real() -> None:
    """B8 (i)-(iii): 1,024 tokens in one chunk leave one state; a branch at 769 finds none."""
    with Quilt(STATES_256, retention_interval=None) as q:
        prompt = tokens(1, 1025)
        serve_and_forget(q, prompt)
        assert q.saved_blocks(prompt, 1) == [3]
        branch = prompt[:769] + tokens(2, 200)
        assert serve_and_forget(q, branch, skip_reading_prefix_cache=False).external_hit == 0
        assert q.serve(prompt[:1024] + tokens(3, 1)).external_hit == 1024
        q.check_end()


@pytest.mark.parametrize(("length", "hit"), [(8192, 6144), (8193, 8192)])
def test_b8_one_token_short_of_a_boundary(length: int, hit: int) -> None:
    """B8 (iv): 8,191 is never a legal answer."""
    options: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_model_len": 16_384}
    with Quilt([full(2048), states(2048, 256)], retention_interval=None, **options) as q:
        prompt = tokens(1, 8200)
        serve_and_forget(q, prompt)
        assert q.saved_blocks(prompt, 1) == [0, 1, 2, 3]
        assert q.serve(prompt[:length]).external_hit == hit
        q.check_end()


def test_b9_attention_without_its_state_is_no_hit() -> None:
    with Quilt([full(16), states(16, 64)]) as q:
        prompt = tokens(1, 200)
        serve_and_forget(q, prompt)
        withdraw(q, prompt, 1)
        assert len(q.saved_blocks(prompt, 0)) == 12
        assert q.serve(prompt).external_hit == 0
        q.check_end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_b10_a_shared_prefix_of_a_hybrid_on_several_ranks(num_ranks: int) -> None:
    """B10: prompts share three blocks, where the first left its last state; each rank gets its own back."""
    with Quilt([full(160), states(160, 512)], num_ranks=num_ranks, max_num_batched_tokens=160) as q:
        base = tokens(1, 480)
        cold = []
        for tail in (2, 3, 4):
            cold.append(serve_and_forget(q, base + tokens(tail, 70), max_tokens=5))
        assert [record.external_hit for record in cold] == [0, 480, 480]
        warm = serve_and_forget(q, base + tokens(2, 70), max_tokens=5)
        assert warm.external_hit == 480
        assert warm.output == cold[0].output
        q.check_end()


@pytest.mark.parametrize(("kept", "hit"), [({4}, 10), (set(), 8)])
def test_b71_at_a_chunk_start_nothing_local_is_needed(kept: set[int], hit: int) -> None:
    """B71: chunk 8, block 2, 14 tokens; a window of 8 would answer 0 in the first case."""
    with Quilt([full(2), chunked(2, 8)]) as q:
        prompt = tokens(1, 14)
        serve_and_forget(q, prompt)
        withdraw(q, prompt, 1, kept)
        assert set(q.saved_blocks(prompt, 0)) >= set(range(6))
        assert q.serve(prompt).external_hit == hit
        q.check_end()


def test_b72_pages_of_three_sizes_that_do_not_divide() -> None:
    """B72: 1,000, 1,536 and 4,096 bytes; each has slots of its own, no common multiple is needed."""
    groups = [states(64, 1000), full(64, bytes_per_token=24), sliding(64, 100, bytes_per_token=64)]
    with Quilt(groups, num_ranks=2) as q:
        assert [group.page_bytes for group in q.layout.groups] == [1000, 1536, 4096]
        serve_and_forget(q, tokens(1, 700))
        assert q.serve(tokens(1, 700), max_tokens=3).external_hit == 640
        q.check_end()


@pytest.mark.parametrize("draft", [True, False])
def test_b74_a_drafter_in_a_group_of_its_own_or_not_flagged(draft: bool) -> None:
    """B74: both forms of a drafter register and are served."""
    groups = [full(32), sliding(32, 40), full(32, draft=draft, drafter="mtp", bytes_per_token=16)]
    with Quilt(groups, speculation="mtp") as q:
        serve_and_forget(q, tokens(1, 300))
        assert q.serve(tokens(1, 300), max_tokens=5).external_hit >= 256
        q.check_end()


# ---- (b) capacity ----


def test_b28_the_bytes_of_a_state_are_kept_and_not_what_they_are_padded_to() -> None:
    """B28: 274,432 bytes of state in a page of 536,576: 51 % of it is moved and stored."""
    content, padded = 274_432, 536_576
    groups = [full(512, bytes_per_token=1048), states(512, content, padded_bytes=padded)]
    assert groups[0].layer_page_bytes(0) == padded
    with Quilt(groups, ram_bytes="64MiB", num_blocks=20) as q:
        serve_and_forget(q, tokens(1, 600))
        assert q.serve(tokens(1, 600)).external_hit == 512
        assert q.count("saved_bytes", "recurrent") == q.count("loaded_bytes", "recurrent") == content
        assert q.side.plan.slot_bytes["recurrent"] == content  # a multiple of 4 KiB as it is
        q.check_end()


@pytest.mark.parametrize(("length", "hit"), [(7_000, 0), (8_000, 7_808), (15_617, 15_616)])
def test_b29_blocks_of_7808_tokens(length: int, hit: int) -> None:
    """B29: a prompt below the first block costs no bytes and hits nothing."""
    groups = [full(7808), *[states(7808, 64 * n) for n in range(1, 6)]]
    options: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_model_len": 32_768, "num_blocks": 60}
    with Quilt(groups, ram_bytes="16MiB", **options) as q:
        serve_and_forget(q, tokens(1, length))
        assert (sum(q.pages().values()) == 0) == (hit == 0)
        assert q.serve(tokens(1, length)).external_hit == hit
        q.check_end()


def test_b31_under_the_lattice_of_4096_a_prompt_of_2048_finds_nothing() -> None:
    """B31 (i): what finer states and a finer lattice would gain is 1,920 tokens; see limits."""
    layout = CacheLayout(
        [CacheGroup(str(t), kind="full", tokens_per_block=t, page_bytes=8) for t in (128, 4096, 32, 2, 8)]
    )
    assert layout.lattice_tokens == 4096
    assert layout.max_boundary(2048) == 0
    assert 2047 // 128 * 128 == 1920


def gemma_like() -> CacheLayout:
    window = {"kind": "sliding", "window": 1024, "tokens_per_block": 16, "page_bytes": 10 * 16 * 16_384}
    groups = [CacheGroup(f"window{i}", **window) for i in range(5)]  # type: ignore[arg-type]
    return CacheLayout(
        [*groups, CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=10 * 16 * 8192)]
    )


def test_b35_windows_are_not_priced_as_full_layers() -> None:
    """B35: 50 window layers and 10 full ones at 8,192 tokens: 1,440 MiB, not 7,040; 27.1 %."""
    layout = gemma_like()
    needed = {g.name: np.subtract(*needed_blocks(g, 8192)[::-1]) for g in layout.groups}
    assert sum(int(needed[g.name]) * g.page_bytes for g in layout.groups) == 1440 << 20
    assert sum(8192 // g.tokens_per_block * g.page_bytes for g in layout.groups) == 7040 << 20
    layer_tokens = sum(int(needed[g.name]) * 16 * 10 for g in layout.groups)
    assert Fraction(layer_tokens, 60 * 8192) == Fraction(133_120, 491_520)
    plan = plan_slots(layout, 64 << 30, checkpoint_interval=8192)
    assert plan.tokens > 3 * (64 << 30) // (7040 << 20) * 8192


def test_b36_covered_tokens_are_not_divided_by_the_number_of_groups() -> None:
    """B36: three state groups with a checkpoint in 16,384 tokens cost a few slots, not three quarters."""
    groups = [CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=4096)]
    groups += [CacheGroup(f"s{i}", kind="recurrent", tokens_per_block=16, page_bytes=4096) for i in range(3)]
    plan = plan_slots(CacheLayout(groups), 1200 * 4096, checkpoint_interval=19_152)
    assert (plan.tokens, plan.slots) == (19_152, {"full": 1197, "s0": 1, "s1": 1, "s2": 1})


# ---- (h) performance ----


def test_b88_prefixes_seen_once_are_all_found_again() -> None:
    """B88: five prompts, each more than half of the engine's pool; what the engine evicts is here."""
    with Quilt([full(32), states(32, 64), sliding(32, 50)], num_blocks=60) as q:
        prompts = [tokens(n, 900) for n in range(5)]
        for prompt in prompts:
            assert q.serve(prompt).external_hit == 0
        for prompt in prompts:
            record = q.serve(prompt)
            assert record.local_hit + record.external_hit == 896
        assert q.count("hit_tokens") >= 4 * 896
        q.check_end()


@pytest.mark.parametrize(("kept", "hit"), [({0, 1, 2, 3}, 1024), ({0, 2, 3}, 1024), ({0}, 256), (set(), 0)])
def test_b89_a_lost_state_strands_only_its_own_boundary(kept: set[int], hit: int) -> None:
    """B89: four states 256 tokens apart; losing an inner one costs nothing, and KV behind the last
    usable state never counts."""
    with Quilt(STATES_256, **STEP_256) as q:
        prompt = tokens(1, 1100)
        serve_and_forget(q, prompt)
        withdraw(q, prompt, 1, kept)
        assert len(q.saved_blocks(prompt, 0)) == 4
        assert q.serve(prompt).external_hit == hit
        q.check_end()


def test_b91_equal_groups_load_and_look_up_side_by_side() -> None:
    """B91: four equal chunked groups cost one look-up, one lease and one load job, as one would."""
    groups = [full(16), *[chunked(16, 64, num_layers=n) for n in range(1, 5)]]
    with Quilt(groups) as q:
        prompt = tokens(1, 700)
        serve_and_forget(q, prompt)
        look_ups, job = q.count("lookups"), q.side.loads._next_job
        assert q.serve(prompt).external_hit == 688
        assert (q.count("lookups") - look_ups, q.side.loads._next_job - job) == (1, 1)
        names = [group.name for group in q.layout.groups]
        assert loaded(q) == {names[0]: 43, **dict.fromkeys(names[1:], 3)}
        q.check_end()


# ---- the whole life ----


def test_failed_loads_of_several_requests_do_not_wait_for_each_other() -> None:
    """vLLM takes a failed load's blocks back when that request's turn comes. With several, the first
    may find no room because of the others: it must not stop the engine from reaching those."""
    with Quilt([full(16), sliding(16, 64)], num_blocks=46, max_num_batched_tokens=64) as q:
        prompts = [tokens(n, 200) for n in range(3)]
        for prompt in prompts:
            serve_and_forget(q, prompt)
        q.fault_at_next("silent", jobs=3)
        records = [q.add(prompt[:199] + tokens(50 + n, 150)) for n, prompt in enumerate(prompts)]
        for _ in range(3):
            q.step()
        q.side.reset()  # all loads under way are failed at once
        q.heal()
        q.run()
        assert [record.finish_reason for record in records] == ["length"] * 3
        q.check_end()


@pytest.mark.parametrize("chunk", [64, 96, 160, 2048])
def test_every_size_of_prefill_chunks(chunk: int) -> None:
    """States are left at other places, but what is kept is right, and the last one is there."""
    with Quilt([full(32), states(32, 64), sliding(32, 50)], max_num_batched_tokens=chunk) as q:
        first = serve_and_forget(q, tokens(1, 500), max_tokens=40)
        again = q.serve(tokens(1, 500), max_tokens=40)
        assert (again.external_hit, again.output) == (480, first.output)
        q.check_end()


def test_latent_and_indexer_caches_of_a_layer_are_two_groups_under_two_names() -> None:
    """A layer with two caches; and a scratch group between them keeps its place."""
    groups = [
        latent(32, num_layers=2, bytes_per_token=24),
        GroupShape("ring", 32),
        latent(32, num_layers=2, beside=0, bytes_per_token=16),
    ]
    with Quilt(groups, num_ranks=2) as q:
        layers = [group.layers for group in q.layout.groups]
        assert layers[0] == ("model.layers.0.0.attn", "model.layers.0.1.attn")
        assert layers[2] == ("model.layers.0.0.indexer.k_cache", "model.layers.0.1.indexer.k_cache")
        serve_and_forget(q, tokens(1, 200))
        assert q.serve(tokens(1, 200), max_tokens=4).external_hit == 192
        q.check_end()
