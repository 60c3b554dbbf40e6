"""What is saved, found and loaded for every kind of cache group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.brute_force import HitCheck
from harness.connector_support import KINDS, Quilt, chunked, engine_of, full, latent, sliding, states, tokens
from kvquilt.errors import LayoutError
from kvquilt.testing.sim_config import EngineConfig
from kvquilt.testing.sim_shapes import GroupShape

ENGINES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2 async, two ranks": {"runner": "v2", "async_scheduling": True, "num_ranks": 2},
    "v1 deferred, chunks": {"runner": "v1-deferred", "max_num_batched_tokens": 128},
}


BEYOND = {"eagle, no group flagged": 32, "small states, mtp": 16}


def withdraw(q: Quilt, prompt: list[int], group: int, keep: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Of this group the store keeps no pages but these."""
    there = q.saved_blocks(prompt, group)
    assert set(there) >= keep
    gone = np.asarray([block for block in there if block not in keep], dtype=np.int64)
    assert q.store.withdraw(q.chain(prompt), group, gone) == gone.size


def loaded(q: Quilt) -> dict[str, float]:
    return dict(q.side.meter.totals["loaded_pages"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", KINDS)
def test_every_layout_gets_its_whole_prefix_back(name: str, engine: str) -> None:
    groups, options = engine_of(name)
    with Quilt(groups, **ENGINES[engine], **options) as q:
        check = HitCheck(q, groups)
        prompt = tokens(1, 700)
        first = q.serve(prompt, max_tokens=5)
        q.forget()
        expected = check.expected(q.request(prompt), 0)
        second = q.serve(prompt, max_tokens=5)
        # All that the last hash covers, but for what is needed beyond it by a group that peeks.
        longest = q.layout.max_boundary(700)
        assert expected == longest - BEYOND.get(name, 0)
        assert second.external_hit == expected
        assert (first.external_hit, second.local_hit) == (0, 0)
        assert second.output == first.output
        assert check.wrong == []
        q.check_end()


# ---- recurrent ----


@pytest.mark.parametrize(("interval", "kept"), [(0, {9}), (256, {3, 7, 9}), (None, {1, 3, 5, 7, 9})])
def test_states_are_those_that_the_engine_hands_over(interval: int | None, kept: set[int]) -> None:
    """Steps of 128 tokens, states of 64: the engine keeps what its retention interval says."""
    options: dict[str, Any] = {"retention_interval": interval, "max_num_batched_tokens": 128}
    with Quilt([full(64), states(64, 256)], **options) as q:
        prompt = tokens(1, 650)
        q.serve(prompt)
        assert set(q.saved_blocks(prompt, 1)) == kept
        assert len(q.saved_blocks(prompt, 0)) == 10
        q.forget()
        for end in (650, 600, 520, 400, 280):
            usable = [64 * (block + 1) for block in kept if 64 * (block + 1) < end]
            record = q.serve(prompt[:end])
            assert record.external_hit + record.local_hit == max(usable, default=0)
            q.forget()
            withdraw(q, prompt[:end], 1, {block for block in kept if 64 * (block + 1) <= end})
        q.check_end()


def test_states_of_several_sizes_are_kept_at_their_own() -> None:
    """Slots come from each group's own spec, never from the last one seen."""
    sizes = (8192, 40, 16_384)
    with Quilt([*[states(64, size) for size in sizes], full(64, bytes_per_token=8)]) as q:
        groups = q.layout.groups
        assert [group.page_bytes for group in groups] == [*sizes, 512]
        assert [q.side.plan.slot_bytes[group.name] for group in groups] == [8192, 4096, 16_384, 4096]
        q.serve(tokens(1, 650))
        q.forget()
        assert q.serve(tokens(1, 650)).external_hit == 640
        loaded_bytes = dict(q.side.meter.totals["loaded_bytes"])
        assert loaded_bytes == {g.name: g.page_bytes * (10 if g.kind == "full" else 1) for g in groups}
        q.check_end()


def test_content_bytes_of_a_state_are_kept_and_not_its_padding() -> None:
    with Quilt([full(32, bytes_per_token=256), states(32, 4096, padded_bytes=8192)]) as q:
        q.serve(tokens(1, 100))
        assert q.side.plan.slot_bytes["recurrent"] == q.layout.groups[1].page_bytes == 4096
        assert q.count("saved_bytes", "recurrent") == 4096
        q.forget()
        assert q.serve(tokens(1, 100)).external_hit == 96
        q.check_end()


def test_a_shared_prefix_gets_a_state_the_second_time_it_is_seen() -> None:
    """The junction: also after the engine's own cache was emptied, so only the store knows of it."""
    with Quilt([full(64), states(64, 256)]) as q:
        shared = tokens(1, 512)
        hits = []
        for number in range(4):
            record = q.serve(shared + tokens(10 + number, 200))
            hits.append(record.external_hit)
            q.forget()
        assert hits == [0, 0, 512, 512]
        assert 7 in q.saved_blocks(shared, 1)
        q.check_end()


def test_a_local_prefix_that_is_shorter_is_completed_from_the_store() -> None:
    """The engine holds 256 tokens itself, with their state; the store goes on to 640."""
    with Quilt([full(64), states(64, 256)]) as q:
        prompt = tokens(1, 650)
        q.serve(prompt)
        q.forget()
        q.serve(prompt[:257], skip_reading_prefix_cache=True)
        before = loaded(q)
        record = q.serve(prompt, max_tokens=3)
        assert (record.local_hit, record.external_hit) == (256, 384)
        assert {name: count - before.get(name, 0) for name, count in loaded(q).items()} == {
            "full": 6,
            "recurrent": 1,
        }
        q.check_end()


def test_full_blocks_ahead_of_the_engines_states_are_not_loaded_again() -> None:
    """The engine's full group holds 512 tokens, its states none of that prompt; the store has one at
    640. Never does a state of the engine's meet a deeper tail of ours."""
    with Quilt([full(64), states(64, 256)]) as q:
        prompt = tokens(1, 650)
        q.serve(prompt)
        q.forget()
        q.serve(prompt[:512] + tokens(2, 100), skip_reading_prefix_cache=True)
        before = loaded(q)
        record = q.serve(prompt, max_tokens=3)
        assert (record.local_hit, record.external_hit) == (512, 128)
        assert {name: count - before.get(name, 0) for name, count in loaded(q).items()} == {
            "full": 2,
            "recurrent": 1,
        }
        q.check_end()


def test_full_groups_of_which_one_lags_are_not_taken_for_equally_far() -> None:
    """The engine would tell how far its first full group is; the second has lost what it held past 256."""
    with Quilt([full(64), full(64, bytes_per_token=24), states(64, 256)]) as q:
        prompt = tokens(1, 650)
        q.serve(prompt)
        q.forget()
        q.serve(prompt[:512] + tokens(2, 100), skip_reading_prefix_cache=True)
        pool = q.h.block_pool
        for key in q.request(prompt).block_hashes[4:8]:
            pool.evict_blocks({block.block_id for block in pool.get_cached_block(key, [1])})
        record = q.serve(prompt, max_tokens=3)
        assert (record.local_hit, record.external_hit) == (0, 640)
        assert q.count("load_failures") == 0
        q.check_end()


def test_where_only_less_can_be_resumed_the_engine_is_made_to_ask_again() -> None:
    """Its full group holds 512 tokens, but the only state is ours, at 256."""
    with Quilt([full(64), states(64, 256)]) as q:
        prompt = tokens(1, 650)
        q.serve(prompt[:257])
        q.forget()
        q.serve(prompt[:512] + tokens(2, 100), skip_reading_prefix_cache=True)
        withdraw(q, prompt[:512] + tokens(2, 100), 1, {3})
        record = q.serve(prompt, max_tokens=3)
        assert record.local_hit + record.external_hit == 256
        q.check_end()


def test_34_states_come_from_the_hand_off_alone() -> None:
    """Invariant 34: what is offered wrongly is neither saved nor pinned: another group's block, the
    null block, a block without that hash, a boundary inside a block, an unknown request."""
    with Quilt([full(64), states(64, 256)], max_num_batched_tokens=128) as q:
        prompt = tokens(1, 650)
        manager = q.h.scheduler.kv_cache_manager
        take = manager.take_boundary_state_offloads
        offered: list[tuple[int, int, int]] = []

        def lie() -> dict[str, list[tuple[int, int, int]]]:
            real: dict[str, list[tuple[int, int, int]]] = take()
            table = manager.get_block_ids(record.id)
            lies = [(0, table[0][0], 64), (1, 0, 64), (1, table[1][-1], 64), (1, table[1][-1], 100)]
            offered.extend(real.get(record.id, []))
            return {record.id: [*lies, *real.get(record.id, [])], "nobody": [(1, table[0][0], 64)]}

        record = q.add(prompt)
        manager.take_boundary_state_offloads = lie
        q.h.run_until(lambda: record.finish_reason is not None)
        manager.take_boundary_state_offloads = take
        q.run()
        assert [boundary for _, _, boundary in offered] == [640]
        assert q.saved_blocks(prompt, 1) == [9]
        q.check_end()


def test_34_a_state_inside_a_loaded_prefix_is_not_saved_again() -> None:
    with Quilt([full(64), states(64, 256)]) as q:
        prompt = tokens(1, 650)
        q.serve(prompt)
        q.forget()
        saved = q.count("saved_pages", "recurrent")
        assert q.serve(prompt).external_hit == 640
        assert q.count("saved_pages", "recurrent") == saved == 1
        q.check_end()


def test_states_without_the_engines_prefix_caching_are_refused() -> None:
    from kvquilt.vllm.layout import engine_groups

    with Quilt([full(64), states(64, 256)]) as q:
        config: EngineConfig = q.h.config
        config.vllm.cache_config.enable_prefix_caching = False
        with pytest.raises(LayoutError, match="needs the engine's prefix caching"):
            engine_groups(config.kv_cache, config.vllm)


# ---- chunked ----


@pytest.mark.parametrize("retention", ["dense", "prompt_end"])
def test_at_a_chunk_start_nothing_of_the_chunks_is_loaded(retention: str) -> None:
    with Quilt([chunked(16, 64), full(16)], retention=retention, max_num_batched_tokens=64) as q:
        prompt = tokens(1, 129)
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt).external_hit == 128
        assert loaded(q) == {"full": 8}
        q.serve(tokens(2, 113))
        q.forget()
        assert q.serve(tokens(2, 113)).external_hit == 112
        assert loaded(q) == {"full": 8 + 7, "chunked": 3}
        q.check_end()


def test_chunks_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="attention_chunk_size=24: not a multiple of its block of 16"):
        Quilt([full(16), chunked(16, 24)])


# ---- latent, unequal, scratch ----


def test_what_all_ranks_hold_is_stored_once() -> None:
    with Quilt([latent(16, bytes_per_token=256), sliding(16, 40, bytes_per_token=256)], num_ranks=2) as q:
        assert q.side.plan.slot_bytes == {"full": 4096, "sliding": 8192}
        q.serve(tokens(1, 100))
        q.forget()
        assert q.serve(tokens(1, 100), max_tokens=3).external_hit == 96
        assert q.count("loaded_bytes", "full") == 6 * 4096
        assert q.count("loaded_bytes", "sliding") == 3 * 8192
        q.check_end()


def test_layers_of_unequal_size_in_one_group_are_all_kept() -> None:
    """Invariant 6: the workers see each layer's size, the scheduler one layer's spec."""
    with Quilt([full(32, layer_bytes=(8, 24, 16)), sliding(16, 40)], num_ranks=2) as q:
        assert q.layout.groups[0].page_bytes == 32 * (8 + 24 + 16)
        assert q.workers[1].worker_side._layout.groups == q.layout.groups
        q.serve(tokens(1, 100))
        q.forget()
        assert q.serve(tokens(1, 100), max_tokens=3).external_hit == 96
        q.check_end()


@pytest.mark.parametrize("name", ["scratch ring", "scratch replay"])
def test_scratch_groups_keep_their_index_and_nothing_else(name: str) -> None:
    with Quilt(KINDS[name]) as q:
        scratch = q.layout.groups[1]
        assert (scratch.kind, scratch.cacheable, scratch.page_bytes) == ("scratch", False, 0)
        q.serve(tokens(1, 300))
        q.forget()
        assert q.serve(tokens(1, 300), max_tokens=3).external_hit == 288
        assert scratch.name not in q.pages()
        assert scratch.name not in loaded(q)
        q.check_end()


def test_a_window_that_the_engine_replays_is_computed_anew_after_a_hit() -> None:
    """And a hit no longer than that window saves nothing, so the engine takes none."""
    with Quilt([full(16), GroupShape("replay", 16, window=64)]) as q:
        for length, hit in ((64, 0), (81, 80), (300, 288)):
            prompt = tokens(length, length)
            q.serve(prompt)
            q.forget()
            assert q.serve(prompt, max_tokens=2).external_hit == hit
        q.check_end()
