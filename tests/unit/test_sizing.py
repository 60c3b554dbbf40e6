"""Splitting a byte budget: vectors with their arithmetic, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from kvquilt.errors import SizingError
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.layout.catalog import ModelLayout, layout_from_config
from kvquilt.sizing import plan_slots

GIB = 1 << 30
ROW = 25_559_040  # a shared row of vectors 2 and 3


def full(block: int, page: int, name: str = "full", **more: Any) -> CacheGroup:
    return CacheGroup(name, kind="full", tokens_per_block=block, page_bytes=page, **more)


def win(block: int, page: int, window: int, name: str = "win", **more: Any) -> CacheGroup:
    return CacheGroup(name, kind="sliding", window=window, tokens_per_block=block, page_bytes=page, **more)


def state(block: int, page: int, name: str = "state") -> CacheGroup:
    return CacheGroup(name, kind="recurrent", tokens_per_block=block, page_bytes=page)


def test_vector_1_a_production_run() -> None:
    layout = CacheLayout([full(32, 32 * 10_240), win(16, 16 * 102_400, 1024)])
    loaded = 0
    for group in layout.groups:
        lo, hi = needed_blocks(group, 9984)
        loaded += (hi - lo) * group.page_bytes
    assert loaded == 207_093_760
    assert 200 * 312 == 62_400 == 200 * (9984 // 32)
    plan = plan_slots(layout, 224_919_552_000)
    assert plan.bytes_used == 224_919_552_000
    assert plan.tokens == 224_919_552_000 // 112_640 == 200 * 9984
    stored_per_loaded = 112_640 * 9984 / 207_093_760
    assert stored_per_loaded == pytest.approx(5.43, abs=0.005)


def drafted(num_states: int, drafter: Fraction = Fraction(2, 15)) -> CacheLayout:
    """Target and states of 1,664-token blocks in full rows; a drafter of 832-token blocks."""
    states = [state(1664, ROW, f"state.{i}") for i in range(num_states)]
    return CacheLayout([full(1664, ROW, "target"), full(832, int(ROW * drafter), "drafter"), *states])


def test_vector_2_a_drafter_with_half_size_blocks() -> None:
    """Exact pages against shared rows: 2.02 times fewer bytes a token at 0.43 states a block."""
    states_per_block = Fraction(43, 100)
    interval = int(1664 / states_per_block)
    exact = plan_slots(drafted(1), 64 * GIB, interval)
    rows = plan_slots(drafted(1), 64 * GIB, interval, partition="shared_rows")
    assert 64 * GIB / exact.tokens == pytest.approx(26_100, rel=0.005)
    assert 64 * GIB / rows.tokens == pytest.approx(52_700, rel=0.005)
    assert exact.tokens / rows.tokens == pytest.approx(2.02, abs=0.01)
    assert exact.slots["drafter"] == 2 * exact.slots["target"]
    for filled, ratio in ((Fraction(24, 100), 1.8), (Fraction(3, 100), 2.3)):
        tokens = plan_slots(drafted(1, filled), 64 * GIB, interval).tokens
        assert tokens / rows.tokens == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize(
    ("gib", "tokens", "slots"),
    [(64, 2_723_968, (1637, 3274, 205, 205, 205)), (8, 337_792, (203, 406, 26, 26, 26))],
)
def test_vector_3_slots(gib: int, tokens: int, slots: tuple[int, ...]) -> None:
    plan = plan_slots(drafted(3), gib * GIB, 8 * 1664)
    assert plan.tokens == tokens
    assert tuple(plan.slots.values()) == slots
    left = gib * GIB - plan.bytes_used
    assert 0 <= left < sum(plan.slot_bytes.values())
    if gib == 64:
        assert left == 3_145_728


def test_vector_3_equal_spans_are_the_single_span_formula() -> None:
    groups = [full(32, 4096 * 3, "a"), full(32, 4096, "b"), state(32, 8192), win(32, 4096 * 5, 320)]
    for budget in (10**6, 10**7, 123_456_789):
        plan = plan_slots(CacheLayout(groups), budget)
        blocks = budget // (4096 * (3 + 1 + 2 + 5))
        assert plan.tokens == blocks * 32
        assert set(plan.slots.values()) == {blocks}


def gemma3_27b() -> ModelLayout:
    return layout_from_config(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "dtype": "bfloat16",
        }
    )


def gemma4_31b() -> ModelLayout:
    return layout_from_config(
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "dtype": "bfloat16",
        }
    )


def gpt_oss_120b() -> ModelLayout:
    return layout_from_config(
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "dtype": "bfloat16",
        }
    )


def qwen3_next_80b(state_dtype: str) -> ModelLayout:
    return layout_from_config(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "dtype": "bfloat16",
        },
        state_dtype=state_dtype,
    )


def llama4_scout() -> ModelLayout:
    return layout_from_config(
        {
            "model_type": "llama4_text",
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "dtype": "bfloat16",
        }
    )


@pytest.mark.parametrize(
    ("model", "per_token", "checkpoint_mib", "in_tokens"),
    [
        (gemma3_27b(), 81_920, 416, 5325),
        (gemma4_31b(), 81_920, 800, 10_240),
        (gpt_oss_120b(), 36_864, 4.5, 128),
        (qwen3_next_80b("bfloat16"), 24_576, 37.7, 1608),
        (qwen3_next_80b("float32"), 24_576, 73.7, 3144),
        (llama4_scout(), 49_152, 0, 0),
    ],
)
def test_vectors_4_and_5_checkpoints(
    model: ModelLayout, per_token: int, checkpoint_mib: float, in_tokens: int
) -> None:
    layout = model.layout
    boundary = layout.lattice_tokens * 8192
    checkpoint = 0
    dense = Fraction(0)
    for group in layout.groups:
        lo, hi = needed_blocks(group, boundary)
        if group.dense:
            dense += Fraction(group.page_bytes, group.tokens_per_block)
        else:
            checkpoint += (hi - lo) * group.page_bytes
    assert dense == per_token
    assert checkpoint / (1 << 20) == pytest.approx(checkpoint_mib, abs=0.05)
    assert checkpoint / per_token == pytest.approx(in_tokens, abs=1)


def test_vector_6_states_are_stored_without_the_engines_padding() -> None:
    """Content 30 % and 82 % of the engine's page; slots take the content."""
    plan = plan_slots(CacheLayout([full(128, 65_536), state(128, 19_840, "mamba")]), GIB, 4096)
    assert plan.slot_bytes["mamba"] == 20_480 < 65_536
    plan = plan_slots(CacheLayout([full(640, 327_680), state(640, 268_288, "gdn")]), GIB, 6400)
    assert plan.slot_bytes["gdn"] == 270_336 < 327_680


def test_slots_hold_all_ranks_in_whole_disk_blocks() -> None:
    layout = CacheLayout([full(16, 5000)])
    assert plan_slots(layout, GIB).slot_bytes == {"full": 8192}
    assert plan_slots(layout, GIB, num_ranks=4).slot_bytes == {"full": 20_480}
    assert plan_slots(layout, GIB, num_ranks=4).num_ranks == 4


def test_groups_that_store_nothing_get_no_arena() -> None:
    scratch = CacheGroup("scratch", kind="scratch", tokens_per_block=5, page_bytes=100)
    plan = plan_slots(CacheLayout([full(16, 4096), full(32, 0, "empty"), scratch]), 1 << 20)
    assert plan.slots == {"full": 256, "empty": 0, "scratch": 0}
    assert plan.slot_bytes == {"full": 4096, "empty": 0, "scratch": 0}


def test_b77_layers_that_share_anothers_kv_cost_nothing() -> None:
    """A drafter whose layers all read the target's KV adds nothing and is no error."""
    with_draft = CacheLayout([full(16, 4096), full(16, 0, "draft.full", draft=True)])
    alone = CacheLayout([full(16, 4096)])
    assert plan_slots(with_draft, 1 << 20).tokens == plan_slots(alone, 1 << 20).tokens


def test_b27_the_parts_never_exceed_the_budget() -> None:
    layout = CacheLayout([full(16, 90 * 4096), state(16, 10 * 4096)])
    plan = plan_slots(layout, 64 * 4096 * 100)
    assert plan.bytes_used == sum(plan.slots[n] * plan.slot_bytes[n] for n in plan.slots) <= 64 * 4096 * 100
    assert plan.slots == {"full": 64, "state": 64}  # in the proportion of their pages


def test_a_checkpoint_may_need_the_whole_chunk_wherever_the_interval_falls() -> None:
    """Checkpoints are where prompts end, not at multiples of the interval."""
    local = CacheGroup("local", kind="chunked", chunk=8192, tokens_per_block=16, page_bytes=4096)
    layout = CacheLayout([full(16, 4096), local])
    plan = plan_slots(layout, GIB, 16_384)
    assert plan.slots["local"] == -(-plan.tokens * 511 // 16_384)
    assert plan_slots(layout, GIB, 2048).slots["local"] == plan_slots(layout, GIB, 2048).slots["full"]


def test_a_chunk_that_every_boundary_starts_anew_costs_one_slot() -> None:
    local = CacheGroup("local", kind="chunked", chunk=16, tokens_per_block=16, page_bytes=4096)
    assert plan_slots(CacheLayout([full(16, 4096), local]), GIB).slots["local"] == 1


def test_a_budget_below_one_boundary_names_the_group_and_the_least() -> None:
    layout = CacheLayout([full(32, 1 << 20), win(16, 1 << 19, 1024)])
    with pytest.raises(SizingError) as refused:
        plan_slots(layout, 1)
    least = (1 << 20) + 64 * (1 << 19)
    assert "cache group 'win' alone needs 64 slots of 524288 bytes" in str(refused.value)
    assert f"the least budget that works is {least} bytes" in str(refused.value)
    assert plan_slots(layout, least).tokens >= 32
    with pytest.raises(SizingError):
        plan_slots(layout, least - 1)


@pytest.mark.parametrize(
    "given",
    [
        {"budget_bytes": 0},
        {"budget_bytes": -1},
        {"budget_bytes": 1.5},
        {"checkpoint_interval": 0},
        {"checkpoint_interval": True},
        {"num_ranks": 0},
        {"partition": "elastic"},
        {"slot_alignment": 0},
    ],
)
def test_bad_arguments_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(SizingError, match=next(iter(given))):
        plan_slots(CacheLayout([full(16, 4096)]), **{"budget_bytes": GIB, **given})


def test_a_layout_that_never_fills_is_refused() -> None:
    with pytest.raises(SizingError, match="nothing to size"):
        plan_slots(CacheLayout([full(16, 0)]), GIB)


def test_huge_budgets_stay_exact() -> None:
    plan = plan_slots(CacheLayout([full(16, 4096), win(48, 4096 * 7, 1000)]), 10 << 60, 12_345)
    left = (10 << 60) - plan.bytes_used
    assert 0 <= left < 4096 * 8
