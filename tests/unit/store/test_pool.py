"""Arenas: sealed shared memory, usable extent by extent, nothing left after close."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading

import pytest

from kvquilt.errors import KVQuiltError, SizingError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Arena, Store, pool
from unit.store.store_support import Plan, chain_of, full32_window16, make_store, save_all


def open_arenas() -> int:
    """Descriptors of this process that are arenas of ours, and mappings of them."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    with open("/proc/self/maps") as maps:
        targets += maps.read().splitlines()
    return sum("memfd:kvquilt" in target for target in targets)


def test_an_arena_is_sealed_private_to_its_holders_and_of_fixed_size() -> None:
    arena = Arena(0, "full", num_slots=3, slot_stride=8192)
    try:
        assert os.fstat(arena.fd).st_size == arena.size_bytes == arena.info.size_bytes == 3 * 8192
        assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)
    finally:
        arena.close()
        arena.close()


@pytest.mark.parametrize(("slots", "stride"), [(0, 4096), (1, 0), (1, 4097), (-1, 4096), (1 << 55, 4096)])
def test_impossible_sizes_are_refused_with_the_arenas_name(slots: int, stride: int) -> None:
    before = open_arenas()
    with pytest.raises(SizingError, match="'full'"):
        Arena(0, "full", slots, stride)
    assert open_arenas() == before


def test_memory_becomes_usable_extent_by_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "EXTENT_BYTES", 2 * 4096)
    allowed, asked = threading.Semaphore(2), threading.Semaphore(0)

    def populate(fd: int, offset: int, length: int) -> None:
        asked.release()
        assert allowed.acquire(timeout=30)
        pool.populate_extent(fd, offset, length)

    def usable() -> list[int]:
        store.stats()
        return [arena.total - arena.unusable for arena in store.audit().arenas]

    store = make_store(full32_window16(), 5, prefault=True, populate=populate)
    chain = chain_of(store.layout, "abcdefgh")
    try:
        # One extent of each arena is there at once, so that the first request can be saved.
        assert usable() == [2, 2]
        assert save_all(store, chain).skipped_full == {"full": 2, "win": 6}
        allowed.release()
        for _ in range(4):  # the fourth is asked for when the third is done
            assert asked.acquire(timeout=30)
        assert usable() == [4, 2]
        assert save_all(store, chain).skipped_full == {"win": 6}
        for _ in range(3):
            allowed.release()
        store._prefault._thread.join(timeout=30)  # type: ignore[union-attr]
        assert usable() == [5, 5]
        assert save_all(store, chain).skipped_full == {"win": 3}
    finally:
        for _ in range(10):
            allowed.release()
        store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFAULT])
def test_a_failing_extent_is_logged_once_counted_and_survived(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "EXTENT_BYTES", 2 * 4096)

    def populate(fd: int, offset: int, length: int) -> None:
        if offset >= 2 * 4096:
            raise OSError(code, os.strerror(code))
        pool.populate_extent(fd, offset, length)

    with (
        caplog.at_level(logging.ERROR),
        make_store(full32_window16(), 6, prefault="sync", populate=populate) as store,
    ):
        assert [arena.usable_slots for arena in store.arenas] == [2, 2]
        assert store.stats().prefault_failures == 2
        assert len(caplog.records) == 1
        save_all(store, chain_of(store.layout, "abcdefgh"))
        assert store.lookup("r", chain_of(store.layout, "abcdefgh"), 129).tokens == 32
        assert [arena.unusable for arena in store.audit().arenas] == [4, 4]


def test_close_stops_the_thread_and_leaves_no_descriptor_or_mapping() -> None:
    before, threads = open_arenas(), threading.active_count()
    with make_store(full32_window16(), 40_000, prefault=True) as store:
        assert open_arenas() > before
    store.close()
    assert (open_arenas(), threading.active_count()) == (before, threads)
    with pytest.raises(KVQuiltError, match="closed"):
        store.audit()


def test_real_memory_is_given_and_readable() -> None:
    with make_store(full32_window16(), 3, prefault="sync") as store:
        assert [os.fstat(arena.fd).st_blocks * 512 for arena in store.arenas] == [3 * 4096] * 2


def test_shared_rows_is_one_arena_for_all_groups() -> None:
    layout = full32_window16()
    plan = Plan({"full": 3, "win": 4}, {"full": 12288, "win": 12288}, partition="shared_rows")
    with Store(layout, plan, prefault=False) as store:
        assert store.arena_of == (0, 0)
        assert [(arena.num_slots, arena.slot_stride) for arena in store.arenas] == [(7, 12288)]


def test_groups_without_pages_have_no_arena() -> None:
    groups = [
        CacheGroup("scratch", kind="scratch", tokens_per_block=16, page_bytes=64),
        CacheGroup("empty", kind="sliding", window=8, tokens_per_block=16, page_bytes=0),
        CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=64),
    ]
    with make_store(CacheLayout(groups), 2) as store:
        assert store.arena_of == (-1, -1, 0)
        chain = chain_of(store.layout, "ab")
        assert store.missing(chain, 1, [0, 1]).tolist() == [False, False]  # type: ignore[arg-type]
        save_all(store, chain)
        assert store.lookup("r", chain, 33).tokens == 32


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        (Plan({"full": 1}), "'win'.*0 slots"),
        (Plan({"full": 1, "win": 1}, {"full": 4096, "win": 2048}), "'win'.*2048"),
        (Plan({"full": 1, "win": 1}, {"full": 5000, "win": 4096}), "'full'.*5000"),
        (Plan({"full": 1, "win": 1}, num_ranks=2), "2 ranks"),
        (Plan({"full": 1, "win": 1}, partition="elastic"), "elastic"),
    ],
)
def test_plans_that_do_not_fit_are_refused_and_leave_nothing(plan: Plan, match: str) -> None:
    before = open_arenas()
    with pytest.raises(SizingError, match=match):
        Store(full32_window16(), plan)
    assert open_arenas() == before
