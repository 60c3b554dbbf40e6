"""Shared memory in huge pages: mapped where they fit, never needed, nothing changed in what is there."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
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


def num_addresses() -> int:
    """Bytes of this process's address space that are taken."""
    gc.collect()
    with open("/proc/self/statm") as line:
        return int(line.read().split()[0]) * 4096


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


@pytest.mark.parametrize("works", [True, False])
def test_no_addresses_are_lost(fd: int, works: bool) -> None:
    """Neither by mappings that are given up, nor where the system refuses one."""
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.ftruncate(fd, 1 << 40)
    map_memory(fd, 1 << 40)
    before = num_addresses()
    for _ in range(32):
        if works:
            map_memory(fd, 12 * MIB, 4096)
        else:
            with pytest.raises(OSError, match="Permission denied"):
                map_memory(read_only, 1 << 34)
    assert num_addresses() - before < 32 * MIB
    os.close(read_only)


def test_threads_may_use_it_until_the_process_has_ended() -> None:
    """A thread that writes while the interpreter ends must not find its memory gone."""
    script = """
import atexit, os, threading
def last():
    for _ in range(3):  # whatever is done at exit has been done when this begins, and the thread goes on
        written.clear()
        assert written.wait(60)
atexit.register(last)  # runs after what is registered later, by the imports
from kvquilt.store import map_memory
fd = os.memfd_create("x")
os.ftruncate(fd, 1 << 24)
memory, zeros, written = map_memory(fd, 1 << 24), os.open("/dev/zero", os.O_RDONLY), threading.Event()
def work():
    while True:
        os.preadv(zeros, [memory], 0)
        memory[0] = 1
        written.set()
threading.Thread(target=work, daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("length", "offset"),
    [(0, 0), (-1, 0), (16 * MIB + 1, 0), (8 * MIB, 12 * MIB), (4096, -4096), (1, 1 << 40)],
)
def test_what_is_not_in_the_file_is_refused(fd: int, length: int, offset: int) -> None:
    with pytest.raises(ValueError, match="not in the file"):
        map_memory(fd, length, offset)


def test_prefaulted_arenas_are_in_huge_pages(huge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are whole, although extents begin and end inside of them; a few may not be had."""
    monkeypatch.setattr(pool, "EXTENT_BYTES", 4 * MIB)
    arena = Arena(0, "full", 40, 300 << 12)
    before = huge_mapped()
    Prefault([arena]).run()
    memory = map_memory(arena.fd, arena.size_bytes)
    assert not np.frombuffer(memory, dtype=np.uint8)[::4096].any()
    assert huge_mapped() - before >= (arena.size_bytes // huge - 3) * huge
    arena.close()


def test_memory_that_cannot_be_had_is_an_error(fd: int) -> None:
    """Else its first use would end the process: `touch` is the proof that there is memory."""
    memory = map_memory(fd, 16 * MIB)
    mapping.touch(memory)
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="Bad address"):
        mapping.touch(memory)


def test_slots_are_not_used_before_their_memory_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(memory: memoryview) -> None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    monkeypatch.setattr(pool, "touch", fail)
    arena = Arena(0, "full", 40, 300 << 12)
    growing = Prefault([arena])
    growing.run()
    assert (arena.usable_slots, growing.failures) == (0, 1)
    arena.close()


def test_without_room_for_a_whole_huge_page_an_extent_takes_what_it_needs(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "huge_page_bytes", lambda: 2 * MIB)
    asked = []

    def allocate(fd: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        if offset + length > 3 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    pool.populate_extent(fd, 0, MIB)
    pool.populate_extent(fd, MIB, 2 * MIB)
    assert asked == [(0, 2 * MIB), (MIB, 3 * MIB), (MIB, 2 * MIB)]
    with pytest.raises(OSError, match="No space left"):
        pool.populate_extent(fd, 3 * MIB, MIB)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_later_extents_change_nothing_in_earlier_ones(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of 1.2 MiB: extents begin and end inside huge pages, and each is in use before the next comes."""
    stride = 300 << 12
    monkeypatch.setattr(pool, "EXTENT_BYTES", max(slots * stride, 2 * MIB))
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
