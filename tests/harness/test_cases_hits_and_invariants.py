"""Field cases of the kinds (a) wrong output and (f) odd layouts, and invariants, at the connector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.connector_support import LAYOUTS, Quilt, full, sliding, tokens
from kvquilt.errors import KVQuiltError, LayoutError
from kvquilt.testing.faults import MethodFault, full_store

FULL_AND_SLIDING = LAYOUTS["full 32 + sliding 16"]
PROMPT = tokens(1, 500)
HIT = 480


class Broken(Exception):
    """An error that nobody expects."""


def saved(q: Quilt, prompt: list[int] = PROMPT, max_tokens: int = 1, **more: Any) -> Any:
    record = q.serve(prompt, max_tokens=max_tokens, **more)
    q.forget()
    return record


# ---- look-up ----


def test_10_asking_a_thousand_times_is_one_resolution_and_one_lease() -> None:
    """Invariant 10."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        record = q.add(PROMPT)
        request = q.h.scheduler.requests[record.id]
        resolved = q.count("lookups")
        answers = {q.connector.get_num_new_matched_tokens(request, 0) for _ in range(1_000)}
        assert answers == {(HIT, True)}
        assert q.count("lookups") == resolved + 1
        assert q.store.audit().leases == 1
        q.run()
        assert record.external_hit == HIT
        assert q.count("lookups") == resolved + 1
        q.check_end()


@pytest.mark.parametrize("length", [479, 480, 481, 511, 512, 513])
def test_16_one_token_is_always_left_to_compute(length: int) -> None:
    """Invariant 16: the hit never is the whole prompt, at any alignment."""
    with Quilt(FULL_AND_SLIDING) as q:
        prompt = tokens(1, 600)
        saved(q, prompt)
        record = q.serve(prompt[:length], max_tokens=2)
        assert record.external_hit == (length - 1) // 32 * 32
        q.check_end()


def test_18_save_only_never_looks_up_and_never_leases() -> None:
    """Invariant 18."""
    with Quilt(FULL_AND_SLIDING, mode="save_only") as q:
        for _ in range(2):
            assert saved(q).external_hit == 0
        assert sum(q.pages().values()) > 0
        assert q.count("lookups") == 0
        q.check_end()


def test_requests_that_skip_reading_the_prefix_cache_get_no_hit() -> None:
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        assert saved(q, skip_reading_prefix_cache=True).external_hit == 0
        assert q.serve(PROMPT).external_hit == HIT
        q.check_end()


def test_b10_two_ranks_get_each_their_own_bytes_back() -> None:
    """B10, invariant 19: a shared prefix of 3 blocks, other tails; the harness compares every byte
    that a rank reads with that rank's own."""
    with Quilt([full(160), sliding(160, 200)], num_ranks=2) as q:
        base = tokens(1, 480)
        saved(q, base + tokens(2, 50))
        record = q.serve(base + tokens(3, 70), max_tokens=5)
        assert record.external_hit == 480
        q.check_end()


def test_b21_after_a_refused_load_every_position_is_computed_once() -> None:
    """B21: 48 of 60 tokens promised, the load refused."""
    with Quilt([full(16)]) as q:
        prompt = tokens(1, 60)
        first = saved(q, prompt, max_tokens=8)
        with MethodFault(q.store, "pages", error=KVQuiltError):
            record = q.serve(prompt, max_tokens=8)
        assert [a.external for a in record.admissions] == [48, 0]
        assert record.output == first.output
        q.forget()
        assert q.serve(prompt, max_tokens=8).external_hit == 48
        q.check_end()


def test_b22_salts_do_not_meet() -> None:
    """B22, invariant 42: 48 tokens are 3 blocks; 32 hit, since one token is computed."""
    with Quilt([full(16)]) as q:
        prompt = tokens(1, 48)
        hits = [saved(q, prompt, cache_salt=salt).external_hit for salt in ("x", "y", "x", "y", None)]
        assert hits == [0, 0, 32, 32, 0]
        assert saved(q, [*prompt, 5], cache_salt="x").external_hit == 48
        q.check_end()


def media(identifier: str) -> list[Any]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=4, length=8)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)]


def adapter(number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, "/none")


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(lambda n: {"lora_request": adapter(n)}, id="adapters"),
        pytest.param(lambda n: {"mm_features": media(f"image-{n}")}, id="media"),
        pytest.param(lambda n: {"cache_salt": f"salt-{n}"}, id="salts"),
    ],
)
def test_b22_adapters_and_media_do_not_meet(pair: Any) -> None:
    """B22: the same tokens; saved for one, asked for by both."""
    with Quilt([full(16)]) as q:
        q.start()
        prompt = tokens(1, 49)
        from kvquilt.store import Chain, Want

        chain = Chain(q.layout)
        chain.extend(q.request(prompt, **pair(1)).block_hashes)
        owner = q.side.owner
        ticket = q.store.reserve(owner, [Want(chain, 0, np.arange(3))])
        q.store.commit(ticket.ticket_id, owner)
        hits = []
        for more in (pair(1), pair(2), {}):
            request = q.request(prompt, **more)
            hits.append(q.connector.get_num_new_matched_tokens(request, 0))
            q.connector.request_finished_all_groups(request, ([],))
        assert hits == [(48, True), (0, False), (0, False)]
        q.check_end()


def test_b22_a_request_of_embeddings_gets_no_hit_and_no_negative_one() -> None:
    import torch
    from vllm import SamplingParams
    from vllm.v1.request import Request

    with Quilt([full(16)]) as q:
        saved(q, tokens(1, 49))
        request = Request(
            "embedded",
            None,
            SamplingParams(max_tokens=1),
            None,
            prompt_embeds=torch.zeros(49, 8),
            block_hasher=q.h.engine.hasher,
        )
        assert q.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        q.connector.request_finished_all_groups(request, ([],))
        assert q.serve(tokens(1, 49)).external_hit == 48
        q.check_end()


# ---- loads ----


def too_short(rows: list[list[Any]], null: Any) -> list[list[Any]]:
    return [row[:-1] for row in rows]


def without_its_last(rows: list[list[Any]], null: Any) -> list[list[Any]]:
    return [[*row[:-1], null] for row in rows]


@pytest.mark.parametrize("spoil", [too_short, without_its_last])
def test_21_a_table_without_a_block_for_each_page_is_refused_and_the_lease_released(spoil: Any) -> None:
    """Invariant 21: the null block is no destination (and the harness sees any write to it)."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)

        def spoiled(real: Any, leased: Any, boundary: int, local: int, tables: Any) -> Any:
            rows = [list(row) for row in tables]
            return real(leased, boundary, local, spoil(rows, q.h.block_pool.null_block))

        with MethodFault(q.side.loads, "_destinations", instead=spoiled):
            record = q.add(PROMPT)
            q.step()
        assert q.store.audit().leases == 0
        q.run()
        assert [a.external for a in record.admissions] == [HIT, 0]
        assert q.count("load_failures", "refused") == 1
        q.check_end()


def test_30_what_was_loaded_is_not_saved_again_and_block_numbers_stay_global() -> None:
    """Invariant 30."""
    with Quilt(FULL_AND_SLIDING) as q:
        saved(q)
        before = {g.name: g.committed_pages for g in q.store.stats().groups}
        longer = PROMPT + tokens(2, 100)
        assert saved(q, longer).external_hit == HIT
        after = {g.name: g.committed_pages for g in q.store.stats().groups}
        assert after["full"] - before["full"] == 600 // 32 - 500 // 32
        assert q.saved_blocks(longer, 0) == list(range(600 // 32))
        assert q.saved_blocks(longer, 1)[-1] == 600 // 16 - 1
        assert q.serve(longer).external_hit == 576
        q.check_end()


# ---- saves ----


@pytest.mark.parametrize(("max_tokens", "pages"), [(1, 0), (2, 1), (3, 1), (17, 1), (18, 2)])
def test_28_only_written_tokens_are_saved(max_tokens: int, pages: int) -> None:
    """Invariant 28: 15 prompt tokens; the KV of the last sampled token is never written."""
    with Quilt([full(16)]) as q:
        record = q.serve(tokens(1, 15), max_tokens=max_tokens)
        assert q.saved_blocks(record.prompt + record.output + [1] * 32, 0) == list(range(pages))
        assert q.pages() == {"full": pages}
        q.check_end()


def test_29_a_null_block_is_dropped_together_with_its_key() -> None:
    """B76, invariant 29: five sliding groups and a full one, last. A long local hit has nulls where
    the window has passed; what is saved at admission keeps its own names."""
    with Quilt(LAYOUTS["five sliding, full last"], retention_interval=0) as q:
        prompt = tokens(1, 160)
        q.serve(prompt)
        q.store.reset()
        record = q.serve(prompt)
        assert record.local_hit == 144
        assert q.saved_blocks(prompt, 5) == list(range(10))
        for group in range(5):
            assert q.saved_blocks(prompt, group) in ([7, 8, 9], [6, 7, 8, 9])
        q.forget()
        assert q.serve(prompt).external_hit == 144
        q.check_end()


def test_b34_the_full_group_is_saved_to_its_end_whatever_the_window_holds() -> None:
    """B34: a window group holds at most 33 blocks; chunks of 256 tokens."""
    with Quilt([full(256), sliding(32, 1024)], max_num_batched_tokens=256, ram_bytes="8MiB") as q:
        prompt = tokens(1, 4_097)
        saved(q, prompt)
        assert q.saved_blocks(prompt, 0) == list(range(16))
        assert set(q.saved_blocks(prompt, 1)) >= set(range(96, 128))
        assert q.serve(prompt).external_hit == 4_096
        q.check_end()


def test_31_a_resumed_request_saves_from_its_new_table() -> None:
    """Invariant 31, B81: preempted in the middle, its old blocks given to another request."""
    with Quilt([full(16)], num_blocks=60, enable_prefix_caching=False, max_num_batched_tokens=64) as q:
        with full_store(q.store):
            record = q.add(tokens(1, 400), max_tokens=30)
            q.step(4)
        q.h.preempt(record.id)
        other = q.add(tokens(2, 300), max_tokens=5, priority=-1)
        q.run()
        assert (len(record.output), len(other.output)) == (30, 5)
        for prompt in (record.prompt + record.output, other.prompt):
            assert q.serve(prompt).external_hit >= 288
        q.check_end()


def test_33_a_postponed_save_whose_block_has_moved_on_is_dropped() -> None:
    """Invariant 33: at the pin cap saves wait; meanwhile windows slide on and blocks change hands."""
    with Quilt([sliding(16, 32), full(16)], num_blocks=60, max_num_batched_tokens=32, pin_cap=None) as q:
        q.side.pins.cap = 1
        q.fault_at_next("late report", jobs=40)
        for seed in range(1, 5):
            q.add(tokens(seed, 200), max_tokens=4)
        q.run()
        assert q.count("saves_skipped", "pin_cap") > 0
        q.settle()
        q.side.pins.cap = 60
        q.h.reset_prefix_cache()
        hits = []
        for seed in range(1, 5):
            for _ in range(2):
                hits.append(q.serve(tokens(seed, 200)).external_hit)
                q.forget()
        assert 192 in hits  # and whatever was hit, the harness has checked
        q.check_end()


def test_pins_that_alone_hold_blocks_are_capped() -> None:
    """At most the cap, and what one step has filled since it was looked at."""
    with Quilt([full(16)], num_blocks=4_000, max_num_batched_tokens=64, pin_cap=None) as q:
        cap = q.side.pins.cap
        assert cap == 80
        q.fault_at_next("silent", jobs=10_000)
        most = 0
        for seed in range(40):
            q.add(tokens(seed, 63))
            q.step()
            most = max(most, q.side.pins.exclusive())
            assert most <= cap + 64 // 16
        assert most >= cap - 4
        assert q.count("saves_skipped", "pin_cap") > 0
        q.settle()
        q.check_end()


def test_a_full_store_skips_and_counts_and_holds_up_nobody() -> None:
    with Quilt(FULL_AND_SLIDING) as q:
        with full_store(q.store):
            assert saved(q).finish_reason == "length"
        assert sum(q.pages().values()) == 0
        assert saved(q).external_hit == 0
        assert q.serve(PROMPT).external_hit == HIT
        q.check_end()


# ---- layouts at the worker ----


def test_4_a_registered_layer_of_no_group_is_refused_unless_it_shares_anothers_memory() -> None:
    """Invariant 4, B77."""
    with Quilt(FULL_AND_SLIDING) as q:
        worker = q.workers[0].worker_side
        caches = q.h.engine.workers[0].memory.kv_caches
        name = next(iter(caches))
        worker.register({**caches, "sharing": caches[name]})
        with pytest.raises(LayoutError, match="'stray' is in no cache group"):
            worker.register({**caches, "stray": caches[name].clone()})
        with pytest.raises(LayoutError, match=f"{name!r} was not registered"):
            worker.register({k: v for k, v in caches.items() if k != name})


def test_22_a_layer_of_another_page_size_is_refused() -> None:
    """Invariant 22: no page is ever partly filled in."""
    with Quilt(FULL_AND_SLIDING) as q:
        caches = q.h.engine.workers[0].memory.kv_caches
        name = next(iter(caches))
        with pytest.raises(LayoutError, match=r"holds \d+ bytes per block, its spec says"):
            q.workers[0].worker_side.register({**caches, name: caches[name][:, :, :, :1].contiguous()})


def test_b69_pages_that_do_not_divide() -> None:
    """B69, B72: page bytes of 1,280 / 768 / 4,224 in three groups."""
    groups = [full(32, bytes_per_token=40), sliding(16, 64, bytes_per_token=48), full(48, bytes_per_token=88)]
    with Quilt(groups) as q:
        saved(q)
        assert q.serve(PROMPT).external_hit == 480
        q.check_end()


# ---- errors inside hooks ----

HOOKS = [
    "scheduler match",
    "scheduler allocated",
    "scheduler build_step",
    "scheduler finished",
    "scheduler has_push_work",
    "scheduler stats",
    "worker before_forward",
    "worker start_loads",
    "worker start_saves",
    "worker poll",
    "worker take_told",
    "worker report",
    "copier save",
    "copier load",
    "copier poll",
    "store lookup",
    "store reserve",
    "store pages",
    "pins pin",
]


@pytest.mark.parametrize("rate", [0.4, 1.0])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_inside_any_hook_neither_stops_the_engine_nor_leaks(hook: str, rate: float) -> None:
    """Section 7 of the design. While it fails, requests are computed or, where the worker cannot
    answer, wait; once it does not, they go on, and the next hit is as long as ever."""
    with Quilt(FULL_AND_SLIDING, step_seconds=0.02, load_timeout_seconds=0.5, num_ranks=2) as q:
        saved(q)
        side, name = hook.split()
        worker = q.workers[1].worker_side
        target = {
            "scheduler": q.side,
            "worker": worker,
            "copier": worker.copier,
            "store": q.store,
            "pins": q.side.pins,
        }[side]
        records = [q.add(PROMPT, max_tokens=3), q.add(tokens(2, 200), max_tokens=3)]
        with MethodFault(target, name, error=Broken, rate=rate, seed=5) as fault:
            q.step(12)
        assert fault.num_calls > 0
        q.run()
        assert [record.finish_reason for record in records] == ["length", "length"]
        q.settle()
        q.check_end(hook_errors=None)
        assert {kind for _, kind in q.hook_errors()} <= {"Broken"}
        for prompt, hit in ((PROMPT, HIT), (tokens(2, 200), 192)):
            q.serve(prompt)
            q.settle()
            q.forget()
            assert q.serve(prompt).external_hit == hit
            q.settle()
        q.check_end(hook_errors=None)


def test_an_error_while_the_engine_asks_for_blocks_makes_it_preempt() -> None:
    with Quilt([full(16)], num_blocks=21, enable_prefix_caching=False) as q:
        with MethodFault(q.side, "has_block_frees", error=Broken) as fault:
            records = [q.add(tokens(seed, 150), max_tokens=40) for seed in (1, 2)]
            q.run()
        assert fault.num_faults > 0
        assert [len(record.output) for record in records] == [40, 40]
        q.settle()
        q.check_end(hook_errors=None)


def test_a_worker_that_cannot_attach_the_pools_switches_the_tier_off() -> None:
    """Requests go on without it, and the engine does not step for it for ever."""
    with Quilt(FULL_AND_SLIDING, num_ranks=2) as q:
        with MethodFault(q.workers[1].worker_side.copier, "attach", error=Broken) as fault:
            for _ in range(3):
                record = q.serve(PROMPT, max_tokens=3)
                assert (record.external_hit, record.finish_reason) == (0, "length")
                q.forget()
        assert fault.num_faults == 1
        assert sum(q.pages().values()) == 0
        q.check_end()


@pytest.mark.parametrize("head_sizes", [(8, 8, 16), (8, 16, 24)])
@pytest.mark.parametrize("outermost", ["LBHNC", "BLHNC"])
def test_6_workers_and_scheduler_see_the_same_group_of_unequal_layers(
    head_sizes: tuple[int, ...], outermost: str
) -> None:
    """Invariant 6: workers know each layer's spec, the scheduler that of the first layer alone."""
    import copy

    import torch
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_config_from_groups,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    from kvquilt.vllm.layout import engine_layout, layer_page_bytes

    with Quilt([full(32)]) as q:
        vllm_config = copy.deepcopy(q.h.config.vllm)
        vllm_config.cache_config.kv_cache_layout = outermost
        specs = {
            f"model.layers.{i}.attn": FullAttentionSpec(
                block_size=32, num_kv_heads=1, head_size=size, dtype=torch.float32
            )
            for i, size in enumerate(head_sizes)
        }
        uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        assert uniform is not None
        group = KVCacheGroupSpec(list(specs), uniform)
        worker = get_kv_cache_config_from_groups(vllm_config, [group], available_memory=0)
        worker.hash_block_size = 32
        scheduler = generate_scheduler_kv_cache_config([worker])
        assert not isinstance(scheduler.kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)

        layout = engine_layout(scheduler, vllm_config)
        assert layout == engine_layout(worker, vllm_config)
        assert layout.groups[0].page_bytes == 32 * 2 * 4 * sum(head_sizes)
        assert layout.groups[0].page_bytes == sum(layer_page_bytes(group).values())


def test_b17_a_page_is_found_whatever_the_engine_holds_itself() -> None:
    """B17: 8 blocks, of which the engine holds 5, and of which it holds none."""
    with Quilt([full(16)]) as q:
        prompt = tokens(1, 129)
        saved(q, prompt)
        assert q.serve(prompt[:81]).external_hit == 80
        record = q.serve(prompt)
        assert (record.local_hit, record.external_hit) == (80, 48)
        q.forget()
        assert q.serve(prompt).external_hit == 128
        q.check_end()


@pytest.mark.parametrize("option", ["ram_bytes", "window"])
def test_41_a_connector_with_other_factors_has_another_namespace(option: str) -> None:
    """Invariant 41: what the stored bytes belong to, from the engine's own configuration."""
    digests = set()
    for window, ram in ((64, "4MiB"), (64, "2MiB") if option == "ram_bytes" else (48, "4MiB")):
        with Quilt([full(16), sliding(16, window)], ram_bytes=ram) as q:
            digests.add(q.side.namespace.digest())
    assert len(digests) == (1 if option == "ram_bytes" else 2)
