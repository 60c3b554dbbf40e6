"""What a start makes of files that are not as they were left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvquilt.testing.tier_faults import FaultyFiles, FileFault
from kvquilt.tiers import queues
from kvquilt.tiers.directory import MANIFEST
from kvquilt.tiers.files import Files
from kvquilt.tiers.format import BLOCK_BYTES, entry_dtype, header_bytes
from unit.tiers.disk_support import (
    budget_for,
    load,
    load_all,
    make_tier,
    namespace_path,
    one_full,
    prompt,
    save,
    save_several,
    three_kinds,
    whole,
)
from unit.tiers.tier_support import TICK_SECONDS, Clock, until

LAYOUT = one_full()
BUDGET = budget_for(LAYOUT, 20)
CHAIN = prompt(LAYOUT, 0, units=12)
SLOT_BYTES = 4096 + header_bytes(0)


def written(root: Path) -> Path:
    tier = make_tier(root, LAYOUT, BUDGET)
    save(tier, CHAIN)
    tier.close()
    return namespace_path(tier)


def found(root: Path) -> tuple[int, int, int]:
    """Pages that a start finds, that can be read, and that are found bad."""
    tier = make_tier(root, LAYOUT, BUDGET)
    try:
        pages = tier.stats().groups[0].pages
        good = len(load(tier, CHAIN, 0, range(12)))
        return pages, good, tier.stats().groups[0].bad
    finally:
        tier.close()


def test_slots_that_a_truncation_took_do_not_come_back_with_the_slab(tmp_path: Path) -> None:
    space = written(tmp_path)
    os.truncate(space / "arena00.slab", BLOCK_BYTES + 5 * SLOT_BYTES + 100)
    assert found(tmp_path) == (5, 5, 0)
    assert found(tmp_path) == (5, 5, 0)


def test_what_a_shortened_table_has_lost_is_found_by_its_headers(tmp_path: Path) -> None:
    space = written(tmp_path)
    os.truncate(space / "arena00.table", BLOCK_BYTES + 3 * entry_dtype(0).itemsize)
    assert found(tmp_path) == (12, 12, 0)


def test_who_only_reads_needs_neither_table_nor_stamps(tmp_path: Path) -> None:
    space = written(tmp_path)
    for kind in ("table", "stamps"):
        (space / f"arena00.{kind}").unlink()
    tier = make_tier(tmp_path, LAYOUT, BUDGET, write="never")
    assert len(load(tier, CHAIN, 0, range(12))) == 12
    tier.close()
    assert sorted(path.name for path in space.iterdir()) == ["arena00.slab", "lock", "manifest.json"]


def test_a_start_removes_nothing_that_is_not_named_like_a_namespace(tmp_path: Path) -> None:
    """A directory for the tier may hold other things: dpkg/info is no namespace without a manifest."""
    kept = [tmp_path / "dpkg" / "info", tmp_path / "dp0" / "notes", tmp_path / "dp" / ("0" * 32)]
    half_made = tmp_path / "dp0" / ("0" * 32)
    for path in [*kept, half_made]:
        path.mkdir(parents=True)
        (path / "file").write_text("")
    written(tmp_path)
    assert all((path / "file").exists() for path in kept)
    assert not half_made.exists()


class KilledAtHeader(Files):
    """Kills its process when the header of slot 5 is read."""

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if offset == BLOCK_BYTES + 5 * SLOT_BYTES:
            os.kill(os.getpid(), signal.SIGKILL)
        super().read(fd, buffers, offset)


@pytest.mark.parametrize("left", [0, BLOCK_BYTES + 3 * entry_dtype(0).itemsize])
def test_a_start_that_is_killed_while_it_reads_headers_loses_no_page(tmp_path: Path, left: int) -> None:
    space = written(tmp_path)
    os.truncate(space / "arena00.table", left)
    child = os.fork()
    if child == 0:
        make_tier(tmp_path, LAYOUT, BUDGET, files=KilledAtHeader())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert found(tmp_path) == (12, 12, 0)


def refused(offset: int, length: int, match: str) -> FileFault:
    """A part of the medium that cannot be read."""
    return FileFault({"read"}, error=errno.EIO, match=match, from_offset=offset, to_offset=offset + length)


def test_headers_that_cannot_be_read_now_are_found_by_the_next_start(tmp_path: Path) -> None:
    (written(tmp_path) / "arena00.table").unlink()
    files = FaultyFiles()
    with files.inject(refused(BLOCK_BYTES + 5 * SLOT_BYTES, 2 * SLOT_BYTES, ".slab")):
        tier = make_tier(tmp_path, LAYOUT, BUDGET, files=files)
        assert tier.stats().groups[0].pages == 10
        tier.close()
    assert found(tmp_path) == (12, 12, 0)


def test_a_slab_that_gives_no_header_at_start_keeps_its_pages(tmp_path: Path) -> None:
    (written(tmp_path) / "arena00.table").unlink()
    files = FaultyFiles()
    with files.inject(refused(BLOCK_BYTES, 1 << 40, ".slab")):
        tier = make_tier(tmp_path, LAYOUT, BUDGET, files=files)
        assert tier.state == "off"
        tier.close()
    assert found(tmp_path) == (12, 12, 0)


def test_a_bad_block_of_a_table_costs_no_page(tmp_path: Path) -> None:
    budget = budget_for(LAYOUT, 200)
    tier = make_tier(tmp_path, LAYOUT, budget)
    chain = prompt(LAYOUT, 0, units=150)
    save(tier, chain)
    tier.close()
    files = FaultyFiles()
    with files.inject(refused(2 * BLOCK_BYTES, BLOCK_BYTES, ".table")) as fault:
        tier = make_tier(tmp_path, LAYOUT, budget, files=files)
        assert fault.num_calls
        assert load_all(tier, chain) == whole(LAYOUT, chain)
        tier.close()


def test_after_a_reset_between_two_slabs_no_slot_is_lost(tmp_path: Path) -> None:
    layout, size = three_kinds(), 2 << 20
    tier = make_tier(tmp_path, layout, size)
    save_several(tier, [prompt(layout, i) for i in range(10)])
    tier.close()
    files, clock = FaultyFiles(), Clock()
    with files.inject(refused(BLOCK_BYTES, 1 << 40, "arena01.table")):
        tier = make_tier(tmp_path, layout, size, files=files, clock=clock, tick_seconds=TICK_SECONDS)
        assert tier.state == "off"
        assert tier.reset()
    clock.now += 60.0
    until(lambda: tier.state == "on")
    tier.audit()
    assert [group.pages for group in tier.stats().groups] == [0, 0, 0]
    tier.close()


@pytest.mark.parametrize("stamp", [(1 << 63) - 1, (1 << 63) - 5, 1 << 62, -1])
def test_no_stamp_stops_the_clock(tmp_path: Path, stamp: int) -> None:
    layout, size = three_kinds(), 2 << 20
    tier = make_tier(tmp_path, layout, size)
    chain = prompt(layout, 0)
    save(tier, chain)
    tier.close()
    for path in namespace_path(tier).glob("*.stamps"):
        np.full(path.stat().st_size // 8, stamp, dtype="<i8").tofile(path)
    tier = make_tier(tmp_path, layout, size)
    assert load_all(tier, chain) == whole(layout, chain)
    for number in range(1, 30):
        last = prompt(layout, number)
        save(tier, last)
        tier.audit()
        assert load_all(tier, last) == whole(layout, last)
    tier.close()


def test_a_reader_that_is_reset_takes_nothing_over_later(tmp_path: Path) -> None:
    written(tmp_path)
    files, clock = FaultyFiles(), Clock()
    with files.inject(refused(BLOCK_BYTES, 1 << 40, ".table")):
        tier = make_tier(
            tmp_path, LAYOUT, BUDGET, write="never", files=files, clock=clock, tick_seconds=TICK_SECONDS
        )
        assert tier.state == "off"
        assert tier.reset() is False  # the pages are another process's
    clock.now += 60.0
    until(lambda: tier.state == "on")
    assert not tier.present(CHAIN, 0, 0, 12).any()
    tier.close()


def test_a_reader_forgets_with_its_writer(tmp_path: Path) -> None:
    """What the writer has saved since its reset is found as at a start."""
    clock = Clock()
    writer = make_tier(tmp_path, LAYOUT, BUDGET)
    save(writer, CHAIN)
    reader = make_tier(tmp_path, LAYOUT, BUDGET, write="never", clock=clock, tick_seconds=TICK_SECONDS)
    assert len(load(reader, CHAIN, 0, range(12))) == 12
    assert writer.reset() is True
    until(lambda: reader.state == "off")
    assert not reader.present(CHAIN, 0, 0, 12).any()
    later = prompt(LAYOUT, 1, 12)
    save(writer, later)
    clock.now += 60.0
    until(lambda: reader.state == "on")
    assert not reader.present(CHAIN, 0, 0, 12).any()
    assert len(load(reader, later, 0, range(12))) == 12
    reader.close()
    writer.close()


def test_a_reader_that_cannot_ask_for_a_reset_serves_nothing(tmp_path: Path) -> None:
    """A manifest that can't be read may say that there was one."""
    clock, manifest = Clock(), written(tmp_path) / MANIFEST
    reader = make_tier(tmp_path, LAYOUT, BUDGET, write="never", clock=clock, tick_seconds=TICK_SECONDS)
    away = manifest.with_name(".away")
    manifest.rename(away)
    manifest.mkdir()
    until(lambda: reader.state == "off")
    clock.now += 60.0
    until(lambda: "directory" in reader.stats().why)
    manifest.rmdir()
    away.rename(manifest)
    clock.now += 60.0
    until(lambda: reader.state == "on")
    assert len(load(reader, CHAIN, 0, range(12))) == 12
    reader.close()


def test_recency_outlives_a_start_that_ends_early(tmp_path: Path) -> None:
    """Nothing is known of it where the tables could not be read."""
    stamps = written(tmp_path) / "arena00.stamps"
    before, files = stamps.read_bytes(), FaultyFiles()
    with files.inject(refused(BLOCK_BYTES, 1 << 40, ".table")):
        tier = make_tier(tmp_path, LAYOUT, BUDGET, files=files)
        assert tier.state == "off"
        tier.close()
    assert stamps.read_bytes() == before


def test_the_tail_goes_before_the_head_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed right after a save has kept no stamps: the entries say it."""
    monkeypatch.setattr(queues, "_BATCH_BYTES", 5 * SLOT_BYTES)
    tier = make_tier(tmp_path / "disk", LAYOUT, BUDGET)
    save(tier, CHAIN)
    shutil.copytree(tmp_path / "disk", tmp_path / "left")
    tier.close()
    tier = make_tier(tmp_path / "left", LAYOUT, BUDGET)
    slots = tier.plan.slots["full"]
    save(tier, prompt(LAYOUT, 1, units=slots - 4))
    assert tier.present(CHAIN, 0, 0, 12).tolist() == [True] * 4 + [False] * 8
    tier.close()
