"""A disk that fails under a running engine: requests end right, host memory serves, the tier comes back."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engine.disk import MODEL, DiskRig, FaultyFiles, break_files, disk_engine
from engine.processes import wait_until
from engine.rig import SOME, Keeper, Truth, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OTHERS = random_prompts(41, 200, 200, 200, 200, 200, 200)


@pytest.fixture(scope="module")
def engine(
    truths: dict[str, Truth], keeper: Keeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DiskRig]:
    keeper.close()
    if MODEL not in truths:
        truths[MODEL] = Truth(MODEL)
    with disk_engine(truths[MODEL], tmp_path_factory.mktemp("faults") / "disk") as rig:
        rig.tier._tick_seconds = 0.05
        yield rig


@pytest.fixture
def rig(engine: DiskRig) -> Iterator[DiskRig]:
    engine.rest()
    assert engine.engine.reset_prefix_cache(reset_connector=True)
    engine.fill(SOME)
    engine.rest()
    yield engine
    assert engine.tier.state == "on"
    engine.assert_clean()


@pytest.fixture
def files(rig: DiskRig) -> Iterator[FaultyFiles]:
    files = break_files(rig)
    yield files
    files.heal()
    wait_until(lambda: rig.tier.state == "on", "the tier is not switched on again")


def assert_ram_serves(rig: DiskRig) -> None:
    rig.forget_locally()
    warm = rig.run(SOME)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME)


def assert_disk_serves(rig: DiskRig) -> None:
    wait_until(lambda: rig.tier.state == "on", "the tier is not switched on again")
    rig.forget_ram()
    reads = rig.sum("reads")
    warm = rig.run(SOME)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME)
    assert rig.sum("reads") > reads


def assert_off(rig: DiskRig, why: str) -> None:
    wait_until(lambda: rig.tier.state == "off", "the tier is not switched off")
    assert why in rig.tier.stats().why


def test_disk_full(rig: DiskRig, files: FaultyFiles) -> None:
    files.write_error = OSError(errno.ENOSPC, "No space left on device")
    results = rig.fill(OTHERS)
    assert {r.finish_reason for r in results} == {"length"}
    assert_off(rig, "No space left")
    assert_ram_serves(rig)
    assert sum(group.dropped.get("error", 0) for group in rig.tier.stats().groups) > 0
    files.heal()
    assert_disk_serves(rig)  # what had been written before
    writes = rig.sum("writes")
    rig.fill(random_prompts(42, 200))
    rig.rest()
    assert rig.sum("writes") > writes


def test_reads_that_fail(rig: DiskRig, files: FaultyFiles) -> None:
    files.read_error = OSError(errno.EIO, "Input/output error")
    rig.forget_ram()
    results = rig.fill(SOME)
    rig.assert_answers(results, SOME)
    assert {r.external_hit_tokens for r in results} == {0}
    assert_off(rig, "")
    assert_ram_serves(rig)
    files.heal()
    wait_until(lambda: rig.tier.state == "on", "the tier is not switched on again")
    rig.forget_ram()
    rig.fill(SOME)  # whatever could not be read is computed, and written again
    assert_disk_serves(rig)


def test_reads_that_hang(rig: DiskRig, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.promoter, "_timeout", 0.2)
    monkeypatch.setattr(rig.tier, "_stall_seconds", 0.4)
    rig.forget_ram()
    late = rig.promoter.counts["timed_out"]
    files.hold()
    results = rig.fill(SOME)
    rig.assert_answers(results, SOME)
    assert {r.external_hit_tokens for r in results} == {0}
    assert files.held > 0
    assert rig.promoter.counts["timed_out"] > late
    assert_off(rig, "no answer")
    # What hangs keeps its slots until it ends; all others are saved and served.
    cold = rig.fill(OTHERS)
    rig.forget_locally()
    warm = rig.run(OTHERS)
    assert {r.external_hit_tokens for r in warm} == {192}
    assert [r.tokens for r in warm] == [r.tokens for r in cold]
    files.let_go()
    monkeypatch.undo()
    assert_disk_serves(rig)


def test_directory_removed(rig: DiskRig) -> None:
    shutil.rmtree(rig.tier.options.path)
    assert_off(rig, "removed")
    assert_ram_serves(rig)
    wait_until(lambda: rig.tier.state == "on", "the tier is not switched on again")
    assert rig.sum("pages") == 0
    assert Path(rig.tier.options.path).is_dir()
    rig.forget_ram()
    rig.assert_answers(rig.fill(SOME), SOME)
    assert_disk_serves(rig)
