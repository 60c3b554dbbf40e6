"""The disk tier in a real engine: what outlives an engine, what is brought back, and what is kept away."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from engine.disk import (
    DISK_BYTES,
    MODEL,
    POOL_BLOCKS,
    SMALL_RAM,
    DiskRig,
    break_files,
    disk_engine,
    disk_options,
    flip,
    namespaces,
    step_until,
    used_slots,
)
from engine.rig import SOME, Keeper, Rig, Truth, random_prompts
from engine.test_connector_options import write_adapter
from kvquilt.errors import ConfigError
from kvquilt.testing import Engine
from kvquilt.tiers import DiskOptions, NVMeTier
from kvquilt.tiers.manifest import Manifest
from kvquilt.units import parse_bytes

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MakeRig = Callable[..., Rig]
BOUNDARY = 320
NEEDED = {f"sliding.{i}": 1 for i in range(5)} | {"full": BOUNDARY // 32}
"""Pages that one of SOME needs at its last boundary: windows of one block, not their history."""
SAVED = {f"sliding.{i}": 331 // 64 for i in range(5)} | {"full": 331 // 32}
"""Pages that are saved of it."""


def times(count: int, pages: dict[str, int]) -> dict[str, int]:
    return {name: count * number for name, number in pages.items()}


@pytest.fixture(scope="module")
def truth(truths: dict[str, Truth]) -> Truth:
    if MODEL not in truths:
        truths[MODEL] = Truth(MODEL)
    return truths[MODEL]


@pytest.fixture(scope="module")
def filled(truth: Truth, keeper: Keeper, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that an engine has left which was asked SOME."""
    keeper.close()
    path = tmp_path_factory.mktemp("filled") / "disk"
    with disk_engine(truth, path) as rig:
        rig.assert_answers(rig.fill(SOME), SOME)
        rig.rest()
        assert rig.counted("pages") == rig.counted("writes") == times(len(SOME), SAVED)
        assert rig.sum("reads") == 0
    return path


@pytest.fixture
def left(filled: Path, tmp_path: Path) -> Path:
    """A copy of that directory."""
    return Path(shutil.copytree(filled, tmp_path / "disk"))


def assert_warm(rig: DiskRig, count: int = len(SOME)) -> None:
    warm = rig.run(SOME[:count])
    rig.assert_hits(warm, SOME[:count])
    rig.assert_answers(warm, SOME[:count])


def test_the_next_engine_finds_everything_and_reads_only_last_windows(truth: Truth, left: Path) -> None:
    with disk_engine(truth, left) as rig:
        assert rig.counted("pages") == times(len(SOME), SAVED)
        assert_warm(rig)
        assert rig.counted("reads") == times(len(SOME), NEEDED)
        assert rig.sum("bad") == 0
        rig.forget_locally()
        assert_warm(rig)
        assert rig.counted("reads") == times(len(SOME), NEEDED), "host memory had them"
        rig.forget_ram()
        assert_warm(rig)
        assert rig.counted("reads") == times(2 * len(SOME), NEEDED)


def test_a_lost_table_is_rebuilt_from_the_headers(truth: Truth, left: Path) -> None:
    for table in left.rglob("*.table"):
        table.unlink()
    with disk_engine(truth, left) as rig:
        assert_warm(rig)


def test_host_memory_smaller_than_the_working_set(truth: Truth, tmp_path: Path) -> None:
    with disk_engine(truth, tmp_path / "disk", ram_bytes=SMALL_RAM) as rig:
        for prompt in SOME:
            rig.fill([prompt])
            rig.rest()  # what is being written can't make room
        assert sum(group.evictions for group in rig.side.store.stats().groups) > 0
        for prompts in ([prompt] for prompt in (*SOME, *SOME)):
            rig.forget_locally()
            warm = rig.run(prompts)
            rig.assert_hits(warm, prompts)
            rig.assert_answers(warm, prompts)
            rig.rest()
        assert rig.promoter.counts["started"] >= len(SOME)
        assert rig.counted("pages") == times(len(SOME), SAVED)


@pytest.mark.parametrize("engine_caches", [True, False])
def test_requests_for_one_prefix_share_one_read(truth: Truth, left: Path, engine_caches: bool) -> None:
    tails = random_prompts(31, *[40] * 6)
    prompts = [SOME[0][:BOUNDARY] + tail for tail in tails]
    with disk_engine(truth, left, enable_prefix_caching=engine_caches) as rig:
        results = rig.run(prompts, concurrency=len(prompts))
        assert [r.local_hit_tokens + r.external_hit_tokens for r in results] == [BOUNDARY] * len(prompts)
        assert rig.counted("reads") == NEEDED
        assert sum(r.external_hit_tokens > 0 for r in results) == (1 if engine_caches else len(prompts))


def test_flipped_bits_are_misses_and_counted(truth: Truth, left: Path) -> None:
    [directory] = namespaces(left)
    slab, slot_bytes, slots = used_slots(directory, "full")
    assert len(slots) == len(SOME) * SAVED["full"]
    flip(slab, slot_bytes, slots)
    with disk_engine(truth, left) as rig:
        results = rig.run(SOME)
        rig.assert_answers(results, SOME)
        assert {r.external_hit_tokens for r in results} == {0}
        assert rig.counted("bad") == dict.fromkeys(NEEDED, 0) | {"full": len(SOME) * NEEDED["full"]}
        bad = rig.sum("bad")
        rig.rest()
        assert rig.counted("pages")["full"] == len(SOME) * SAVED["full"], "computed, and written again"
        rig.forget_ram()
        assert_warm(rig)
        assert rig.sum("bad") == bad, "a bad page was read again"


def test_without_a_window_the_next_boundary_is_taken(truth: Truth, left: Path) -> None:
    """All windows of one group are damaged but those of one earlier boundary, or of two."""
    [directory] = namespaces(left)
    slab, slot_bytes, slots = used_slots(directory, "sliding.2")
    keep = slots[1]  # one block of one prompt
    flip(slab, slot_bytes, [slot for slot in slots if slot != keep], seed=1)
    with disk_engine(truth, left) as rig:
        results = rig.run(SOME)
        rig.assert_answers(results, SOME)
        hits = sorted(r.external_hit_tokens for r in results)
        assert hits[:3] == [0, 0, 0]
        assert 0 < hits[3] <= BOUNDARY
        assert rig.counted("bad")["sliding.2"] > 0


def test_a_reset_is_for_good(truth: Truth, left: Path, tmp_path: Path) -> None:
    """Also for a process that is killed as soon as it has returned: such a one leaves this copy."""
    with disk_engine(truth, left) as rig:
        assert_warm(rig, 1)
        rig.engine.step_until_idle()
        assert rig.engine.reset_prefix_cache(reset_connector=True)
        killed = Path(shutil.copytree(left, tmp_path / "killed"))
    for path in (left, killed):
        with disk_engine(truth, path) as rig:
            assert rig.sum("pages") == 0
            results = rig.run(SOME[:2])
            assert {r.external_hit_tokens for r in results} == {0}
            rig.assert_answers(results, SOME[:2])


def test_a_second_engine_on_one_namespace_may_only_read(truth: Truth, left: Path) -> None:
    """The first one's tier stays open: it is what the system sees of a live engine."""
    [directory] = namespaces(left)
    manifest = Manifest.read(directory)
    assert manifest is not None
    options = DiskOptions(left, parse_bytes(DISK_BYTES))
    first = NVMeTier(truth.layout, manifest.namespace, options)
    try:
        assert first.stats().state == "on"
        with pytest.raises(ConfigError, match=r'another process uses the same namespace .*"never"'):
            Engine(MODEL, connector=disk_options(left), num_blocks=200, max_model_len=512)
        with disk_engine(truth, left, disk_write="never", disk_bytes=None) as rig:
            assert_warm(rig)
            assert rig.counted("reads") == times(len(SOME), NEEDED)
            rig.fill(random_prompts(32, 200))
            rig.rest()
            assert rig.sum("writes") == 0
        assert sum(group.pages for group in first.stats().groups) == len(SOME) * sum(SAVED.values())
    finally:
        first.close()


def test_shared_rows_are_another_namespace(truth: Truth, left: Path) -> None:
    [solved] = namespaces(left)
    with disk_engine(truth, left, group_partition="shared_rows") as rig:
        assert {r.external_hit_tokens for r in rig.fill(SOME[:2])} == {0}
    [shared] = namespaces(left)  # which needs all of disk_bytes, so the other one has made room
    assert shared != solved
    with disk_engine(truth, left, group_partition="shared_rows") as rig:
        assert_warm(rig, 2)


def test_evicted_writes_only_what_leaves_host_memory(truth: Truth, tmp_path: Path) -> None:
    """Written before they go, in good time: up to an eighth of a pool, which here is two prompts."""
    others = random_prompts(33, *[331] * 18)
    options = {"ram_bytes": "18MiB", "disk_bytes": "48MiB", "disk_write": "evicted"}
    with disk_engine(truth, tmp_path / "disk", **options) as rig:
        rig.fill(SOME[:1])
        rig.rest()
        assert rig.sum("writes") == 0, "nothing is about to leave host memory"
        for prompt in (*SOME[1:], *others):
            rig.fill([prompt])
            rig.rest()
        assert sum(group.evictions for group in rig.side.store.stats().groups) > 0
        assert 0 < rig.sum("writes") < 0.8 * (len(SOME) + len(others)) * sum(SAVED.values())
        for prompts in ([prompt] for prompt in (*SOME, *SOME)):
            rig.forget_locally()
            warm = rig.run(prompts)
            rig.assert_hits(warm, prompts)
            rig.assert_answers(warm, prompts)
            rig.rest()
        assert rig.counted("reads")["full"] >= NEEDED["full"]


def test_aborted_and_preempted_while_pages_are_on_their_way(truth: Truth, left: Path) -> None:
    with disk_engine(truth, left) as rig:
        files = break_files(rig)
        files.hold()
        key = rig.engine.add(SOME[0], max_tokens=4)
        step_until(rig, rig.promoter.under_way, "nothing is read")
        rig.engine.abort([key])
        files.let_go()
        rig.assert_clean()
        assert_warm(rig, 1)
        rig.forget_locally()

        running = rig.engine.add(SOME[0], max_tokens=60)
        step_until(rig, lambda: len(rig.engine._records[running].tokens) > 2, "it does not run")
        assert rig.tier.wait_idle(30)
        rig.side.store.reset()
        files.hold()
        rig.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        step_until(rig, rig.promoter.under_way, "nothing is read for the preempted request")
        files.let_go()
        step_until(rig, lambda: rig.engine.finished(running), "the preempted request does not end")
        result = rig.engine.take_result(running)
        assert result.tokens[:4] == truth.of(SOME[0]).tokens[:4]
        assert len(result.tokens) == 60


def test_pages_of_an_adapter_stay_off_the_disk(keeper: Keeper, tmp_path: Path) -> None:
    """An adapter that was trained again in place has its old name, and other weights."""
    keeper.close()
    path = tmp_path / "disk"
    asked = {}
    for life in (1, 2):
        adapter = LoRARequest("a", 1, write_adapter(tmp_path / str(life), life))
        with Engine(
            "plain-mini",
            connector=disk_options(path),
            num_blocks=POOL_BLOCKS,
            max_model_len=512,
            enable_lora=True,
            max_lora_rank=8,
        ) as engine:
            engine.step_until_idle()
            below = engine.connector.scheduler_side.below
            asked[life] = [
                engine.run(SOME[:1], max_tokens=4, lora_request=lora)[0] for lora in (adapter, None)
            ]
            engine.step_until_idle()
            assert below.not_durable > 0
            assert below.tier.wait_idle(30)
    with_adapter, without = zip(*asked.values(), strict=True)
    assert [r.external_hit_tokens for r in with_adapter] == [0, 0]
    assert with_adapter[0].tokens != with_adapter[1].tokens
    assert [r.external_hit_tokens > 0 for r in without] == [False, True]
    assert without[0].tokens == without[1].tokens
