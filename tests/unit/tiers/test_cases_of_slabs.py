"""Known faults of other disk tiers, shown on slabs. The letters are those of docs/regressions.md."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvquilt import CacheGroup, CacheLayout, longest_hit
from kvquilt.testing.tier_faults import FaultyFiles, FileFault
from kvquilt.tiers import NVMeTier, queues
from kvquilt.tiers.files import Files
from kvquilt.tiers.format import BLOCK_BYTES, header_bytes
from kvquilt.tiers.fsck import fsck
from kvquilt.tiers.namespaces import tree_bytes
from unit.tiers.disk_support import (
    LIMIT_SECONDS,
    SlabFiles,
    budget_for,
    kept_groups,
    load,
    load_all,
    make_tier,
    memory_for,
    namespace_path,
    one_full,
    prompt,
    save,
    whole,
)
from unit.tiers.tier_support import until

FULL = one_full()
SLOT = 4096 + header_bytes(0)


class Counting(SlabFiles):
    """Counts the calls that reach the medium, and can let reads of pages hang."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self.calls += 1
        if self.moves_pages(fd, buffers):
            self.reading.set()
            assert self.go_on.wait(LIMIT_SECONDS)
        super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        self.calls += 1
        super().write(fd, buffers, offset)


def pages_of(tier: NVMeTier, group: int = 0) -> int:
    return tier.stats().groups[group].pages


def test_b38_a_full_tier_evicts_and_what_a_load_reads_survives(tmp_path: Path) -> None:
    """B38: the disk filled up, since nothing was ever deleted. Room for ten blocks: of 25 written there are
    never more than ten, and the two that a load is reading meanwhile, the oldest of all, survive."""
    files, budget = Counting(), budget_for(FULL, 10)
    tier = make_tier(tmp_path, FULL, budget, files=files)
    assert tier.plan.slots == {"full": 10}
    first = prompt(FULL, 0, 10)
    save(tier, first)
    files.go_on.clear()
    wanted = memory_for(tier, first, 0, [8, 9], fill=False)
    ended, answers = threading.Event(), []
    tier.load([wanted], lambda results: (answers.extend(results), ended.set()))  # type: ignore[func-returns-value]
    assert files.reading.wait(LIMIT_SECONDS)
    for number in range(1, 16):
        tier.save([memory_for(tier, prompt(FULL, number, 1), 0, [0], fill=True)], lambda: None)
        assert pages_of(tier) <= 10
        assert tree_bytes(tmp_path) <= budget
        wait_for_writes(tier)
    files.go_on.set()
    assert ended.wait(LIMIT_SECONDS)
    assert tier.wait_idle(LIMIT_SECONDS)
    assert answers[0].tolist() == [True, True]
    assert load(tier, first, 0, range(10)) == [8, 9]
    newest = [number for number in range(1, 16) if load(tier, prompt(FULL, number, 1), 0, [0])]
    assert newest == list(range(8, 16))
    tier.audit()
    tier.close()


def wait_for_writes(tier: NVMeTier) -> None:
    workers = tier._workers
    with workers._changed:
        assert workers._changed.wait_for(lambda: not workers.pages("write"), LIMIT_SECONDS)


def test_b38_a_start_over_a_larger_directory_cuts_it_in_a_few_calls(tmp_path: Path) -> None:
    """B38: the first attempt at a limit trimmed old files in quadratic time at start. With ten times as many
    old blocks a start makes the same calls, and ten blocks are left."""
    calls = []
    for old in (25, 250):
        root = tmp_path / str(old)
        tier = make_tier(root, FULL, budget_for(FULL, old))
        save(tier, prompt(FULL, 0, old))
        assert pages_of(tier) == old
        tier.close()
        files, budget = Counting(), budget_for(FULL, 10)
        tier = make_tier(root, FULL, budget, files=files)
        calls.append(files.calls)
        assert 0 < pages_of(tier) <= 10
        assert tree_bytes(root) <= budget
        kept = load(tier, prompt(FULL, 0, old), 0, range(old))
        assert len(kept) == pages_of(tier)
        tier.close()
        assert fsck(root).bad == 0
    assert calls[0] == calls[1]


def states_and_full() -> CacheLayout:
    """Three groups of states, and one full group."""
    states = [
        CacheGroup(f"state{i}", kind="recurrent", tokens_per_block=64, page_bytes=size)
        for i, size in enumerate((4096, 10_000, 20_000))
    ]
    return CacheLayout([*states, CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=8192)], 16)


def joint_hit(tier: NVMeTier) -> int:
    chain = prompt(tier.layout, 0, 16)
    presence = {
        tier.layout.groups[g].name: tier.present(chain, g, 0, chain.num_blocks(g))
        for g in kept_groups(tier.layout)
    }
    return longest_hit(tier.layout, presence, 257).tokens


def test_b59_a_hit_is_what_all_groups_still_hold_and_a_file_of_a_wrong_size_is_a_miss(tmp_path: Path) -> None:
    """B59: after a restart the files of some groups were shorter, or of another size, and group lengths
    disagreed. A restart finds slots of the same size; with a part of one group's slab gone the hit is the
    longest that all four groups hold; a slab of a wrong size is a miss, made anew, and no error."""
    layout, budget = states_and_full(), 4 << 20
    chain = prompt(layout, 0, 16)
    tier = make_tier(tmp_path, layout, budget)
    save(tier, chain)
    strides = [slab.slot_stride for slab in tier._opened.slabs]  # type: ignore[union-attr]
    space = namespace_path(tier)
    tier.close()

    tier = make_tier(tmp_path, layout, budget)
    assert [slab.slot_stride for slab in tier._opened.slabs] == strides  # type: ignore[union-attr]
    assert (load_all(tier, chain), joint_hit(tier)) == (whole(layout, chain), 256)
    tier.close()

    os.truncate(space / "arena01.slab", BLOCK_BYTES + 2 * strides[1])
    tier = make_tier(tmp_path, layout, budget)
    left = load(tier, chain, 1, range(4))
    assert len(left) == 2
    assert joint_hit(tier) == 64 * (max(left) + 1)
    tier.close()

    (space / "arena02.slab").write_bytes(bytes(12_345))
    tier = make_tier(tmp_path, layout, budget)
    assert tier.state == "on"
    assert (joint_hit(tier), pages_of(tier, 2)) == (0, 0)
    assert load(tier, chain, 2, range(4)) == []
    assert sum(group.bad for group in tier.stats().groups) == 0
    save(tier, chain)
    assert (load_all(tier, chain), joint_hit(tier)) == (whole(layout, chain), 256)
    tier.close()


def test_b67_evicting_a_page_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    """B67: the first eviction of a file that somebody had deleted ended the engine. Room for 20, 24 written;
    two slots have been wiped by hand: one is evicted, the other is a miss, counted once."""
    budget = budget_for(FULL, 20)
    tier = make_tier(tmp_path, FULL, budget)
    chain = prompt(FULL, 0, 20)
    save(tier, chain)
    slab = namespace_path(tier) / "arena00.slab"
    data = slab.read_bytes()
    for block in (0, 19):
        at = data.index(chain.keys(0)[block].tobytes()) // BLOCK_BYTES * BLOCK_BYTES
        with slab.open("r+b") as file:
            file.seek(at)
            file.write(bytes(SLOT))
    for number in range(1, 5):
        save(tier, prompt(FULL, number, 1))
    assert load(tier, chain, 0, range(20)) == list(range(1, 16))  # the tail goes first
    stats = tier.stats().groups[0]
    assert (stats.evictions, stats.bad, stats.pages) == (4, 1, 19)
    assert tier.state == "on"
    tier.audit()
    tier.close()
    assert fsck(tmp_path).bad == 0


def test_b67_slabs_that_are_deleted_under_a_running_tier_do_no_harm(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, FULL, budget_for(FULL, 20))
    save(tier, prompt(FULL, 0, 20))
    for kind in ("slab", "table", "stamps"):
        (namespace_path(tier) / f"arena00.{kind}").unlink()
    for number in range(1, 5):
        save(tier, prompt(FULL, number, 1))
        assert load(tier, prompt(FULL, number, 1), 0, [0]) == [0]
    tier.audit()
    tier.close()
    tier = make_tier(tmp_path, FULL, budget_for(FULL, 20))
    assert (tier.state, pages_of(tier)) == ("on", 0)
    tier.close()


@pytest.mark.parametrize("at_first", [True, False])
def test_b67_without_room_for_its_slots_a_tier_keeps_what_fits(tmp_path: Path, at_first: bool) -> None:
    """B67: and where memory could not be had, the same: pages are dropped and counted."""

    class Full(Files):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            if offset >= BLOCK_BYTES:
                raise OSError(errno.ENOSPC, "no space left")
            super().allocate(fd, offset, length)

    held = 0
    if not at_first:  # an earlier, smaller run has left ten slots
        tier = make_tier(tmp_path, FULL, budget_for(FULL, 10))
        held = save(tier, prompt(FULL, 0, 10))
        tier.close()
    tier = make_tier(tmp_path, FULL, budget_for(FULL, 20), files=Full())
    for number in range(1, 25):
        save(tier, prompt(FULL, number, 1))
    stats = tier.stats().groups[0]
    assert (tier.state, stats.pages, stats.dropped.get("full", 0)) == ("on", held, 0 if held else 24)
    tier.audit()
    tier.close()


def test_however_batches_end_the_tail_of_a_prefix_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_BATCH_BYTES", 2 * SLOT)
    files = FaultyFiles()
    tier = make_tier(tmp_path, FULL, budget_for(FULL, 20), files=files, threads=4)
    chain, ended = prompt(FULL, 0, 6), threading.Event()
    second = FileFault(
        {"write"},
        effect="hang",
        match=".slab",
        from_offset=BLOCK_BYTES + 2 * SLOT,
        to_offset=BLOCK_BYTES + 4 * SLOT,
    )
    with files.inject(second):
        tier.save([memory_for(tier, chain, 0, range(6), True)], ended.set)
        until(lambda: tier.stats().groups[0].writes == 4)
    assert ended.wait(LIMIT_SECONDS)
    assert tier._opened is not None
    assert tier._opened.index.oldest(0, 6, before=1 << 60).tolist() == [5, 4, 3, 2, 1, 0]
    tier.close()


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        *itertools.product(["save", "load"], ["gone", "too short", "before its start", "not aligned"]),
        ("load", "read-only"),
    ],
)
def test_memory_that_is_not_there_costs_no_slot(tmp_path: Path, call: str, fault: str) -> None:
    """The caller's fault, and told so; what was reserved or leased for it is given back."""
    tier, chain = make_tier(tmp_path, FULL, budget_for(FULL, 10)), prompt(FULL, 0, 10)
    if call == "load":
        save(tier, chain)
    pages = memory_for(tier, chain, 0, range(10), fill=False)
    if fault == "gone":
        pages.memory.release()
    elif fault == "too short":
        pages = replace(pages, memory=pages.memory[: len(pages.memory) - 1])
    elif fault == "read-only":
        pages = replace(pages, memory=pages.memory.toreadonly())
    elif fault == "before its start":
        pages = replace(pages, offsets=pages.offsets - 4096)
    else:
        pages = replace(pages, memory=pages.memory[8:], offsets=pages.offsets[:-1], blocks=pages.blocks[:-1])
    ended = threading.Event()
    with pytest.raises(ValueError, match=r"released|outside of the memory|aligned|read-only"):
        getattr(tier, call)([pages], lambda *_: ended.set())
    assert ended.is_set()
    tier.audit()
    if call == "save":
        save(tier, chain)
    assert load_all(tier, chain) == whole(FULL, chain)
    tier.close()
