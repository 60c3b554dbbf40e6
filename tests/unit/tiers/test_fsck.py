"""`kvquilt fsck`: what it counts, what it drops, what it leaves alone, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvquilt.cli.main import app
from kvquilt.errors import ConfigError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.tiers import NVMeTier
from kvquilt.tiers import fsck as fsck_module
from kvquilt.tiers.files import Files, aligned_buffer
from kvquilt.tiers.format import BLOCK_BYTES, entry_dtype, header_bytes
from kvquilt.tiers.fsck import FsckReport, GroupReport, fsck
from kvquilt.tiers.slot_pages import SlotPages
from unit.tiers.disk_support import (
    LIMIT_SECONDS,
    UNIT,
    SlabFiles,
    content,
    load_all,
    make_tier,
    namespace_of,
    namespace_path,
    prompt,
    save,
    three_kinds,
    whole,
)

LAYOUT = three_kinds()
FULL, WIN, STATE = 0, 1, 2
BUDGET = 4 << 20
ENTRY = entry_dtype(1).itemsize
PROMPTS = [prompt(LAYOUT, number) for number in range(3)]
PAGES = {"full": 12, "win": 24, "state": 6}
TOTALS = ("pages", "bytes", "bad", "orphaned")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts in one namespace."""
    root = tmp_path_factory.mktemp("written") / "kv"
    tier = make_tier(root, LAYOUT, BUDGET)
    for chain in PROMPTS:
        save(tier, chain)
    tier.close()
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """A copy of it for one test; nobody uses it."""
    return Path(shutil.copytree(written, tmp_path / "kv"))


@pytest.fixture
def space(root: Path) -> Path:
    """The namespace's directory."""
    return next(root.glob("dp0/*"))


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["fsck", *map(str, args)])


def told(*args: object, status: int = 0) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == status, (result.exit_code, result.stderr)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def group(report: FsckReport, name: str) -> GroupReport:
    found = [one for space in report.namespaces for one in space.groups if one.name == name]
    assert len(found) == 1
    return found[0]


@contextlib.contextmanager
def reopened(root: Path) -> Iterator[NVMeTier]:
    tier = make_tier(root, LAYOUT, BUDGET)
    try:
        yield tier
    finally:
        tier.close()


def served(root: Path) -> list[dict[int, list[int]]]:
    """What an engine that starts now gets of the three prompts; wrong bytes fail."""
    with reopened(root) as tier:
        return [load_all(tier, chain) for chain in PROMPTS]


def slot_bytes(name: str) -> int:
    page = next(g.page_bytes for g in LAYOUT.groups if g.name == name)
    return -(-page // BLOCK_BYTES) * BLOCK_BYTES + header_bytes(1)


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        assert file.read(len(data)) != data
        file.seek(offset)
        file.write(data)


def slot_at(slot: int, name: str = "full") -> int:
    return BLOCK_BYTES + slot * slot_bytes(name)


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


# ---- sound ----


def test_a_sound_directory_is_said_to_be_sound_and_nothing_is_touched(root: Path) -> None:
    before = snapshot(root)
    report = told(root)
    assert snapshot(root) == before
    assert (report["bad"], report["orphaned"], report["sound"]) == (0, 0, True)
    assert report["pages"] == sum(PAGES.values())
    assert report["bytes"] == sum(slot_bytes(name) * pages for name, pages in PAGES.items())


def test_json_has_stable_keys(root: Path, space: Path) -> None:
    report = told(root)
    assert set(report) == {
        *TOTALS, "path", "format_version", "sound", "leftovers", "disk_bytes", "removed", "namespaces",
    }  # fmt: skip
    (one,) = report["namespaces"]
    assert set(one) == {
        *TOTALS, "path", "manifest", "model", "digest", "generation", "partition", "in_use", "disk_bytes",
        "leftovers", "problems", "repaired", "groups",
    }  # fmt: skip
    manifest = json.loads((space / "manifest.json").read_text())
    facts = ("path", "manifest", "model", "digest", "generation", "partition", "in_use")
    assert [one[name] for name in facts] == [
        str(space), "ok", "some/model", manifest["digest"], 1, "solved", False,
    ]  # fmt: skip
    assert [set(g) for g in one["groups"]] == [{*TOTALS, "name", "orphaned_by"}] * 3
    assert {g["name"]: g["pages"] for g in one["groups"]} == PAGES
    for total in TOTALS:
        assert report[total] == one[total] == sum(g[total] for g in one["groups"])


def test_json_is_alone_on_stdout_and_the_table_is_there_without_it(root: Path, space: Path) -> None:
    (space / ".manifest.json.abc.tmp").write_bytes(b"draft")
    shutil.copytree(space, root / "dp0" / ("0" * 32))
    result = run(root, "--repair", "--json")
    json.loads(result.stdout)
    assert "removed" in result.stderr
    result = run(root)
    assert result.exit_code == 0
    for word in ("full", "win", "state", "some/model", "sound", "42 pages"):
        assert word in result.stdout


def test_all_ranks_of_data_parallelism_are_checked(tmp_path: Path) -> None:
    for rank in range(2):
        tier = make_tier(tmp_path, LAYOUT, 2 * BUDGET, dp_rank=rank, dp_size=2)
        save(tier, PROMPTS[rank])
        tier.close()
    report = fsck(tmp_path)
    assert [Path(one.path).parent.name for one in report.namespaces] == ["dp0", "dp1"]
    assert report.pages == 28
    change(tmp_path / "dp1" / Path(report.namespaces[1].path).name / "arena00.slab", slot_at(0), b"x")
    assert [one.bad for one in fsck(tmp_path).namespaces] == [0, 1]


def test_rows_that_groups_share_are_told_apart_by_group(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, LAYOUT, BUDGET, partition="shared_rows")
    for chain in PROMPTS:
        save(tier, chain)
    tier.close()
    report = fsck(tmp_path)
    assert {g.name: g.pages for g in report.namespaces[0].groups} == PAGES
    assert report.namespaces[0].partition == "shared_rows"
    assert (report.bad, report.orphaned) == (0, 0)


# ---- bad ----


@pytest.mark.parametrize(
    "offset", [0, 8, 40, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 8191], ids=lambda at: f"byte{at}"
)
def test_a_flipped_bit_anywhere_in_a_slot_is_one_bad_page(root: Path, space: Path, offset: int) -> None:
    slab = space / "arena00.slab"
    old = slab.read_bytes()[slot_at(3) + offset]
    change(slab, slot_at(3) + offset, bytes([old ^ 1]))
    report = told(root, status=1)
    assert (report["bad"], report["sound"], report["pages"]) == (1, False, 42)
    assert [g["bad"] for g in report["namespaces"][0]["groups"]] == [1, 0, 0]
    assert report["orphaned"] == 3  # two of the window and a state end inside the bad page
    assert told(root, "--repair")["bad"] == 1
    after = told(root)
    assert (after["pages"], after["bad"], after["orphaned"]) == (38, 0, 0)
    assert sum(len(blocks) for found in served(root) for blocks in found.values()) == 38


def test_two_slots_swapped_are_two_bad_pages(root: Path, space: Path) -> None:
    slab, size = space / "arena01.slab", slot_bytes("win")
    data = slab.read_bytes()
    first, second = (data[slot_at(i, "win") :][:size] for i in (2, 7))
    change(slab, slot_at(2, "win"), second)
    change(slab, slot_at(7, "win"), first)
    assert group(fsck(root), "win").bad == 2
    run(root, "--repair")
    assert fsck(root).bad == 0


def test_a_truncated_slab_loses_the_pages_past_its_end(root: Path, space: Path) -> None:
    os.truncate(space / "arena00.slab", slot_at(5) + 100)
    report = fsck(root)
    assert (group(report, "full").bad, report.bad) == (7, 7)
    assert "ends before" in " ".join(report.namespaces[0].problems)
    assert fsck(root, repair=True).sound
    report = fsck(root)
    assert (report.bad, group(report, "full").pages) == (0, 5)
    served(root)
    assert fsck(root).bad == 0


def test_pages_that_an_engine_has_lost_to_a_truncation_do_not_come_back_as_bad_ones(
    root: Path, space: Path
) -> None:
    os.truncate(space / "arena00.slab", slot_at(5))
    assert sum(len(found[FULL]) for found in served(root)) == 5
    assert sum(len(found[FULL]) for found in served(root)) == 5
    assert fsck(root).bad == 0


def test_a_slab_without_its_first_block_counts_all_that_its_table_lists(root: Path, space: Path) -> None:
    change(space / "arena02.slab", 0, b"nonsense")
    report = fsck(root)
    assert (group(report, "state").bad, report.bad) == (6, 6)
    assert fsck(root, repair=True).sound
    assert (fsck(root).bad, group(fsck(root), "state").pages) == (0, 0)
    assert [found[STATE] for found in served(root)] == [[], [], []]


def test_a_slab_that_is_missing_is_bad(root: Path, space: Path) -> None:
    (space / "arena01.slab").unlink()
    report = told(root, status=1)
    assert (report["bad"], report["namespaces"][0]["problems"]) == (1, ["arena01.slab is missing"])
    assert told(root, "--repair")["sound"]
    assert told(root)["bad"] == 0


def test_a_page_of_another_namespace_is_bad(root: Path, space: Path) -> None:
    tier = make_tier(root, LAYOUT, 2 * BUDGET, dp_size=2, salt="other")
    for chain in PROMPTS:
        save(tier, chain)
    other = namespace_path(tier)
    tier.close()
    foreign = (other / "arena00.slab").read_bytes()[slot_at(4) :][: slot_bytes("full")]
    change(space / "arena00.slab", slot_at(4), foreign)
    assert {one.path: one.bad for one in fsck(root).namespaces} == {str(space): 1, str(other): 0}


def test_without_a_table_pages_are_found_by_their_headers(root: Path, space: Path) -> None:
    (space / "arena00.table").unlink()
    (space / "arena01.stamps").unlink()
    change(space / "arena00.slab", slot_at(2) + BLOCK_BYTES, b"\xff\xff\xff")
    before = snapshot(root)
    report = fsck(root)
    assert (group(report, "full").pages, group(report, "full").bad, report.pages) == (12, 1, 42)
    assert report.namespaces[0].problems == ["arena00.table is lost: the headers of all slots were read"]
    assert snapshot(root) == before
    assert fsck(root, repair=True).sound
    report = fsck(root)
    assert (report.bad, group(report, "full").pages, report.namespaces[0].problems) == (0, 11, [])


def test_a_damaged_entry_costs_no_page(root: Path, space: Path) -> None:
    change(space / "arena00.table", BLOCK_BYTES + 5, b"\xff")
    report = fsck(root)
    assert (report.pages, report.bad) == (42, 0)
    assert "1 entries are damaged" in report.namespaces[0].problems[0]
    assert fsck(root, repair=True).sound
    assert fsck(root).namespaces[0].problems == []
    assert served(root) == [whole(LAYOUT, chain) for chain in PROMPTS]


def test_a_table_that_ends_early_costs_no_page(root: Path, space: Path) -> None:
    os.truncate(space / "arena00.table", BLOCK_BYTES + 5 * ENTRY)
    report = fsck(root)
    assert (report.pages, report.bad) == (42, 0)
    assert served(root) == [whole(LAYOUT, chain) for chain in PROMPTS]


def test_pages_that_the_medium_refuses_to_give_are_bad(root: Path) -> None:
    class Refusing(Files):
        def read(self, fd: int, buffers: Any, offset: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("arena00.slab") and offset >= BLOCK_BYTES:
                raise OSError(5, "input/output error")
            super().read(fd, buffers, offset)

    report = fsck(root, files=Refusing())
    assert group(report, "full").bad == 12
    assert group(report, "win").bad == 0


# ---- orphaned ----


def test_pages_from_before_a_reset_are_orphaned_and_not_bad(root: Path) -> None:
    with reopened(root) as tier:
        assert tier.reset()
        save(tier, prompt(LAYOUT, 9))
    report = told(root)
    assert report["bad"] == 0
    assert report["namespaces"][0]["generation"] == 2
    assert report["pages"] == 14
    assert report["orphaned"] > 0
    assert {why for g in report["namespaces"][0]["groups"] for why in g["orphaned_by"]} == {"generation"}
    assert told(root, "--repair")["namespaces"][0]["repaired"]
    after = told(root)
    assert (after["pages"], after["orphaned"], after["bad"]) == (14, 0, 0)


def test_a_key_in_two_slots_is_one_page_and_one_orphan(root: Path, space: Path) -> None:
    """Two engines after another may have written the same page to two slots."""
    shutil.rmtree(space)
    for slot in (0, 1):
        tier = make_tier(root, LAYOUT, BUDGET)
        slab = tier._opened.slabs[FULL]  # type: ignore[union-attr]
        key = PROMPTS[0].keys(FULL)[0]
        size = tier.plan.slot_bytes["full"]
        memory = np.frombuffer(aligned_buffer(size), dtype=np.uint8)
        memory[:] = content(FULL, key, size)
        one = SlotPages(
            np.asarray([slot], dtype=np.int64),
            np.asarray([FULL], dtype=np.int64),
            key.reshape(1, 4),
            np.zeros((1, 1, 4), dtype=np.uint64),
            memory,
            np.zeros(1, dtype=np.int64),
        )
        slab.write_pages(one, 1, 5)
        tier.close()
    found = group(fsck(root), "full")
    assert (found.pages, found.orphaned_by) == (2, {"duplicate": 1})
    fsck(root, repair=True)
    assert (group(fsck(root), "full").pages, fsck(root).orphaned) == (1, 0)


def test_checkpoints_whose_dense_page_is_gone_are_orphaned(root: Path, space: Path) -> None:
    """Slots 0-3 of the full group hold prompt 0: without block 1 (tokens 32-63) its window pages that
    end at 48 and 64 and its state that ends at 64 serve nobody."""
    table = space / "arena00.table"
    slot = next(
        slot
        for slot in range(12)
        if table.read_bytes()[BLOCK_BYTES + slot * ENTRY :][:32] == PROMPTS[0].keys(FULL)[1].tobytes()
    )
    change(table, BLOCK_BYTES + slot * ENTRY, bytes(ENTRY))
    report = fsck(root)
    assert {g.name: g.orphaned_by for g in report.namespaces[0].groups} == {
        "full": {}, "win": {"checkpoint": 2}, "state": {"checkpoint": 1},
    }  # fmt: skip
    assert (report.bad, report.sound) == (0, True)
    fsck(root, repair=True)
    assert (fsck(root).orphaned, fsck(root).pages) == (0, 38)


def test_checkpoints_of_a_bad_dense_page_are_orphaned(root: Path, space: Path) -> None:
    for slot in range(12):
        change(space / "arena00.slab", slot_at(slot) + BLOCK_BYTES, b"\xa5\x5a\xa5")
    report = fsck(root)
    assert (report.bad, report.orphaned) == (12, 30)


def test_a_drafters_pages_are_never_called_orphans(tmp_path: Path) -> None:
    """A page past the boundary is its peek block: which dense page it goes with cannot be said."""
    layout = CacheLayout(
        [
            CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=4096),
            CacheGroup("draft", kind="sliding", tokens_per_block=16, window=16, page_bytes=4096, draft=True),
        ],
        UNIT,
    )
    tier = make_tier(tmp_path, layout, BUDGET)
    save(tier, prompt(layout, 0), {1: range(4)})
    tier.close()
    report = fsck(tmp_path)
    assert (group(report, "draft").pages, report.orphaned) == (4, 0)


def test_pages_of_a_seed_that_died_with_its_process_are_orphaned(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, LAYOUT, BUDGET, namespace=namespace_of(LAYOUT, hash_seed=None))
    save(tier, PROMPTS[0])
    assert (fsck(tmp_path).orphaned, fsck(tmp_path).pages) == (0, 14)
    tier.close()
    report = fsck(tmp_path)
    assert (report.orphaned, report.bad) == (14, 0)


# ---- manifests and leftovers ----


@pytest.mark.parametrize("damage", ["missing", "json", "digest", "slabs", "generation", "link"])
def test_a_namespace_without_a_good_manifest_is_bad_and_goes(root: Path, space: Path, damage: str) -> None:
    path = space / "manifest.json"
    text = path.read_text()
    if damage == "missing":
        path.unlink()
    elif damage == "json":
        path.write_text(text[: len(text) // 2])
    elif damage == "digest":
        path.write_text(text.replace("some/model", "other/model"))
    elif damage == "slabs":
        path.write_text(text.replace('"arena00"', '"../arena00"'))
    elif damage == "generation":
        path.write_text(text.replace('"generation": 1', '"generation": 3'))
    else:
        path.rename(root / "elsewhere.json")
        path.symlink_to(root / "elsewhere.json")
    report = told(root, status=1)
    assert (report["bad"], report["pages"]) == (1, 0)
    assert report["namespaces"][0]["manifest"] == ("missing" if damage == "missing" else "damaged")
    assert report["namespaces"][0]["path"] == str(space)
    assert space.is_dir()
    assert told(root, "--repair")["namespaces"][0]["repaired"]
    assert not space.exists()
    assert told(root)["namespaces"] == []


def test_a_namespace_that_cannot_be_read_does_not_hide_the_others(root: Path, space: Path) -> None:
    twin = Path(shutil.copytree(space, space.with_name("0" * 32)))
    (twin / "lock").unlink()
    (twin / "lock").symlink_to(space / "lock")
    for options in ([], ["--repair"]):
        report = told(root, *options, status=1)
        facts = {one["path"]: (one["manifest"], one["bad"]) for one in report["namespaces"]}
        assert facts == {str(twin): ("unreadable", 1), str(space): ("ok", 0)}
    assert (twin / "arena00.slab").exists()


def test_a_namespace_of_another_version_is_left_alone(root: Path, space: Path) -> None:
    path = space / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    report = told(root, "--repair")
    assert (report["namespaces"][0]["manifest"], report["bad"]) == ("other_version", 0)
    assert (space / "arena00.slab").exists()


def test_drafts_of_dead_processes_are_told_and_removed(root: Path, space: Path) -> None:
    draft = space / ".manifest.json.xyz.tmp"
    draft.write_bytes(b"{}")
    assert told(root)["namespaces"][0]["leftovers"] == [str(draft)]
    assert draft.exists()
    assert told(root, "--repair")["leftovers"] == 1
    assert not draft.exists()
    assert told(root)["leftovers"] == 0


def test_what_is_not_named_like_a_namespace_is_not_ours(root: Path) -> None:
    """Neither a check nor the next start of an engine may remove it."""
    ours = [root / "dpkg" / "info", root / "dp0" / "notes", root / "dp" / ("0" * 32)]
    for path in ours:
        path.mkdir(parents=True)
        (path / "kept.txt").write_text("kept")
    assert len(told(root, "--repair")["namespaces"]) == 1
    served(root)
    assert all((path / "kept.txt").read_text() == "kept" for path in ours)


# ---- live owners ----


def test_a_live_owner_is_checked_and_not_disturbed(root: Path, space: Path) -> None:
    draft = space / ".manifest.json.xyz.tmp"
    with reopened(root) as tier:
        draft.write_bytes(b"{}")  # it may be about to take its place
        change(space / "arena00.slab", slot_at(0) + BLOCK_BYTES, b"\xff\xfe\xfd")
        spare = make_tier(root, LAYOUT, 2 * BUDGET, dp_size=2, salt="spare")
        save(spare, PROMPTS[0])
        other = namespace_path(spare)
        spare.close()
        change(other / "arena00.slab", slot_at(0) + BLOCK_BYTES, b"\xff\xfe\xfd")
        before = snapshot(space)
        result = run(root, "--repair", "--json")
        assert result.exit_code == 1
        assert "in use by a live process" in result.stderr
        report = json.loads(result.stdout)
        facts = {one["path"]: (one["in_use"], one["bad"], one["repaired"]) for one in report["namespaces"]}
        assert facts == {str(space): (True, 1, False), str(other): (False, 1, True)}
        assert report["leftovers"] == 0
        assert snapshot(space) == before
        assert sum(len(load_all(tier, chain)[FULL]) for chain in PROMPTS) == 11
    assert told(root, "--repair")["leftovers"] == 1
    assert told(root)["bad"] == 0


def test_an_engine_that_starts_during_a_check_is_not_refused(root: Path) -> None:
    started = []

    def meanwhile(path: str, done: int, total: int) -> None:
        if not started:
            started.append(make_tier(root, LAYOUT, BUDGET))

    assert fsck(root, progress=meanwhile).bad == 0
    assert started[0].state == "on"
    started[0].close()


def test_a_namespace_that_a_start_removes_meanwhile_is_not_bad(
    root: Path, space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = fsck_module._survey

    def removed(path: Path, *rest: object) -> object:
        shutil.rmtree(path)
        return survey(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fsck_module, "_survey", removed)
    report = fsck(root)
    assert (report.bad, report.namespaces) == (0, [])


def test_pages_that_a_live_owner_overwrites_meanwhile_are_not_bad(tmp_path: Path) -> None:
    """It writes between our look at the table and at the slots, evicting what the table has told."""
    tier = make_tier(tmp_path, LAYOUT, 2 << 20)
    for number in range(12):
        save(tier, prompt(LAYOUT, number))
    numbers = iter(range(100, 1000))

    class Meanwhile(SlabFiles):
        def read(self, fd: int, buffers: Any, offset: int) -> None:
            if self.moves_pages(fd, buffers):
                for _ in range(3):
                    save(tier, prompt(LAYOUT, next(numbers)))
            super().read(fd, buffers, offset)

    report = fsck(tmp_path, files=Meanwhile())
    assert next(numbers) > 103
    assert report.bad == 0
    assert report.namespaces[0].in_use
    tier.close()


def test_a_reset_during_a_check_is_seen(root: Path) -> None:
    with reopened(root) as tier:
        once: list[int] = []

        def reset(path: str, done: int, total: int, tier: NVMeTier = tier, once: list[int] = once) -> None:
            if not once:
                once.append(1)
                assert tier.reset()

        report = fsck(root, progress=reset)
        assert (report.namespaces[0].generation, report.pages, report.bad) == (2, 0, 0)


# ---- removing ----


def test_remove_by_digest_takes_one_namespace_and_checks_the_rest(root: Path, space: Path) -> None:
    tier = make_tier(root, LAYOUT, 2 * BUDGET, dp_size=2, salt="other")
    other = namespace_path(tier)
    tier.close()
    report = told(root, "--remove", other.name[:8])
    assert report["removed"] == [str(other)]
    assert [one["path"] for one in report["namespaces"]] == [str(space)]
    assert not other.exists()
    assert told(root, "--remove", space)["namespaces"] == []
    assert not space.exists()


@pytest.mark.parametrize("name", ["", "zz", "f" * 31, "dp0", "/etc", "../kv"])
def test_remove_of_what_is_not_there_removes_nothing(root: Path, space: Path, name: str) -> None:
    result = run(root, "--remove", name)
    assert result.exit_code == 2
    assert "no namespace" in result.stderr
    assert space.is_dir()


def test_remove_of_what_may_mean_two_removes_neither(root: Path, space: Path) -> None:
    twin = space.with_name(space.name[:6] + "0" * 26)
    shutil.copytree(space, twin)
    result = run(root, "--remove", space.name[:6])
    assert result.exit_code == 2
    assert "give more of the digest" in result.stderr
    assert space.is_dir()
    assert twin.is_dir()


def test_remove_of_a_namespace_in_use_is_refused(root: Path, space: Path) -> None:
    with reopened(root) as tier:
        result = run(root, "--remove", space.name)
        assert result.exit_code == 2
        assert "in use by a live process" in result.stderr
        assert load_all(tier, PROMPTS[0]) == whole(LAYOUT, PROMPTS[0])


# ---- bad usage ----


def test_directories_that_cannot_be_checked_are_clear_errors(root: Path, space: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "home" / "dpkg").mkdir(parents=True)
    (tmp_path / "home" / "lock").write_text("")
    shutil.copytree(root, tmp_path / "open")
    (tmp_path / "open").chmod(0o777)
    for name, message in {
        "missing": "No such file", "empty": "no directory of the disk tier", "file": "is no directory",
        "link": "symbolic link", "home": "no directory of the disk tier", "open": "writable by nobody else",
        "kv/dp0": "lies inside one", f"kv/dp0/{space.name}": "lies inside one",
    }.items():  # fmt: skip
        result = run(tmp_path / name, "--json")
        assert (result.exit_code, result.stdout) == (2, ""), name
        assert message in result.stderr, name
    assert not (tmp_path / "missing").exists()
    assert run().exit_code == 2
    assert run(root, "--no-such-option").exit_code == 2


def test_a_directory_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="must belong to this user"):
        fsck(root)


def test_no_symbolic_link_is_followed(root: Path, space: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    shutil.copytree(root / "dp0", away)
    (root / "dp1").symlink_to(away)
    (root / "dp0" / ("1" * 32)).symlink_to(away / space.name)
    assert len(fsck(root, repair=True).namespaces) == 1
    kept = (space / "arena00.slab").rename(tmp_path / "slab")
    (space / "arena00.slab").symlink_to(kept)
    before = kept.read_bytes()
    report = fsck(root)
    assert (report.bad, report.sound) == (1, False)
    assert kept.read_bytes() == before


def test_a_directory_in_which_no_engine_has_written_yet_is_sound(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "lock").write_text("")
    assert told(tmp_path)["namespaces"] == []


def test_it_runs_as_a_command_without_torch_and_without_an_engine(root: Path) -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom kvquilt.cli.main import app\n"
        f"status = CliRunner().invoke(app, ['fsck', {str(root)!r}, '--json']).exit_code\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\nsys.exit(status)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ran.returncode == 0, ran.stderr


def test_reports_survive_msgspec(root: Path) -> None:
    report = fsck(root)
    assert msgspec.json.decode(msgspec.json.encode(report), type=FsckReport) == report
