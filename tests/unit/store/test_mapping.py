"""Shared memory in huge pages: mapped where they fit, never needed, nothing changed in what is there."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvquilt.store import Arena, map_memory, mapping, pool
from kvquilt.store.pool import Prefault

MIB = 1 << 20


def huge_mapped() -> int:
    """Bytes of shared memory that this process has mapped as huge pages."""
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped")) << 10


def num_mappings() -> int:
    """Mappings of arenas in this process."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        return sum("memfd:kvquilt" in line for line in lines)


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("kvquilt-test")
    os.ftruncate(made, 16 * MIB)
    yield made
    os.close(made)


@pytest.fixture
def huge(fd: int) -> int:
    """Size of a huge page, where this system gives shared memory any."""
    size = mapping.huge_page_bytes()
    if not 0 < size <= 4 * MIB:
        pytest.skip("this system has no huge pages of a few MiB, or wants none")
    os.posix_fallocate(fd, 0, 16 * MIB)
    memory = map_memory(fd, 16 * MIB)
    if mapping._libc.madvise(mapping._address(memory), 16 * MIB, mapping._MADV_COLLAPSE):
        pytest.skip("this kernel collapses no shared memory into huge pages, or has none to give")
    return size


@pytest.mark.parametrize("length", [4096, 3 * MIB + 4096, 12 * MIB])
def test_a_mapping_is_the_file(fd: int, length: int) -> None:
    for offset in (0, 4096, 2 * MIB + 8192):
        memory = map_memory(fd, length, offset)
        assert (memory.nbytes, memory.itemsize, memory.readonly) == (length, 1, False)
        memory[0], memory[length - 1] = 17, 18
        assert os.pread(fd, 1, offset) + os.pread(fd, 1, offset + length - 1) == b"\x11\x12"
        os.pwrite(fd, b"\x13", offset + length // 2)
        assert memory[length // 2] == 19


def test_it_lies_where_huge_pages_of_the_file_can_be_mapped(fd: int) -> None:
    huge = mapping.huge_page_bytes()
    if not 0 < huge <= 4 * MIB:
        pytest.skip("this system has no huge pages of a few MiB, or wants none")
    for offset in (0, 4096, 3 * MIB):
        memory = map_memory(fd, 8 * MIB, offset)
        assert (mapping._address(memory) - offset) % huge == 0


@pytest.mark.parametrize("size", [4096, 12 * MIB])
def test_it_is_mapped_until_nobody_holds_any_of_it(size: int) -> None:
    before = num_mappings()
    arena = Arena(0, "full", 1, size)
    memory = map_memory(arena.fd, size)
    arena.close()
    part = np.frombuffer(memory[4090:], dtype=np.uint8)
    del memory
    assert num_mappings() == before + 1
    assert not part.any()
    del part
    assert num_mappings() == before


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing(fd: int) -> None:
    def addresses() -> int:
        with open("/proc/self/statm") as line:
            return int(line.read().split()[0])

    gone = os.dup(fd)
    os.close(gone)
    before = addresses()
    for _ in range(8):
        with pytest.raises(OSError, match="Bad file descriptor"):
            map_memory(gone, 1 << 34)
    assert addresses() - before < (1 << 34) // 4096


def test_prefaulted_arenas_are_in_huge_pages(huge: int) -> None:
    arena = Arena(0, "full", 40, 300 << 12)
    before = huge_mapped()
    Prefault([arena]).run()
    memory = map_memory(arena.fd, arena.size_bytes)
    np.frombuffer(memory, dtype=np.uint8)[::4096].max()
    # The last of them is not whole; a few may not be had.
    assert huge_mapped() - before >= arena.size_bytes // huge // 2 * huge
    arena.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_later_extents_change_nothing_in_earlier_ones(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of 1.2 MiB: extents begin and end inside huge pages, and each is in use before the next comes."""
    stride = 300 << 12
    monkeypatch.setattr(pool, "EXTENT_BYTES", max(slots * stride, 4 * MIB))
    arena = Arena(0, "full", 23, stride)
    memory = map_memory(arena.fd, arena.size_bytes)
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(23, stride)
    growing, seen = Prefault([arena]), 0
    while seen < 23:
        growing._grow(arena)
        assert arena.usable_slots > seen
        rows[seen : arena.usable_slots] = np.arange(seen + 1, arena.usable_slots + 1)[:, None]
        seen = arena.usable_slots
        assert (rows == np.where(np.arange(23) < seen, np.arange(1, 24), 0)[:, None]).all()
    assert growing.failures == 0
    assert os.fstat(arena.fd).st_blocks * 512 == os.fstat(arena.fd).st_size == arena.size_bytes
    arena.close()


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_where_they_are_not_wanted_pages_stay_small(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(mapping, "_SETTINGS", tmp_path)
    assert mapping.huge_page_bytes() == 0
    arena = Arena(0, "full", 40, 300 << 12)
    before = huge_mapped()
    Prefault([arena]).run()
    memory = map_memory(arena.fd, arena.size_bytes)
    assert not np.frombuffer(memory, dtype=np.uint8).any()
    assert huge_mapped() == before
    assert arena.usable_slots == 40
    arena.close()
