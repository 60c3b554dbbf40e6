"""What a start makes of files that are not as they were left."""

from __future__ import annotations

import os
from pathlib import Path

from kvquilt.tiers.format import BLOCK_BYTES, entry_dtype, header_bytes
from unit.tiers.disk_support import (
    budget_for,
    load,
    make_tier,
    namespace_path,
    one_full,
    prompt,
    save,
)

LAYOUT = one_full()
BUDGET = budget_for(LAYOUT, 20)
CHAIN = prompt(LAYOUT, 0, units=12)


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
    os.truncate(space / "arena00.slab", BLOCK_BYTES + 5 * (4096 + header_bytes(0)) + 100)
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
