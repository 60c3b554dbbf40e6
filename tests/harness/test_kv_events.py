"""KV events as a router gets them: through the engine's own publisher, replayed from its buffer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest

from harness.connector_support import Quilt, full, sliding, tokens
from harness.router import Router, in_store, mirror, ours
from kvquilt.testing.copy_faults import CopyPlan
from kvquilt.testing.sim_shapes import GroupShape

LAYOUTS = {
    "full and two windows": [sliding(16, 20), full(32, num_layers=2), sliding(32, 100)],
    "states": [full(32), GroupShape("recurrent", 32, state_bytes=64), sliding(16, 48)],
    "chunks": [full(16), GroupShape("chunked", 16, chunk=64)],
    "drafter": [full(32), sliding(16, 64), full(64, draft=True)],
}


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events with the engine's whole hashes; its default is their last 64 bits."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def prefixes(q: Quilt, texts: dict[tuple[int, ...], str | None]) -> dict[bytes, list[int]]:
    """The engine's hash -> the whole prefix that it closes."""
    unit = q.layout.tokens_per_hash
    return {
        block_hash: list(text[: (i + 1) * unit])
        for text, salt in texts.items()
        for i, block_hash in enumerate(q.request(list(text), cache_salt=salt).block_hashes)
    }


def check_stored(q: Quilt, events: list[Any], known: dict[bytes, list[int]]) -> None:
    """Each event says of which tokens, after what, its blocks are."""
    kinds = {"full": "full_attention", "sliding": "sliding_window", "recurrent": "mamba"}
    kinds["chunked"] = "chunked_local_attention"
    for event in ours(events):
        group = q.layout.groups[event.group_idx]
        size = group.tokens_per_block
        assert event.block_size == size
        assert len(event.token_ids) == size * len(event.block_hashes)
        first = len(known[event.block_hashes[0]]) - size
        for i, block_hash in enumerate(event.block_hashes):
            prefix = known[block_hash]
            assert len(prefix) == first + (i + 1) * size
            assert prefix[-size:] == event.token_ids[i * size : (i + 1) * size]
        before = known[event.block_hashes[0]][:first]
        assert (known[event.parent_block_hash] if event.parent_block_hash else []) == before
        assert event.kv_cache_spec_kind == kinds[group.kind]
        assert event.kv_cache_spec_sliding_window == group.window
        assert (event.lora_name, event.lora_id) == (None, None)
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)


@pytest.mark.parametrize("partition", ["solved", "shared_rows"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_router_that_replays_the_events_knows_what_is_stored(
    name: str, partition: str, tmp_path: Path
) -> None:
    router, draw = Router(tmp_path), random.Random(name)
    more = {"max_num_batched_tokens": 512, "num_ranks": draw.choice([1, 2])}
    with Quilt(
        LAYOUTS[name], ram_bytes="160KiB", group_partition=partition, kv_events=router.config, **more
    ) as q:
        texts: dict[tuple[int, ...], str | None] = {}
        for round_ in range(12):
            prompt = [*tokens(draw.randrange(3), draw.randrange(0, 300)), *tokens(100 + round_, 150)]
            salt = draw.choice([None, None, "of somebody"])
            record = q.serve(prompt, max_tokens=draw.randrange(1, 40), cache_salt=salt)
            texts[tuple(prompt + record.output)] = salt
            if round_ == 6:
                assert q.h.reset_prefix_cache(reset_connector=True)
            if round_ % 3 == 0:
                q.forget()
        assert q.store.stats().groups[0].evictions > 0, "a store that never evicts shows little"
        events = router.wait_for(in_store(q.store))
        assert {event.group_idx for event in ours(events)} == set(range(len(LAYOUTS[name])))
        check_stored(q, events, prefixes(q, texts))
        heads = [e for e in ours(events) if e.parent_block_hash is None]
        salted = {e.extra_keys[0] for e in heads}
        assert salted == {None, ("of somebody",)}
        q.check_end()


def test_only_what_all_ranks_have_written_is_told(tmp_path: Path) -> None:
    router = Router(tmp_path)
    plans = [CopyPlan(), CopyPlan(rates={"fail": 1.0}, directions=("save",))]
    with Quilt([full(32), sliding(16, 64)], num_ranks=2, copies=plans, kv_events=router.config) as q:
        q.serve(tokens(1, 300))
        assert q.count("saves_failed") > 0
        assert in_store(q.store) == set()
        assert mirror(router.replay()) == set()
        q.heal()
        q.forget()
        q.serve(tokens(1, 300))
        assert len(in_store(q.store)) > 9
        router.wait_for(in_store(q.store))
        q.check_end()


def test_a_reset_removes_ours_alone(tmp_path: Path) -> None:
    """The engine's "all cleared" would take the GPU's blocks from a router's index too."""
    router = Router(tmp_path)
    with Quilt([full(32), sliding(16, 64)], kv_events=router.config) as q:
        q.serve(tokens(1, 300))
        before = router.wait_for(in_store(q.store))
        assert any(event.medium == "GPU" for event in before if isinstance(event, BlockStored))
        q.connector.reset_cache()
        q.serve(tokens(2, 40))
        events = router.wait_for(in_store(q.store))[len(before) :]
        assert mirror(before) <= {
            (e.group_idx, h) for e in events if isinstance(e, BlockRemoved) for h in e.block_hashes
        }
        assert {type(event) for event in events} == {BlockStored, BlockRemoved}


def test_adapters_are_told_by_name(tmp_path: Path) -> None:
    router = Router(tmp_path)
    with Quilt([full(32), sliding(16, 64)], kv_events=router.config) as q:
        record = q.add(tokens(1, 300))
        request = q.h.scheduler.requests[record.id]
        request.lora_request = LoRARequest("poet", 7, "/nowhere")
        q.run()
        events = router.wait_for(in_store(q.store))
        told = {(e.lora_name, e.lora_id, e.extra_keys[0]) for e in ours(events)}
        assert told == {("poet", 7, ("poet",))}


def test_behind_a_multi_connector(tmp_path: Path) -> None:
    router = Router(tmp_path)
    with Quilt([full(32), sliding(16, 64)], multi=True, kv_events=router.config) as q:
        q.serve(tokens(1, 300))
        assert in_store(q.store)
        router.wait_for(in_store(q.store))
        q.check_end()


def test_hashes_as_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's default: the last 64 bits, for our events as for its own."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    router = Router(tmp_path)
    with Quilt([full(32), sliding(16, 64)], hash_algorithm="xxhash", kv_events=router.config) as q:
        q.serve(tokens(1, 300))
        length = q.chain(tokens(1, 300)).hash_bytes
        assert length == 16
        short = {(group, int.from_bytes(key[length - 8 : length], "big")) for group, key in in_store(q.store)}
        events = router.wait_for(short)  # type: ignore[arg-type]
        assert mirror(events) & mirror(events, "GPU")


def test_an_engine_without_events_records_nothing() -> None:
    with Quilt([full(32), sliding(16, 64)]) as q:
        q.serve(tokens(1, 300))
        assert q.store._log is None
        assert q.connector.take_events() == []
        assert q.chain(tokens(1, 300)).source is None
