"""The harness itself: the plain engine passes it, an honest connector passes it with real hits,
and every lie is caught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.dict_connector import LIES, STORES, DictConnector
from harness.helpers import FULL_AND_SLIDING, LAYOUTS, dict_harness, plain, tokens
from kvquilt.layout import needed_blocks
from kvquilt.testing.harness_records import Hang, LeakError
from kvquilt.testing.sim_memory import StrayWrite
from kvquilt.testing.sim_model import WrongKV
from kvquilt.testing.sim_shapes import GroupShape, HarnessError


@pytest.fixture(autouse=True)
def empty_stores() -> Iterator[None]:
    STORES.clear()
    yield
    STORES.clear()


RUNNERS: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1 async": {"async_scheduling": True},
    "v2 async": {"runner": "v2", "async_scheduling": True},
    "two ranks": {"num_ranks": 2},
}


def per_layout_and_runner() -> list[Any]:
    """Every layout with the first runner, and three layouts with every runner."""
    chosen = ("full 32 + sliding 16", "states, two windows, full last", "draft full")
    return [
        pytest.param(groups, options, id=f"{name}-{runner}")
        for name, groups in LAYOUTS.items()
        for runner, options in RUNNERS.items()
        if runner == "v1" or name in chosen
    ]


@pytest.mark.parametrize(("groups", "options"), per_layout_and_runner())
def test_plain_engine_passes(groups: list[GroupShape], options: dict[str, Any]) -> None:
    """Prefix hits and chunked prefill of the engine alone are sound, for every layout."""
    with plain(groups, num_blocks=100, max_num_batched_tokens=150, retention_interval=None, **options) as h:
        prefix = tokens(1, 300)
        for turn in range(2):
            for number in range(4):
                h.add(prefix[: 100 * number] + tokens(10 * turn + number, 60), max_tokens=18)
            h.run_until_idle(max_steps=2_000)
        records = list(h.requests.values())
        h.check_idle()
    assert [(r.finish_reason, len(r.output)) for r in records] == [("length", 18)] * 8
    assert max(r.local_hit for r in records) > 0
    assert h.num_steps > 2 * (18 + 60 * 4 // 150)


@pytest.mark.parametrize("options", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize(
    ("layout", "num_blocks"),
    [
        ("full", 40),
        ("full 16 + sliding 64", 40),
        ("two full", 40),
        ("full + chunked", 40),
        ("draft full", 80),
    ],
)
def test_plain_engine_passes_under_preemption(layout: str, num_blocks: int, options: dict[str, Any]) -> None:
    limits: dict[str, Any] = {"max_num_batched_tokens": 150, "retention_interval": None}
    with plain(LAYOUTS[layout], num_blocks=num_blocks, **limits, **options) as h:
        prefix = tokens(1, 300)
        for turn in range(2):
            for number in range(4):
                h.add(prefix[: 100 * number] + tokens(10 * turn + number, 60), max_tokens=40)
            h.run_until_idle(max_steps=2_000)
        h.check_idle()
        assert [len(r.output) for r in h.requests.values()] == [40] * 8
        assert any(a.preempted for r in h.requests.values() for a in r.admissions)


def test_without_prefix_caching_nothing_is_hit() -> None:
    with plain(FULL_AND_SLIDING, enable_prefix_caching=False) as h:
        for _ in range(2):
            h.add(tokens(1, 500), max_tokens=3)
            h.run_until_idle()
        h.check_idle()
        assert [r.local_hit for r in h.requests.values()] == [0, 0]


def test_a_request_may_hit_blocks_that_the_same_step_fills() -> None:
    with plain(LAYOUTS["full"]) as h:
        first, second = h.add(tokens(1, 200)), h.add(tokens(1, 200))
        assert h.run_until_idle() <= 2
        assert (first.local_hit, second.local_hit) == (0, 192)


def test_salts_do_not_share() -> None:
    with plain(FULL_AND_SLIDING) as h:
        for salt in ("x", "y", "x", None):
            h.add(tokens(1, 200), cache_salt=salt)
            h.run_until_idle()
        assert [r.local_hit for r in h.requests.values()] == [0, 0, 192, 0]


def test_preempt_abort_and_reset_by_hand() -> None:
    with plain(FULL_AND_SLIDING, async_scheduling=True) as h:
        kept, aborted, mid_step = (h.add(tokens(n, 300), max_tokens=20) for n in range(3))
        for _ in range(5):
            h.step()
        assert h.preempt(kept.id)
        assert not h.preempt(kept.id)
        h.abort(aborted.id)
        h.abort(mid_step.id, mid_step=True)
        h.step()
        h.step()
        assert h.reset_prefix_cache(reset_running_requests=True)
        h.run_until_idle()
        h.check_idle()
        assert [r.finish_reason for r in h.requests.values()] == ["length", "abort", "abort"]
        assert len(kept.output) == 20
        assert [a.preempted for a in kept.admissions] == [False, True, True]


def test_ids_may_be_used_again() -> None:
    with plain(LAYOUTS["full"]) as h:
        for seed in (1, 2):
            record = h.add(tokens(seed, 50), max_tokens=2, id="same")
            h.run_until_idle()
            assert record.finish_reason == "length"
        h.add(tokens(3, 50), id="same")
        with pytest.raises(ValueError, match="has not ended"):
            h.add(tokens(3, 50), id="same")


def test_pause_holds_new_requests_back() -> None:
    with plain(LAYOUTS["full"]) as h:
        record = h.add(tokens(1, 50))
        h.pause("new")
        assert not h.step()
        assert record.finish_reason is None
        h.pause("none")
        h.run_until_idle()
        assert record.finish_reason == "length"


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize(("groups", "options"), per_layout_and_runner())
def test_honest_connector_passes_with_hits(
    groups: list[GroupShape], options: dict[str, Any], sync: bool
) -> None:
    # The engine hands over states where a chunk of prefill ended and its retention keeps one.
    limits: dict[str, Any] = {"max_num_batched_tokens": 150, "retention_interval": None}
    with dict_harness(groups, extra={"sync": sync}, **limits, **options) as h:
        prompt = tokens(1, 700)
        first = h.add(prompt, max_tokens=20)
        h.run_until_idle()
        assert h.reset_prefix_cache()
        second = h.add(prompt, max_tokens=20)
        h.run_until_idle()
        # The dict holds everything, so the hit is the longest that leaves a token (and, with a
        # draft group, the block after it).
        layout = h.connector.layout
        assert second.external_hit in (longest := layout.max_boundary(700), longest - layout.lattice_tokens)
        third = h.add(prompt[:400] + tokens(2, 300), max_tokens=5)
        h.run_until_idle()
        assert third.local_hit + third.external_hit > 0
        h.check_idle()
    assert (first.external_hit, second.local_hit) == (0, 0)
    assert first.output == second.output
    assert all(connector.shut for connector in [h.connector, *h.worker_connectors])


def test_store_outlives_an_engine() -> None:
    for expected in (0, 672):
        with dict_harness(FULL_AND_SLIDING, extra={"store": "kept"}) as h:
            record = h.add(tokens(1, 700))
            h.run_until_idle()
            assert record.external_hit == expected


def test_connector_under_preemption() -> None:
    with dict_harness(FULL_AND_SLIDING, num_blocks=60, max_num_batched_tokens=200) as h:
        for number in range(6):
            h.add(tokens(1, 100) + tokens(number, 100), max_tokens=120)
        h.run_until_idle()
        h.check_idle()
        again = [a for r in h.requests.values() for a in r.admissions if a.preempted]
        assert any(a.external for a in again)


def test_a_failed_load_is_recomputed() -> None:
    with dict_harness(FULL_AND_SLIDING, extra={"fail_loads": 1}) as h:
        for _ in range(2):
            record = h.add(tokens(1, 500), max_tokens=3)
            h.run_until_idle()
            h.reset_prefix_cache()
        h.check_idle()
        assert [a.external for a in record.admissions] == [480, 0]
        assert record.external_hit == 0
        assert record.finish_reason == "length"


def test_a_failed_load_can_end_the_request() -> None:
    with dict_harness(FULL_AND_SLIDING, extra={"fail_loads": 1}, load_failure_policy=None) as h:
        for _ in range(2):
            record = h.add(tokens(1, 500), max_tokens=3)
            h.run_until_idle()
            h.reset_prefix_cache()
        h.check_idle()
        assert record.finish_reason == "error"


@pytest.mark.parametrize("runner", ["v1", "v1-deferred", "v2"])
def test_multi_connector(runner: Any) -> None:
    other = {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": "harness.dict_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "other"},
    }
    with dict_harness(FULL_AND_SLIDING, multi_connector=[other], runner=runner) as h:
        for _ in range(2):
            record = h.add(tokens(1, 500), max_tokens=3)
            h.run_until_idle()
            h.reset_prefix_cache()
        h.check_idle()
        assert record.external_hit == 480
        assert type(h.connector).__name__ == "MultiConnector"
        assert len(STORES["other"]) > 0


def test_reset_of_the_connector() -> None:
    with dict_harness(FULL_AND_SLIDING) as h:
        for _ in range(2):
            record = h.add(tokens(1, 500), max_tokens=3)
            h.run_until_idle()
            assert h.reset_prefix_cache(reset_connector=True)
        assert (record.local_hit, record.external_hit) == (0, 0)


def repeat(layout: str, lie: str | None, lie_group: int) -> None:
    """One prompt twice, the engine forgetting in between; a lie about one group only."""
    options: dict[str, Any] = {"extra": {"lie_group": lie_group}, "num_ranks": 2}
    limits: dict[str, Any] = {"retention_interval": None, "max_num_batched_tokens": 150}
    with dict_harness(LAYOUTS[layout], lie, **options, **limits) as h:
        for _ in range(2):
            h.add(tokens(1, 400), max_tokens=3)
            h.run_until_idle()
            h.reset_prefix_cache()
        h.check_idle()


@pytest.mark.parametrize("lie", [None, "wrong bytes", "no bytes", "wrong block", "wrong rank"])
@pytest.mark.parametrize("group", range(4))
def test_a_lie_about_any_one_group_is_caught(group: int, lie: str | None) -> None:
    if lie is None:
        repeat("states, two windows, full last", lie, group)
        return
    # A write to the wrong block may hurt another group first.
    named = "rank" if lie == "wrong block" else f"group {group} "
    with pytest.raises(HarnessError, match=named):
        repeat("states, two windows, full last", lie, group)


def lied_to(lie: str | None) -> list[int]:
    """Prompts that part inside a block and at a boundary, each twice, the engine forgetting in
    between; prefill in chunks, so that blocks fill up over several steps and windows move on."""
    groups = LAYOUTS["draft sliding"] if lie == "no peek" else FULL_AND_SLIDING
    num_ranks = 2 if lie == "wrong rank" else 1
    with dict_harness(groups, lie, num_ranks=num_ranks, max_num_batched_tokens=150) as h:
        base = tokens(1, 400)
        for prompt in (base, base[:276] + tokens(2, 124), base[:288] + tokens(3, 112)):
            for _ in range(2):
                h.add(prompt, max_tokens=3)
                h.run_until_idle(stall_seconds=0.05)
                h.reset_prefix_cache()
        h.check_idle()
        return [r.external_hit for r in h.requests.values()]


CAUGHT: dict[str, type[HarnessError]] = {
    "null block": StrayWrite,
    "blocks kept": Hang,
    "never reports": Hang,
    "wrong block": HarnessError,
}


@pytest.mark.parametrize("lie", LIES)
def test_every_lie_is_caught(lie: str) -> None:
    with pytest.raises(CAUGHT.get(lie, WrongKV)):
        lied_to(lie)


def test_without_a_lie_nothing_is_caught() -> None:
    assert lied_to(None) == [0, 384, 256, 384, 288, 384]


def test_memory_that_nobody_holds_is_watched() -> None:
    with plain(FULL_AND_SLIDING) as h:
        h.add(tokens(1, 100))
        h.run_until_idle()
        h.check_idle()
        free = next(b for b in h.block_pool.blocks[1:] if b.block_hash is None)
        h.engine.workers[0].memory.layers[0].tensor[free.block_id].zero_()
        with pytest.raises(StrayWrite, match=f"block {free.block_id}, which nobody holds"):
            h.check_idle()


def test_a_held_block_is_a_leak() -> None:
    with plain(FULL_AND_SLIDING) as h:
        h.add(tokens(1, 100))
        h.run_until_idle()
        block = h.block_pool.blocks[7]
        h.block_pool.touch([block])
        with pytest.raises(LeakError, match=r"blocks still held: \[7\]"):
            h.check_idle()


def test_a_request_that_is_left_is_a_leak() -> None:
    with plain(FULL_AND_SLIDING) as h:
        h.add(tokens(1, 100))
        with pytest.raises(LeakError, match="requests or steps are left"):
            h.check_idle()


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_the_model_reads_what_the_layout_says_is_needed(groups: list[GroupShape]) -> None:
    """The model's rule and the product's agree on every boundary, from two different sources."""
    with dict_harness(groups) as h:
        for index, group in enumerate(h.connector.layout.groups):
            for end in range(0, 1_000, group.tokens_per_block):
                lo, hi = needed_blocks(group, end)
                first_block = groups[index].first_read(end) // group.tokens_per_block
                if lo < hi and not groups[index].extra_tokens:
                    assert (lo, hi) == (first_block, end // group.tokens_per_block)
                elif lo == hi and end:
                    assert groups[index].first_read(end) >= end


@pytest.mark.parametrize(
    ("field", "value"), [("bytes_per_token", 12), ("window", 4), ("num_layers", 0), ("tokens_per_block", 0)]
)
def test_impossible_shapes_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        GroupShape("full", **{"tokens_per_block": 16, field: value})


def test_the_connector_is_the_real_class_in_both_roles() -> None:
    with dict_harness(FULL_AND_SLIDING, num_ranks=2) as h:
        assert [type(c) for c in [h.connector, *h.worker_connectors]] == [DictConnector] * 3
        assert [c.rank for c in h.worker_connectors] == [0, 1]
