"""A router that only reads the engine's KV events knows how long a hit each prompt will have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine.rig import random_prompts
from harness.router import Router, in_store, mirror, ours
from kvquilt import longest_hit
from kvquilt.layout import CacheLayout
from kvquilt.testing import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODEL = "gemma4-mini"


def hashes_of(prompt: list[int], events: list[Any], full: int, unit: int) -> list[bytes]:
    """The engine's hashes of a prompt, as far as the full group's events have told its blocks."""
    after: dict[tuple[bytes | None, tuple[int, ...]], bytes] = {}
    for event in ours(events):
        if event.group_idx == full:
            before = [event.parent_block_hash, *event.block_hashes]
            for i, block_hash in enumerate(event.block_hashes):
                after[before[i], tuple(event.token_ids[i * unit : (i + 1) * unit])] = block_hash
    found: list[bytes] = []
    while True:
        start = len(found) * unit
        step = after.get((found[-1] if found else None, tuple(prompt[start : start + unit])))
        if step is None:
            return found
        found.append(step)


def predicted(prompt: list[int], events: list[Any], layout: CacheLayout) -> int:
    """The hit that follows from the events alone."""
    stored = mirror(events)
    full = next(i for i, group in enumerate(layout.groups) if group.name == "full")
    hashes = hashes_of(prompt, events, full, layout.tokens_per_hash)
    presence: dict[str, set[int]] = {}
    for index, group in enumerate(layout.groups):
        per_block = layout.hashes_per_block(group)
        ends = hashes[per_block - 1 :: per_block]
        presence[group.name] = {i for i, end in enumerate(ends) if (index, end) in stored}
    return longest_hit(layout, presence, num_tokens=len(prompt)).tokens


def test_events_tell_how_long_each_hit_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import KVEventsConfig

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    router = Router(tmp_path)
    prompts = random_prompts(21, *[331, 200, 449] * 4)
    # Room for some of the prompts: the others are evicted, whole or in part.
    with Engine(
        MODEL,
        connector={"ram_bytes": "3MiB"},
        num_blocks=900,
        max_model_len=1024,
        kv_events_config=KVEventsConfig(**router.config),
    ) as engine:
        side = engine.connector.scheduler_side
        engine.run(prompts, max_tokens=4, concurrency=1)
        engine.step_until_idle()
        hits = []
        for prompt in reversed(prompts):
            assert engine.reset_prefix_cache()
            events = router.wait_for(in_store(side.store))
            expected = predicted(prompt, events, side.layout)
            [result] = engine.run([prompt], max_tokens=4)
            engine.step_until_idle()
            assert (result.local_hit_tokens, result.external_hit_tokens) == (0, expected)
            hits.append(expected)
        assert max(hits) > 0
        assert min(hits) == 0, "a store that holds everything shows little"
