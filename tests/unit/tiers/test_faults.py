"""The disk tier on a medium that fails: nobody waits, nothing wrong comes, and it comes back by itself."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain, pool
from kvquilt.testing.tier_faults import FaultyFiles, FaultyTier, FileFault
from kvquilt.testing.tier_pages import PageSource
from kvquilt.tiers import NVMeTier, RamTier, nvme
from kvquilt.tiers.base import GroupTierStats
from kvquilt.tiers.files import Files
from kvquilt.tiers.format import BLOCK_BYTES
from kvquilt.tiers.health import Health
from kvquilt.tiers.locks import LOCK
from kvquilt.tiers.manifest import MANIFEST, Manifest
from kvquilt.tiers.slab import Slab
from unit.tiers.tier_support import LIMIT_SECONDS, Clock, disk, until

DATA = BLOCK_BYTES  # where slots begin in a slab; a probe writes before it


@pytest.fixture
def source() -> PageSource:
    return PageSource(CacheLayout([CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=4096)]))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


class Rig:
    """Disk tiers in one directory over one faulty medium, by a clock that only the test moves."""

    def __init__(self, path: Path, source: PageSource, files: FaultyFiles, clock: Clock) -> None:
        self.path = path
        self.source = source
        self.files = files
        self.clock = clock
        self._tiers: list[NVMeTier] = []

    def open(self, num_bytes: int = 2 << 20, **more: float) -> NVMeTier:
        tier = disk(self.path, self.source, num_bytes, files=self.files, clock=self.clock, **more)
        self._tiers.append(tier)
        return tier

    def comes_back(self, tier: NVMeTier) -> None:
        """Let time pass until the tier is on."""

        def on() -> bool:
            self.clock.now += 1.0
            return tier.state == "on"

        until(on)

    def works(self, tier: NVMeTier, name: str = "works") -> None:
        chain = self.source.chain(name, 128)
        assert self.source.save(tier, chain) == 8
        assert self.source.load(tier, chain, 0).all()

    def full(self, tier: NVMeTier) -> GroupTierStats:
        assert tier.wait_idle(LIMIT_SECONDS)
        tier.audit()
        return tier.stats().groups[0]

    def present(self, tier: NVMeTier, chain: Chain) -> int:
        return int(tier.present(chain, 0, 0, chain.num_blocks(0)).sum())

    def namespace(self) -> Path:
        (path,) = (found.parent for found in self.path.glob(f"dp0/*/{MANIFEST}"))
        return path

    def close(self) -> None:
        for tier in self._tiers:
            assert tier.wait_idle(LIMIT_SECONDS)
            tier.close()
        assert [ended.calls for ended in self.source.ends if ended.calls != 1] == []


@pytest.fixture
def rig(tmp_path: Path, source: PageSource, files: FaultyFiles, clock: Clock) -> Iterator[Rig]:
    made = Rig(tmp_path / "disk", source, files, clock)
    yield made
    made.close()


def write_until_off(rig: Rig, tier: NVMeTier) -> None:
    """Save on a medium that fails, until the tier has had enough; nobody waits, nothing is raised."""
    for number in range(10):
        rig.source.save(tier, rig.source.chain(f"lost {number}", 32))
        assert tier.wait_idle(LIMIT_SECONDS)
        if tier.state == "off":
            return
    raise AssertionError("the tier never switched off")


# No space


def test_a_disk_that_is_full_at_start(rig: Rig) -> None:
    with rig.files.inject(FileFault({"allocate", "write"}, error=errno.ENOSPC)) as fault:
        tier = rig.open()
        assert tier.state == "off"
        assert "No space left" in tier.stats().why
        assert rig.source.save(tier, rig.source.chain("a", 64)) == 0
        assert rig.full(tier).dropped == {"off": 4}
        assert fault.num_calls > 0
    rig.comes_back(tier)
    rig.works(tier)


def test_a_disk_with_room_for_the_tables_alone(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with rig.files.inject(FileFault({"allocate"}, error=errno.ENOSPC, match=".slab", from_offset=DATA)):
        tier = rig.open()
        assert tier.state == "on"
        assert rig.source.save(tier, rig.source.chain("a", 64)) == 0
        assert rig.full(tier).dropped == {"full": 4}
    assert [record.message for record in caplog.records if "no room for slots" in record.message] != []
    rig.clock.now += 31.0  # there is room now
    slab = tier._opened.slabs[0]  # type: ignore[union-attr]
    until(lambda: slab.usable_slots == slab.num_slots)
    rig.works(tier)


def test_space_that_is_not_there_is_not_begun_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may give all that it has before it says that this is not enough."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        Files().allocate(fd, 0, 1 << 20)
        monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
        Files().allocate(fd, 0, 1 << 20)  # it has that already
        with pytest.raises(OSError, match="No space left"):
            Files().allocate(fd, 1 << 20, 1 << 20)
        assert os.fstat(fd).st_size == 1 << 20
    finally:
        os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_writes_that_fail_switch_it_off_and_it_comes_back(rig: Rig, code: int) -> None:
    tier, kept = rig.open(), rig.source.chain("kept", 128)
    rig.source.save(tier, kept)
    with rig.files.inject(FileFault({"write", "replace"}, error=code)):
        write_until_off(rig, tier)
        assert os.strerror(code) in tier.stats().why
        group = rig.full(tier)
        assert group.dropped["error"] == 3 * 2
        assert (group.pages, group.writes) == (8, 8)
        assert rig.source.save(tier, kept) == 0
        assert rig.present(tier, kept) == 0
        assert not rig.source.load(tier, kept, 0).any()
        assert rig.full(tier).dropped["off"] == 8
        rig.clock.now += 100.0
        until(lambda: tier.state == "off" and os.strerror(code) in tier.stats().why)
    rig.comes_back(tier)
    assert rig.source.load(tier, kept, 0).all()
    rig.works(tier)
    assert not any(rig.present(tier, rig.source.chain(f"lost {i}", 32)) for i in range(10))


@pytest.mark.parametrize("match", [".slab", ".table"])
@pytest.mark.parametrize("effect", ["short", None])
def test_what_a_failed_write_leaves_is_never_found(rig: Rig, match: str, effect: str | None) -> None:
    tier, chain = rig.open(), rig.source.chain("torn", 128)
    error = errno.EIO if effect is None else None
    fault = FileFault({"write"}, error=error, effect=effect, match=match, from_offset=DATA)  # type: ignore[arg-type]
    with rig.files.inject(fault):
        rig.source.save(tier, chain)
        assert rig.full(tier).dropped == {"error": 8}
    assert fault.num_calls > 0
    for again in (tier, None):
        tier = again or rig.open()
        assert rig.present(tier, chain) == 0
        assert not rig.source.load(tier, chain, 0).any()
        assert rig.full(tier).bad == 0
        tier.close()


# Reading


def test_pages_that_cannot_be_read_are_misses_once(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, error=errno.EIO, match=".slab", from_offset=DATA)) as fault:
        assert not rig.source.load(tier, chain, 0).any()
        calls = fault.num_calls
        assert rig.full(tier).bad == 10
        assert rig.present(tier, chain) == 0
        assert not rig.source.load(tier, chain, 0).any()
        assert (rig.full(tier).bad, fault.num_calls) == (10, calls)
    assert tier.state == "on"
    assert rig.source.save(tier, chain) == 10
    assert rig.source.load(tier, chain, 0).all()


def test_a_bad_block_takes_no_neighbour_along(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    third = DATA + 3 * 8192  # a block of header, one of payload
    fault = FileFault({"read"}, error=errno.EIO, match=".slab", from_offset=third, to_offset=third + 1)
    with rig.files.inject(fault):
        assert rig.source.load(tier, chain, 0).sum() == 9
    assert rig.full(tier).bad == 1
    assert rig.source.load(tier, chain, 0).sum() == 9
    assert rig.full(tier).bad == 1


def test_reads_that_go_on_failing_switch_it_off(rig: Rig) -> None:
    tier = rig.open()
    chains = [rig.source.chain(f"c{i}", 64) for i in range(5)]
    for chain in chains:
        rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, error=errno.EIO, match=".slab")):
        for chain in chains[:3]:
            assert not rig.source.load(tier, chain, 0).any()
        assert tier.wait_idle(LIMIT_SECONDS)
        assert tier.state == "off"
        assert not rig.source.load(tier, chains[4], 0).any()
    rig.comes_back(tier)
    assert rig.source.load(tier, chains[4], 0).all()
    assert rig.full(tier).bad == 12


@pytest.mark.parametrize("call", ["read", "write"])
def test_bytes_that_change_on_the_way_are_caught(rig: Rig, call: str) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    fault = FileFault({call}, effect="corrupt", match=".slab", from_offset=DATA)  # type: ignore[arg-type]
    with rig.files.inject(fault):
        rig.source.save(tier, chain)
        good = rig.source.load(tier, chain, 0)
    assert fault.num_calls > 0
    assert rig.full(tier).bad == 10 - good.sum() > 0
    assert rig.present(tier, chain) == good.sum()


# Direct I/O


@pytest.mark.parametrize("where", ["open", "write", "read"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_without_direct_io_it_goes_through_the_page_cache(
    rig: Rig, where: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    fault = FileFault(
        {where}, error=code, only_direct=where == "open", match="" if where == "open" else ".probe"
    )  # type: ignore[arg-type]
    with rig.files.inject(fault):
        tier = rig.open()
        assert tier.state == "on"
        rig.works(tier)
        shutil.rmtree(rig.path / "dp0")
        until(lambda: tier.state == "off")
        rig.comes_back(tier)
        rig.works(tier, "again")
    assert fault.num_calls == 2  # the probes; what is used is never opened so
    assert len([r for r in caplog.records if "takes no direct I/O" in r.message]) == 1
    assert list(rig.path.rglob("*.tmp")) == []


# A directory that cannot be written to, or goes


def test_a_read_only_directory_at_start(rig: Rig) -> None:
    with rig.files.inject(FileFault({"open", "replace"}, error=errno.EROFS)):
        tier = rig.open()
        assert tier.state == "off"
        assert "Read-only" in tier.stats().why
        assert tier.reset() is False
        assert rig.source.save(tier, rig.source.chain("a", 64)) == 0
    rig.comes_back(tier)
    rig.works(tier)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_whose_mode_forbids_writing(rig: Rig) -> None:
    rig.path.mkdir(mode=0o500)
    tier = rig.open()
    assert tier.state == "off"
    rig.path.chmod(0o700)
    rig.comes_back(tier)
    rig.works(tier)


def test_a_directory_that_becomes_read_only(rig: Rig) -> None:
    """What is there can still be read, until something has to be written."""
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    everything = {"open", "write", "allocate", "truncate", "replace"}
    with rig.files.inject(FileFault(everything, error=errno.EROFS)):  # type: ignore[arg-type]
        assert rig.source.load(tier, chain, 0).all()
        write_until_off(rig, tier)
    rig.comes_back(tier)
    assert rig.source.load(tier, chain, 0).all()


@pytest.mark.parametrize("what", ["root", "rank", "namespace", "replaced"])
def test_a_directory_that_is_removed_is_made_again(rig: Rig, what: str) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    paths = {"root": rig.path, "rank": rig.path / "dp0", "namespace": rig.namespace()}
    gone = paths.get(what, rig.namespace())
    gone.rename(rig.path.parent / "gone")
    if what == "replaced":
        shutil.copytree(rig.path.parent / "gone", gone)
    until(lambda: tier.state == "off")
    assert "removed, replaced or reset" in tier.stats().why
    assert rig.source.save(tier, chain) == 0
    rig.comes_back(tier)
    assert rig.present(tier, chain) == (10 if what == "replaced" else 0)
    assert rig.source.load(tier, chain, 0).sum() == rig.present(tier, chain)
    rig.works(tier)
    tier.close()
    again = rig.open()
    assert rig.present(again, rig.source.chain("works", 128)) == 8


def test_a_directory_that_is_removed_under_a_read(rig: Rig) -> None:
    """The new one is made when nobody reads from the old any more."""
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        target, ended = rig.source.blank(chain, 0), rig.source.ended()
        tier.load([target], ended)
        fault.wait_for_calls()
        shutil.rmtree(rig.namespace())
        until(lambda: tier.state == "off")
        rig.clock.now += 5.0
        assert not rig.source.load(tier, chain, 0).any()
        assert list(rig.path.glob(f"dp0/*/{MANIFEST}")) == []
    good = ended.wait()[0]
    assert (rig.source.right(target) | ~good).all()
    rig.comes_back(tier)
    rig.works(tier)


# A medium that does not answer


def test_a_read_that_hangs_switches_it_off_until_it_ends(rig: Rig) -> None:
    tier = rig.open()
    chains = [rig.source.chain(f"c{i}", 64) for i in range(9)]
    for chain in chains:
        rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        hung = []
        for chain in chains[:8]:  # more than there are threads
            target, ended = rig.source.blank(chain, 0), rig.source.ended()
            tier.load([target], ended)
            hung.append((target, ended))
        fault.wait_for_calls(4)
        until(lambda: len(tier._workers._busy) == 6)  # two wait to be among the four
        rig.clock.now += 11.0
        until(lambda: tier.state == "off")
        assert "no answer for 10 s" in tier.stats().why
        until(lambda: sum(ended.calls for _, ended in hung) == 2)  # those that no thread had begun
        other = rig.source.ended()
        tier.load([rig.source.blank(chains[8], 0)], other)
        assert other.calls == 1  # at once
        assert not other.results[0].any()
        assert rig.source.save(tier, rig.source.chain("new", 64)) == 0
        rig.clock.now += 200.0
        until(lambda: fault.num_waiting == 4)
        assert tier.state == "off"
    for target, ended in hung:
        good = ended.wait()[0]
        assert (rig.source.right(target) | ~good).all()
    rig.comes_back(tier)
    assert all(rig.source.load(tier, chain, 0).all() for chain in chains)
    assert rig.full(tier).bad == 0


def test_a_write_that_hangs_keeps_its_memory_until_it_ends(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 64)
    with rig.files.inject(FileFault({"write"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        saved = rig.source.ended()
        assert tier.save([rig.source.pages(chain, 0)], saved) == 4
        fault.wait_for_calls()
        rig.clock.now += 11.0
        until(lambda: tier.state == "off")
        assert saved.calls == 0
    saved.wait()
    rig.comes_back(tier)
    assert rig.source.load(tier, chain, 0).all()


def test_writes_leave_a_call_to_reads(rig: Rig) -> None:
    """Of four calls at once three write; more threads have their pages ready, and one is left for reads."""
    tier, kept = rig.open(), rig.source.chain("kept", 64)
    rig.source.save(tier, kept)
    chains = [rig.source.chain(f"c{i}", 64) for i in range(8)]
    with rig.files.inject(FileFault({"write"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        saved = [rig.source.ended() for _ in chains]
        for chain, ended in zip(chains, saved, strict=True):
            assert tier.save([rig.source.pages(chain, 0)], ended) == 4
        until(lambda: len(tier._workers._busy) == tier._workers._writers == 5)
        until(lambda: fault.num_waiting == 3)
        assert rig.source.load(tier, kept, 0).all()
        assert fault.num_waiting == 3
    for ended in saved:
        ended.wait()
    assert all(rig.source.load(tier, chain, 0).all() for chain in chains)


def test_what_the_queue_is_said_to_have_room_for_is_not_refused(rig: Rig) -> None:
    """Slots are longer than pages by their headers, here by as much as the page itself."""
    tier, chain = rig.open(queue_bytes=256 << 10), rig.source.chain("a", 64 * 16)
    size = tier.plan.slot_bytes["full"]
    with rig.files.inject(FileFault({"write"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        assert tier.save([rig.source.pages(chain, 0, range(10))], rig.source.ended()) == 10
        fault.wait_for_calls()
        rest = range(10, 10 + tier.room_bytes() // size)
        assert tier.save([rig.source.pages(chain, 0, rest)], rig.source.ended()) == len(rest) > 0
        assert tier.room_bytes() == 0
        assert tier.stats().groups[0].dropped == {}


def test_slots_that_are_being_read_are_not_written_to(rig: Rig) -> None:
    tier, chain = rig.open(1 << 20), rig.source.chain("a", 256)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        target, ended = rig.source.blank(chain, 0), rig.source.ended()
        tier.load([target], ended)
        fault.wait_for_calls()
        slots = tier.stats().groups[0].slots
        for number in range(2 * slots // 16):
            rig.source.save(tier, rig.source.chain(f"c{number}", 256))
        assert tier.stats().groups[0].evictions > slots // 2
    assert ended.wait()[0].all()
    assert rig.source.right(target).all()
    rig.full(tier)


def test_pages_withdrawn_under_a_read_are_not_called_bad(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        target, ended = rig.source.blank(chain, 0), rig.source.ended()
        tier.load([target], ended)
        fault.wait_for_calls()
        assert tier.withdraw(chain, 0, np.arange(5)) == 5
        saved = rig.source.ended()
        tier.save([rig.source.pages(chain, 0)], saved)  # the same pages again, in other slots
        saved.wait()
    good = ended.wait()[0]
    assert (rig.source.right(target) | ~good).all()
    assert rig.full(tier).bad == 0
    assert rig.source.load(tier, chain, 0).all()


def test_close_does_not_wait_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "_DRAIN_SECONDS", 0.01)
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)) as fault:
        ended = rig.source.ended()
        tier.load([rig.source.blank(chain, 0)], ended)
        fault.wait_for_calls()
        tier.close()
        assert ended.calls == 0  # its memory is still written to
        assert not rig.source.load(tier, chain, 0).any()
    ended.wait()


# Resets


def ends(tier: NVMeTier) -> bool:
    """Does `close` come back, whatever hangs?"""
    thread = threading.Thread(target=tier.close, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    return not thread.is_alive()


def test_close_does_not_wait_for_a_reset_that_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "_DRAIN_SECONDS", 0.01)
    tier = rig.open()
    with rig.files.inject(FileFault({"replace"}, error=errno.EIO)):
        assert tier.reset() is False
    with rig.files.inject(FileFault({"replace"}, effect="hang")) as fault:
        rig.clock.now += 1.0  # it is tried again
        fault.wait_for_calls()
        assert ends(tier)
    until(lambda: not tier._upkeep.is_alive())
    tier._close_opened()


def test_close_does_not_wait_for_space_that_is_given_slowly(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "_DRAIN_SECONDS", 0.01)
    monkeypatch.setattr(pool, "EXTENT_BYTES", 64 << 10)
    with rig.files.inject(
        FileFault({"allocate"}, effect="hang", match=".slab", from_offset=1 << 20)
    ) as fault:
        tier = rig.open(4 << 20)
        fault.wait_for_calls()
        assert ends(tier)
    tier._close_opened()


def test_a_medium_that_hangs_under_the_stamps_is_seen(rig: Rig) -> None:
    tier = rig.open()
    chain = rig.source.chain("a", 64)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"write"}, effect="hang", match=".stamps")) as fault:
        rig.clock.now += 31.0  # they are due
        fault.wait_for_calls()
        rig.clock.now += 11.0
        until(lambda: tier.state == "off")
    rig.comes_back(tier)
    rig.works(tier)


def test_a_tier_that_only_reads_comes_back(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 256)
    rig.source.save(tier, chain)
    tier.close()
    reader = disk(rig.path, rig.source, 2 << 20, write="never", files=rig.files, clock=rig.clock)
    with rig.files.inject(FileFault({"read"}, error=errno.EIO, match=".slab")):
        for block in range(5):
            rig.source.load(reader, chain, 0, [block])
        assert reader.state == "off"
    rig.comes_back(reader)
    assert rig.source.load(reader, chain, 0, range(8, 16)).all()
    reader.close()


def test_a_reset_that_cannot_be_recorded_says_so_and_holds(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"replace"}, error=errno.EIO)):
        assert tier.reset() is False
        assert tier.state == "off"
        assert "reset could not be recorded" in tier.stats().why
        assert rig.present(tier, chain) == 0
        rig.clock.now += 100.0
        until(lambda: "Input/output" in tier.stats().why)
    rig.comes_back(tier)
    assert rig.present(tier, chain) == 0
    rig.works(tier)
    tier.close()
    again = rig.open()
    assert rig.present(again, chain) == 0
    assert rig.present(again, rig.source.chain("works", 128)) == 8
    assert rig.full(again).bad == 0


def test_a_reset_that_could_not_be_recorded_is_recorded_at_the_end(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"replace"}, error=errno.EIO)):
        assert tier.reset() is False
    tier.close()
    assert rig.present(rig.open(), chain) == 0


def test_a_reset_without_an_answer_holds_nobody_up(rig: Rig) -> None:
    tier, chain = rig.open(stall_seconds=0.02), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"replace"}, effect="hang")) as fault:
        assert tier.reset() is False
        assert tier.reset() is False
        assert fault.num_calls == 1
        assert tier.state == "off"
        assert "no answer" in tier.stats().why
        assert rig.present(tier, chain) == 0
    rig.comes_back(tier)
    assert rig.present(tier, chain) == 0
    rig.works(tier)
    tier.close()
    again = rig.open()
    assert rig.present(again, chain) == 0
    assert rig.present(again, rig.source.chain("works", 128)) == 8


def test_close_does_not_wait_for_a_reset_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "_DRAIN_SECONDS", 0.01)
    tier = rig.open(stall_seconds=0.02)
    with rig.files.inject(FileFault({"replace"}, effect="hang")):
        assert tier.reset() is False
        tier.close()
        assert tier.reset() is False


def test_it_can_be_closed_just_when_a_reset_begins(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, begin, closed = rig.open(), threading.Thread.start, []

    def close_first(thread: threading.Thread) -> None:
        if thread.name == "kvquilt-disk-reset":
            tier.close()
            closed.append(True)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", close_first)
    assert tier.reset() is False
    assert closed
    assert rig.open().state == "on"  # nobody holds the directory any more


def test_a_reset_while_the_directory_is_away_holds(rig: Rig) -> None:
    """It is moved away and back, with all its pages."""
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    away, place = rig.path.parent / "away", rig.namespace()
    with rig.files.inject(FileFault({"open"}, error=errno.EIO)):
        place.rename(away)
        until(lambda: tier.state == "off")
        rig.clock.now += 2.0
        until(lambda: place.exists() and not tier._health.due)  # tried, and failed
        rig.clock.now += 1.0
        assert tier.reset() is False
        shutil.rmtree(place)
        away.rename(place)
    rig.comes_back(tier)
    assert rig.present(tier, chain) == 0
    rig.works(tier)
    tier.close()
    assert rig.present(rig.open(), chain) == 0


def test_a_reset_while_the_directory_is_being_opened_again_holds(rig: Rig) -> None:
    """The directory is back, with all its pages, and is being claimed when the reset comes."""
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    place = rig.namespace()
    (place / LOCK).rename(place / ".another")
    until(lambda: tier.state == "off")
    with rig.files.inject(FileFault({"open"}, effect="hang", match=".slab")) as fault:
        rig.clock.now += 2.0
        fault.wait_for_calls()
        assert tier.reset() is False
    rig.comes_back(tier)
    assert rig.present(tier, chain) == 0
    rig.works(tier)
    tier.close()
    assert rig.present(rig.open(), chain) == 0


def test_a_reset_while_it_is_off_holds(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"write"}, error=errno.EIO)):
        write_until_off(rig, tier)
        assert tier.reset() is True  # the manifest can be written
    rig.comes_back(tier)
    assert rig.present(tier, chain) == 0
    rig.works(tier)


def test_what_is_saved_while_a_reset_is_recorded_goes_with_it(rig: Rig) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    answers = []
    with rig.files.inject(FileFault({"replace"}, effect="hang")) as fault:
        resetting = threading.Thread(target=lambda: answers.append(tier.reset()))
        resetting.start()
        fault.wait_for_calls()
        rig.source.save(tier, chain)  # nobody waits for the reset
        assert rig.source.load(tier, chain, 0).all()
    resetting.join()
    assert answers == [True]
    assert rig.present(tier, chain) == 0
    assert not rig.source.load(tier, chain, 0).any()
    assert rig.full(tier).bad == 0
    rig.works(tier)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_reset_while_slots_are_being_found_again(
    rig: Rig, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    tier.close()
    (rig.namespace() / "arena00.table").unlink()
    before = Manifest.read(rig.namespace())
    monkeypatch.setattr(nvme, "_SLOTS_READ_AT_ONCE", 0)
    headers = FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)
    with rig.files.inject(headers):
        tier = rig.open()
        headers.wait_for_calls()
        assert tier.state == "starting"
        assert rig.present(tier, chain) == 0
        if recorded:
            assert tier.reset() is True
        else:
            with rig.files.inject(FileFault({"replace"}, error=errno.EIO)):
                assert tier.reset() is False
    rig.comes_back(tier)
    assert rig.present(tier, chain) == 0
    after = Manifest.read(rig.namespace())
    assert before is not None
    assert after is not None
    assert after.generation == before.generation + 1
    rig.works(tier)
    tier.close()
    assert rig.present(rig.open(), chain) == 0


def test_who_counts_pages_while_slots_are_being_found_again_gives_none_away(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    tier.close()
    (rig.namespace() / "arena00.table").unlink()
    monkeypatch.setattr(nvme, "_SLOTS_READ_AT_ONCE", 0)
    with rig.files.inject(FileFault({"read"}, effect="hang", match=".slab", from_offset=DATA)) as headers:
        tier = rig.open()
        headers.wait_for_calls()
        assert tier.state == "starting"
        assert tier.stats().groups[0].pages == 0
    rig.comes_back(tier)
    assert rig.full(tier).pages == rig.present(tier, chain) == 10
    rig.works(tier)
    tier.audit()


# Pauses


def test_pauses_grow_until_real_work_succeeds() -> None:
    clock = Clock()
    health = Health("a medium", clock)
    health.switch_on()
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        for _ in range(3):
            health.bad("it failed")
        assert (health.state, health.why, health.due) == ("off", "it failed", False)
        clock.now += pause - 0.5
        assert not health.due
        clock.now += 0.5
        assert health.due
        health.switch_on()  # a probe says so
    health.good()
    health.switch_off("again")
    clock.now += 1.0
    assert health.due


def test_single_failures_do_not_switch_it_off() -> None:
    health = Health("a medium", Clock())
    health.switch_on()
    for _ in range(10):
        health.bad("once")
        health.bad("twice")
        health.good()
    assert health.on


def test_it_is_tried_again_ever_less_often(rig: Rig) -> None:
    tier = rig.open()
    with rig.files.inject(FileFault({"write"}, error=errno.EIO)) as fault:
        write_until_off(rig, tier)
        tries = []
        for pause in (1.0, 2.0, 4.0, 8.0):
            rig.clock.now += pause - 0.1
            assert tier.state == "off"
            before = fault.num_calls
            rig.clock.now += 0.2
            until(lambda before=before: fault.num_calls > before)
            tries.append(fault.num_calls - before)
        assert tries == [1, 1, 1, 1]
    rig.comes_back(tier)


# The wrapper of any tier


def test_a_tier_that_loses_pages(source: PageSource) -> None:
    tier = FaultyTier(RamTier(source.layout, 1 << 20), seconds=0, fault="scribble")
    chain = source.chain("a", 64)
    source.save(tier, chain)
    target, ended = source.blank(chain, 0), source.ended()
    tier.load([target], ended)
    assert not ended.wait()[0].any()
    assert not source.right(target).any()
    tier.fault = "miss"
    assert not source.load(tier, chain, 0).any()
    tier.fault = "refuse"
    assert source.save(tier, source.chain("b", 64)) == 0
    tier.fault = None
    assert source.load(tier, chain, 0).all()
    with tier.hold():
        held = source.ended()
        tier.load([source.blank(chain, 0)], held)
        assert not tier.wait_idle(0.0)
        assert held.calls == 0
    assert held.wait()[0].all()
    assert tier.wait_idle(LIMIT_SECONDS)
    tier.audit()
    tier.close()


def test_bad_pages_are_told_of_once_a_minute(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [m for r in caplog.records if "did not pass their check" in (m := r.getMessage())]

    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    with rig.files.inject(FileFault({"read"}, effect="corrupt")):
        assert not rig.source.load(tier, chain, 0, [0]).any()
        until(lambda: len(lines()) == 1)
        for block in (1, 2):
            assert not rig.source.load(tier, chain, 0, [block]).any()
    assert "1 pages" in lines()[0]
    rig.clock.now += 61.0
    until(lambda: len(lines()) == 2)
    assert "2 pages" in lines()[1]
    assert "(3 since the start)" in lines()[1]


@pytest.mark.parametrize("reset", [False, True])
def test_what_could_not_be_read_at_start_is_taken_over_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    """The first look at the tables fails: the tier is off, and finds its pages when it is tried again; none
    of them if there was a reset meanwhile."""
    tier, chain = rig.open(), rig.source.chain("a", 160)
    rig.source.save(tier, chain)
    tier.close()
    survey, failed = Slab.survey, []

    def fail_once(slab: Slab, *arguments: object) -> object:
        if not failed:
            failed.append(slab)
            raise OSError(errno.EIO, "the table cannot be read")
        return survey(slab, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Slab, "survey", fail_once)
    tier = rig.open()
    assert tier.state == "off"
    if reset:
        assert tier.reset()
    rig.comes_back(tier)
    assert rig.present(tier, chain) == (0 if reset else 10)
    rig.works(tier)
