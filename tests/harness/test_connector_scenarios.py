"""What the connector is for: hits over groups of any kind, with the pages of each and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.connector_support import LAYOUTS, Quilt, full, sliding, tokens
from kvquilt.testing.faults import MethodFault

FULL_AND_SLIDING = LAYOUTS["full 32 + sliding 16"]
ENGINES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2 async, two ranks": {"runner": "v2", "async_scheduling": True, "num_ranks": 2},
    "v1 deferred, chunks": {"runner": "v1-deferred", "max_num_batched_tokens": 128},
}


def withdraw(q: Quilt, prompt: list[int], group: int, blocks: list[int]) -> None:
    """Pages that the store no longer has; each was there."""
    gone = q.store.withdraw(q.chain(prompt), group, np.asarray(blocks, dtype=np.int64))
    assert gone == len(blocks)


def loaded(q: Quilt) -> dict[str, float]:
    return dict(q.side.meter.totals["loaded_pages"])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gets_its_whole_prefix_back(name: str, engine: dict[str, Any]) -> None:
    with Quilt(LAYOUTS[name], **engine) as q:
        prompt = tokens(1, 700)
        first = q.serve(prompt, max_tokens=5)
        q.forget()
        second = q.serve(prompt, max_tokens=5)
        assert second.external_hit == q.layout.max_boundary(700) > 0
        assert (first.external_hit, second.local_hit) == (0, 0)
        assert second.output == first.output
        q.check_end()


def test_full32_and_sliding16() -> None:
    """The pages loaded are the prefix of the full group and one window of the sliding one."""
    with Quilt([full(32), sliding(16, 32)]) as q:
        q.serve(tokens(1, 97))
        q.forget()
        assert q.serve(tokens(1, 97)).external_hit == 96
        assert loaded(q) == {"full": 3, "sliding": 2}
        q.check_end()


@pytest.mark.parametrize(
    ("windows", "kept", "expected"),
    [
        ((3, 4), ({3, 4}, {1, 2, 3}), 0),
        ((3, 4), ({2, 3, 4}, {1, 2, 3}), 4),
        ((2, 3), ({3, 4}, {1, 2, 3}), 4),
        ((2, 3), ({3, 4}, {0, 1}), 0),
    ],
)
def test_b1_two_windows_whose_hits_are_not_monotonic(
    windows: tuple[int, int], kept: tuple[set[int], set[int]], expected: int
) -> None:
    """B1: the shortest of the groups' own best hits (4 in the first case) would be corruption."""
    with Quilt([sliding(1, windows[0]), full(1), sliding(1, windows[1])]) as q:
        prompt = tokens(1, 6)
        q.serve(prompt)
        for group, keep in zip((0, 2), kept, strict=True):
            there = q.saved_blocks(prompt, group)
            assert set(there) >= keep
            withdraw(q, prompt, group, [block for block in there if block not in keep])
        assert set(q.saved_blocks(prompt, 1)) >= {0, 1, 2, 3, 4}
        q.forget()
        assert q.serve(prompt).external_hit == expected
        q.check_end()


def test_15_partial_hit_shrinks_to_the_last_common_boundary() -> None:
    """Invariant 15: with window block 7 missing, blocks 4 and 5 serve 3 dense blocks."""
    with Quilt([full(32), sliding(16, 32)]) as q:
        prompt = tokens(1, 129)
        q.serve(prompt)
        withdraw(q, prompt, 1, [7])
        q.forget()
        assert q.serve(prompt).external_hit == 96
        assert loaded(q) == {"full": 3, "sliding": 2}
        assert q.connector.lookups()[-1].limited_by == "sliding"
        q.check_end()


def test_15_groups_meet_where_all_can_resume() -> None:
    """Invariant 15: groups that can serve {4, 2} and {3, 2} blocks meet at 2."""
    with Quilt([full(16), sliding(16, 2), sliding(16, 2, num_layers=2)]) as q:
        prompt = tokens(1, 65)
        q.serve(prompt)
        withdraw(q, prompt, 1, [0, 2])
        withdraw(q, prompt, 2, [0, 3])
        q.forget()
        assert q.serve(prompt).external_hit == 32
        q.check_end()


def test_groups_that_share_a_query_share_one_lease() -> None:
    with Quilt(LAYOUTS["five sliding, full last"]) as q:
        q.serve(tokens(1, 500))
        q.forget()
        q.fault_at_next("silent")
        record = q.add(tokens(1, 500))
        q.step()
        assert record.external_hit == 496
        assert q.store.audit().leases == 1
        assert q.store.stats().leased_slots == 31 + 5 * 2  # a window of 33 needs the last two blocks
        q.heal()
        q.run()
        q.check_end()


def test_14_a_saved_suffix_with_nulls_before_it_hits() -> None:
    """Invariant 14: of the windows only the last is in the store, and the hit is whole."""
    options: dict[str, Any] = {"retention": "prompt_end", "retain_slack": False}
    with Quilt(FULL_AND_SLIDING, max_num_batched_tokens=64, **options) as q:
        prompt = tokens(1, 500)
        q.serve(prompt)
        assert q.saved_blocks(prompt, 1) == [26, 27, 28, 29]
        q.forget()
        assert q.serve(prompt).external_hit == 480
        q.check_end()


@pytest.mark.parametrize("step", ["pages", "pin", "destinations"])
def test_20_all_leases_are_released_when_the_last_step_of_a_look_up_fails(step: str) -> None:
    """Invariant 20, B21: and the request is computed as if nothing had been promised."""
    with Quilt(FULL_AND_SLIDING) as q:
        first = q.serve(tokens(1, 500), max_tokens=3)
        q.forget()
        target, name = {
            "pages": (q.store, "pages"),
            "pin": (q.side.pins, "pin"),
            "destinations": (q.side.loads, "_destinations"),
        }[step]
        record = q.add(tokens(1, 500), max_tokens=3)
        with MethodFault(target, name, error=RuntimeError, at=[0]) as fault:
            q.step()
            assert fault.num_faults == 1
        assert q.store.audit().leases == 0
        q.run()
        assert [a.external for a in record.admissions] == [480, 0]
        assert record.output == first.output
        assert q.count("load_failures", "refused") == 1
        q.check_end()


def test_a_group_whose_pages_are_gone_allows_no_hit() -> None:
    with Quilt(FULL_AND_SLIDING) as q:
        prompt = tokens(1, 500)
        q.serve(prompt)
        withdraw(q, prompt, 1, q.saved_blocks(prompt, 1))
        assert len(q.saved_blocks(prompt, 0)) == 15
        q.forget()
        record = q.serve(prompt)
        assert record.external_hit == 0
        assert q.connector.lookups()[-1].limited_by == "sliding"
        # It was computed, so it is saved again, and then it hits.
        q.forget()
        assert q.serve(prompt).external_hit == 480
        q.check_end()


def test_13_only_the_part_of_a_window_that_the_engine_lacks_is_loaded() -> None:
    """Invariant 13: W=96, two local blocks of 32, a hit of one more: sliding blocks 4 and 5."""
    with Quilt([full(32), sliding(16, 96)]) as q:
        prompt = tokens(1, 97)
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt[:65]).external_hit == 64
        before = loaded(q)
        record = q.serve(prompt)
        assert (record.local_hit, record.external_hit) == (64, 32)
        assert {name: loaded(q)[name] - before[name] for name in before} == {"full": 1, "sliding": 2}
        q.check_end()


@pytest.mark.parametrize("cached", [True, False])
def test_two_requests_with_one_prefix_load_it_once(cached: bool) -> None:
    with Quilt(FULL_AND_SLIDING, enable_prefix_caching=cached) as q:
        q.serve(tokens(1, 500))
        q.forget()
        one, two = q.add(tokens(1, 500)), q.add(tokens(1, 500))
        q.run()
        hits = sorted((r.local_hit, r.external_hit) for r in (one, two))
        # Without a cache of the engine's own there is nothing to share.
        assert hits == ([(0, 480), (480, 0)] if cached else [(0, 480), (0, 480)])
        assert q.count("loaded_pages", "full") == (15 if cached else 30)
        q.check_end()


def test_whoever_waits_for_a_load_that_fails_goes_on() -> None:
    """The second request waits for the first one's load; that fails; both are computed or loaded."""
    with Quilt(FULL_AND_SLIDING) as q:
        q.serve(tokens(1, 500))
        q.forget()
        q.fault_at_next("fail")
        records = [q.add(tokens(1, 500)) for _ in range(3)]
        q.run()
        assert [a.external for a in records[0].admissions] == [480, 0]
        assert q.count("load_failures", "copy") == 1
        assert [r.finish_reason for r in records] == ["length"] * 3
        q.check_end()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"retain_slack": False, "retain_generated": False}, {2, 3, 4, 5}),
        ({"retain_slack": True, "retain_generated": False}, {0, 1, 2, 3, 4, 5}),
        ({"retain_slack": True, "retain_generated": True}, {0, 1, 2, 3, 4, 5, 14, 15, 16, 17}),
    ],
)
def test_prompt_end_keeps_windows_only_where_a_later_prompt_can_resume(
    options: dict[str, bool], expected: set[int]
) -> None:
    """Prompt of 100: boundaries 96 and (slack) 64; 199 of 200 generated tokens are written: 288."""
    with Quilt(FULL_AND_SLIDING, retention="prompt_end", **options) as q:
        record = q.serve(tokens(1, 100), max_tokens=200)
        whole = record.prompt + record.output
        assert set(q.saved_blocks(whole, 1)) == expected
        generated = 9 if options["retain_generated"] else 3
        assert q.saved_blocks(whole, 0) == list(range(generated))
        for prompt, hit in ((tokens(1, 100), 96), (tokens(1, 70), 64), (whole + tokens(2, 9), 288)):
            q.forget()
            kept = {96: True, 64: options["retain_slack"], 288: options["retain_generated"]}[hit]
            # Without that checkpoint, the longest hit is the prompt's own.
            assert q.serve(prompt).external_hit == (hit if kept else {64: 0, 288: 96}[hit])
        q.check_end()


def test_b32_dense_retention_keeps_only_window_blocks_that_some_boundary_needs() -> None:
    """B32: 8 of 16 window blocks."""
    with Quilt([full(256), sliding(64, 128)]) as q:
        prompt = tokens(1, 1_025)
        q.serve(prompt)
        assert q.saved_blocks(prompt, 0) == [0, 1, 2, 3]
        assert q.saved_blocks(prompt, 1) == [2, 3, 6, 7, 10, 11, 14, 15]
        for length, hit in ((1_025, 1_024), (1_000, 768), (513, 512)):
            q.forget()
            assert q.serve(prompt[:length]).external_hit == hit
        q.check_end()


@pytest.mark.parametrize("rest", [300, 80])
def test_blocks_of_a_local_hit_that_the_store_lacks_are_saved(rest: int) -> None:
    """They never fill: they are full at admission."""
    with Quilt(LAYOUTS["full only"]) as q:
        prompt = tokens(1, 500)
        q.serve(prompt)
        q.store.reset()
        assert q.pages() == {"full": 0}
        record = q.serve(prompt[:rest])
        assert record.local_hit > 0
        assert q.saved_blocks(prompt, 0) == list(range(rest // 16))
        q.check_end()


def test_tiny_pool_and_tiny_store() -> None:
    """Eviction in both all the time: hits fall, nothing is wrong, nothing leaks."""
    with Quilt(
        FULL_AND_SLIDING, num_blocks=70, ram_bytes="448KiB", max_num_batched_tokens=96, step_seconds=1e-6
    ) as q:
        for turn in range(3):
            for number in range(6):
                q.add(tokens(number, 300) + tokens(10 * turn + number, 20), max_tokens=12)
            q.run()
            # Whoever was last is held; those before have been evicted by then, more or less of them.
            q.forget()
            last = q.serve(tokens(20 + turn, 300))
            q.forget()
            assert q.serve(tokens(20 + turn, 300)).external_hit > 0
            assert last.finish_reason == "length"
        assert sum(group.evictions for group in q.store.stats().groups) > 0
        assert all(record.finish_reason == "length" for record in q.h.requests.values())
        q.check_end()


def dict_child(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "DictConnector",
        "kv_connector_module_path": "harness.dict_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_b39_under_multi_connector(engine: dict[str, Any]) -> None:
    """B39: the child saves what nobody has won, and hits on the second pass."""
    with Quilt(FULL_AND_SLIDING, multi=True, load_failure_policy="recompute", **engine) as q:
        first = q.serve(tokens(1, 130), max_tokens=3)
        assert q.saved_blocks(tokens(1, 130), 0) == [0, 1, 2, 3]
        q.forget()
        second = q.serve(tokens(1, 130), max_tokens=3)
        assert (second.external_hit, second.output) == (128, first.output)
        q.forget()
        q.fault_at_next("fail")
        third = q.serve(tokens(1, 130), max_tokens=3)
        assert [a.external for a in third.admissions] == [128, 0]
        assert third.output == first.output
        q.check_end()


def test_a_reset_reaches_the_child_of_a_multi_connector() -> None:
    with Quilt(FULL_AND_SLIDING, multi=True) as q:
        q.serve(tokens(1, 130))
        assert q.h.reset_prefix_cache(reset_connector=True)
        assert q.serve(tokens(1, 130)).external_hit == 0
        q.check_end()


@pytest.mark.parametrize("fails", [False, True])
def test_b80_blocks_that_another_child_is_loading_are_saved_only_when_they_are_there(fails: bool) -> None:
    """B80: with the other child's load failed, what was computed instead is saved."""
    from harness.dict_connector import STORES

    STORES.clear()
    other = dict_child(store="b80", fail_loads=int(fails))
    policy: dict[str, Any] = {"multi_connector": [other], "load_failure_policy": "recompute"}
    with Quilt(FULL_AND_SLIDING, multi=True, **policy) as q:
        prompt = tokens(1, 500)
        q.serve(prompt)
        assert len(STORES["b80"]) > 0
        q.forget()
        assert q.connector.reset_cache() is True  # ours forgets, the other child does not
        record = q.serve(prompt)
        assert [a.external for a in record.admissions] == ([480, 0] if fails else [480])
        STORES["b80"].clear()
        q.forget()
        assert q.serve(prompt).external_hit == 480  # from ours: the harness has checked the bytes
        q.check_end()
    STORES.clear()
