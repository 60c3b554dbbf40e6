"""Latent KV that all ranks hold: a slot has it once, the first rank writes it, every rank reads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvquilt import CacheGroup, CacheLayout, plan_slots
from kvquilt.errors import LayoutError
from kvquilt.store import Arena
from kvquilt.vllm.handover import PoolServer, layout_fingerprint
from kvquilt.vllm.layout import engine_layout
from kvquilt.vllm.metadata import CopyList, LoadJob, SaveJob, StepPlan, decode_reports, encode_plan
from kvquilt.vllm.worker import WorkerSide

RANKS = 2
NUM_BLOCKS = 8
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, max_tp_shards=1)
HEADS = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
STATES: dict[str, Any] = {"block_size": 16, "shapes": ((8,),), "dtypes": (torch.float32,)}


def engine_config(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{i}.attn"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(NUM_BLOCKS, [], groups)
    config.hash_block_size = 16
    return config


def vllm_config(ranks: int = RANKS) -> Any:
    return SimpleNamespace(
        speculative_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=ranks, tensor_parallel_size=ranks),
    )


def test_the_engine_says_which_groups_are_replicated() -> None:
    states = [MambaSpec(**STATES, mamba_cache_mode="align", tp_replicated=same) for same in (True, False)]
    layout = engine_layout(engine_config(LATENT, HEADS, *states), vllm_config())
    assert [group.replicated for group in layout.groups] == [True, False, True, False]


def test_a_slot_of_latent_kv_holds_one_page_for_all_ranks() -> None:
    layout = engine_layout(engine_config(LATENT, HEADS), vllm_config())
    latent, heads = layout.groups
    assert latent.page_bytes == heads.page_bytes == 4096
    plan = plan_slots(layout, 1 << 20, num_ranks=4)
    assert plan.slot_bytes == {latent.name: 4096, heads.name: 4 * 4096}
    assert plan.slots[latent.name] == plan.slots[heads.name]
    # A latent model's tokens don't cost more with more ranks.
    alone = engine_layout(engine_config(LATENT), vllm_config())
    assert plan_slots(alone, 1 << 20, num_ranks=8).tokens == plan_slots(alone, 1 << 20).tokens


@pytest.mark.parametrize("order", [1, -1])
def test_layers_that_ranks_share_and_split_in_one_group_are_refused(order: int) -> None:
    """A drafter with heads beside a latent target: one flag for both would give rank 1 rank 0's heads."""
    specs = dict(list({"a": LATENT, "b": HEADS}.items())[::order])
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    config = engine_config(mixed)
    config.kv_cache_groups[0].layer_names[:] = list(specs)
    with pytest.raises(LayoutError, match=r"'full'.*ranks"):
        engine_layout(config, vllm_config())
    assert len(engine_layout(config, vllm_config(ranks=1)).groups) == 1


class Ranks:
    """Two worker sides with tensors of their own over the same arenas."""

    def __init__(self, folder: Path) -> None:
        groups = [
            CacheGroup(name, kind="full", tokens_per_block=16, page_bytes=4096, layers=(f"{name}.0",), **more)  # type: ignore[arg-type]
            for name, more in (("latent", {"replicated": True}), ("heads", {}))
        ]
        self.layout = CacheLayout(groups)
        self.arenas = [Arena(0, "latent", 4, 4096), Arena(1, "heads", 4, RANKS * 4096)]
        self.server = PoolServer(self.arenas, layout_fingerprint(self.layout))
        config = engine_config(LATENT, HEADS)
        for group, name in zip(config.kv_cache_groups, ("latent", "heads"), strict=True):
            group.layer_names[:] = [f"{name}.0"]
        self.caches: list[dict[str, torch.Tensor]] = []
        self.sides: list[WorkerSide] = []
        for rank in range(RANKS):
            side = WorkerSide(config, self.layout, partition="solved", rank=rank, num_ranks=RANKS)
            generator = torch.Generator().manual_seed(rank)
            heads = torch.randn(NUM_BLOCKS, 1, 16, 64, generator=generator)
            latent = torch.randn(NUM_BLOCKS, 1, 16, 64, generator=torch.Generator().manual_seed(9))
            self.caches.append({"latent.0": latent, "heads.0": heads})
            side.register(self.caches[rank])
            self.sides.append(side)
        self.step(StepPlan(attach_path=self.server.path), until=lambda report: report.attached)

    def step(self, plan: StepPlan, until: Any, ranks: tuple[int, ...] = (0, 1)) -> list[Any]:
        """One engine step on these ranks, and more until each reports what is waited for."""
        found = []
        for rank in ranks:
            side, message, end = self.sides[rank], encode_plan(plan), time.monotonic() + 30
            while True:
                side.before_forward(side.take_plan(message))
                side.start_loads()
                side.start_saves()
                side.poll()
                message = encode_plan(StepPlan())
                reports = [report for report in decode_reports(side.report()) if until(report)]
                if reports:
                    found.append(reports[0])
                    break
                assert time.monotonic() < end
        return found

    def copy(self, kind: str, block: int, slot: int, ranks: tuple[int, ...] = (0, 1)) -> list[Any]:
        """Save or load one block of both groups."""
        pages = CopyList.of(
            np.array([0, 1], np.int32), np.full(2, block, np.int64), np.full(2, slot, np.int64)
        )
        plan = (
            StepPlan(saves=(SaveJob(1, pages),))
            if kind == "saves"
            else StepPlan(loads=(LoadJob(1, "r", pages, 30.0),))
        )
        return self.step(plan, until=lambda report: getattr(report, kind), ranks=ranks)

    def slot(self, arena: int, slot: int) -> bytes:
        stride = self.arenas[arena].slot_stride
        import os

        return os.pread(self.arenas[arena].fd, stride, slot * stride)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        two = Ranks(tmp_path)
        stack.callback(two.server.close)
        for arena in two.arenas:
            stack.callback(arena.close)
        for side in two.sides:
            stack.callback(side.close)
        yield two


def page(tensor: torch.Tensor, block: int) -> bytes:
    return tensor[block].contiguous().numpy().tobytes()


def test_only_the_first_rank_writes_it(two: Ranks) -> None:
    """Rank 1's save alone leaves the latent slot as it was, and its own share of the heads' slot."""
    for report in two.copy("saves", block=3, slot=2, ranks=(1,)):
        assert [end.ok for end in report.saves] == [True]
    assert two.slot(0, 2) == bytes(4096)
    assert two.slot(1, 2) == bytes(4096) + page(two.caches[1]["heads.0"], 3)
    two.copy("saves", block=3, slot=2, ranks=(0,))
    assert two.slot(0, 2) == page(two.caches[0]["latent.0"], 3)
    assert two.slot(1, 2) == b"".join(page(caches["heads.0"], 3) for caches in two.caches)


def test_every_rank_reads_it(two: Ranks) -> None:
    want = [{name: page(tensor, 3) for name, tensor in caches.items()} for caches in two.caches]
    assert want[0]["latent.0"] == want[1]["latent.0"]
    assert want[0]["heads.0"] != want[1]["heads.0"]
    two.copy("saves", block=3, slot=2)
    for report in two.copy("loads", block=6, slot=2):
        assert [end.ok for end in report.loads] == [True]
    assert [{name: page(tensor, 6) for name, tensor in caches.items()} for caches in two.caches] == want


def test_a_rank_with_nothing_to_write_still_reports(two: Ranks) -> None:
    """A ticket commits when all ranks have reported, those that had nothing to write too."""
    pages = CopyList.of(np.zeros(1, np.int32), np.array([3]), np.array([1]))
    reports = two.step(StepPlan(saves=(SaveJob(5, pages),)), until=lambda report: report.saves)
    assert [[(end.job_id, end.ok) for end in report.saves] for report in reports] == [[(5, True)]] * RANKS
