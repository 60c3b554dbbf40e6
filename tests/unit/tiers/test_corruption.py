"""Damage to the files of the disk tier: no wrong byte comes back, and each damaged page is counted once.

Which page lies in which slot is read from the slots themselves, and what should then come of each page is
worked out by hand; the right bytes of a page follow from its key.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.sizing import Partition
from kvquilt.store import Chain
from kvquilt.testing.tier_pages import PageSource
from kvquilt.tiers import NVMeTier
from kvquilt.tiers.files import aligned_buffer
from kvquilt.tiers.format import (
    BLOCK_BYTES,
    PageHeader,
    entry_dtype,
    header_bytes,
    parse_page_header,
)
from kvquilt.tiers.manifest import MANIFEST, Manifest
from unit.tiers.format_support import pack_page, verify_page
from unit.tiers.tier_support import LIMIT_SECONDS, disk

MORE = int(os.environ.get("KVQUILT_STRESS", "1"))
NUM_DAMAGES = 250  # in slots, over all partitions and states; KVQUILT_STRESS=40 makes it 10,000
DAMAGES_PER_ROUND = 5
NUM_BYTES = 2 << 20
Page = tuple[int, bytes]  # group, key


def source_of(partition: Partition = "solved") -> PageSource:
    full = CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=8192)
    window = CacheGroup("win", kind="sliding", tokens_per_block=16, window=32, page_bytes=5000)
    return PageSource(CacheLayout([full, window]), partition=partition)


class Slabs:
    """The files of one namespace, looked at from outside."""

    def __init__(self, root: Path) -> None:
        (self.path,) = (path.parent for path in root.glob(f"dp0/*/{MANIFEST}"))
        manifest = Manifest.read(self.path)
        assert manifest is not None
        self.manifest = manifest
        self.arenas = {arena.name: arena for arena in manifest.arenas}

    def file(self, arena: str, kind: str = "slab") -> Path:
        return self.path / f"{arena}.{kind}"

    def offset(self, arena: str, slot: int) -> int:
        return BLOCK_BYTES + slot * self.arenas[arena].slot_bytes

    def read(self, arena: str, slot: int) -> bytearray:
        with open(self.file(arena), "rb") as file:
            return bytearray(os.pread(file.fileno(), self.arenas[arena].slot_bytes, self.offset(arena, slot)))

    def write(self, arena: str, slot: int, data: bytes | bytearray | memoryview, at: int = 0) -> None:
        write_at(self.file(arena), self.offset(arena, slot) + at, data)

    def pages(self) -> dict[tuple[str, int], PageHeader]:
        """Arena and slot of every page of the present generation."""
        found = {}
        for name, arena in self.arenas.items():
            held = (self.file(name).stat().st_size - BLOCK_BYTES) // arena.slot_bytes
            for slot in range(min(arena.num_slots, held)):
                page = parse_page_header(bytes(self.read(name, slot)[: header_bytes(arena.span_keys)]))
                if page is not None and (page.generation, page.slot) == (self.manifest.generation, slot):
                    found[name, slot] = page
        return found


def write_at(path: Path, offset: int, data: bytes | bytearray | memoryview) -> None:
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, offset)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "rb") as file:
        old = os.pread(file.fileno(), 1, offset)
    write_at(path, offset, bytes([old[0] ^ (1 << bit)]))


class World:
    """A namespace full of pages, beside a foreign one of the same geometry and one of a former generation."""

    def __init__(self, root: Path, partition: Partition) -> None:
        self.source = source_of(partition)
        self.root = root / "own"
        self.chains = [self.source.chain(f"c{i}", 160) for i in range(5)]
        other = disk(root / "foreign", self.source, NUM_BYTES, salt="foreign")
        self.fill(other)
        other.close()
        self.foreign = Slabs(root / "foreign")
        with_past = self.open()
        self.fill(with_past)
        assert with_past.reset()
        with_past.close()
        tier = self.open()
        self.fill(tier)
        tier.close()
        self.slabs = Slabs(self.root)

    def open(self) -> NVMeTier:
        return disk(self.root, self.source, NUM_BYTES)

    def fill(self, tier: NVMeTier) -> None:
        for chain in self.chains:
            self.source.save(tier, chain)
        assert tier.wait_idle(LIMIT_SECONDS)
        assert self.present(tier) == self.all_pages()

    def each(self) -> Iterator[tuple[Chain, int]]:
        """Windows first: a full page that goes takes the windows along that need it."""
        return ((chain, group) for group in (1, 0) for chain in self.chains)

    def all_pages(self) -> set[Page]:
        return {(group, key.tobytes()) for chain, group in self.each() for key in chain.keys(group)}

    def present(self, tier: NVMeTier) -> set[Page]:
        found = set()
        for chain, group in self.each():
            there = tier.present(chain, group, 0, chain.num_blocks(group))
            found |= {(group, key.tobytes()) for key in chain.keys(group)[there]}
        return found

    def load_all(self, tier: NVMeTier) -> set[Page]:
        """What comes when everything is asked for. Fails if one wrong byte does."""
        found = set()
        for chain, group in self.each():
            good = self.source.load(tier, chain, group)
            found |= {(group, key.tobytes()) for key in chain.keys(group)[good]}
        assert tier.wait_idle(LIMIT_SECONDS)
        tier.audit()
        return found


class Damage:
    """Random damage to slots, each to other ones. bad: pages that are still listed, and no longer right."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self._world = world
        self._slabs = world.slabs
        self._draw = draw
        pages = world.slabs.pages()
        # A page that went with another one still lies where it was when it is saved again elsewhere.
        times = Counter((page.group, page.key) for page in pages.values())
        self._pages = {place: page for place, page in pages.items() if times[page.group, page.key] == 1}
        self.bad: set[Page] = set()
        self.done = 0

    def flip_a_byte(self) -> None:
        arena, slot = self._take()
        at = self._draw.randrange(self._slabs.arenas[arena].slot_bytes)
        if self._draw.random() < 0.3:
            at = self._draw.randrange(256)  # most of a header is padding
        flip(self._slabs.file(arena), self._slabs.offset(arena, slot) + at, self._draw.randrange(8))

    def swap_two_slots(self) -> None:
        arena, slot = self._take()
        _, other = self._take(arena)
        one, two = self._slabs.read(arena, slot), self._slabs.read(arena, other)
        self._slabs.write(arena, slot, two)
        self._slabs.write(arena, other, one)

    def copy_a_slot(self) -> None:
        arena, slot = self._take()
        _, other = self._take(arena, damaged=False)
        self._slabs.write(arena, slot, self._slabs.read(arena, other))

    def zero_a_block(self) -> None:
        arena, slot = self._take()
        blocks = self._slabs.arenas[arena].slot_bytes // BLOCK_BYTES
        page = self._slabs.read(arena, slot)
        full = [i for i in range(blocks) if any(page[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])]
        self._slabs.write(arena, slot, bytes(BLOCK_BYTES), self._draw.choice(full) * BLOCK_BYTES)

    def stale_generation(self) -> None:
        """A page of before the reset, whole and with right checks, of the same name or not."""
        arena, slot = self._take()
        page = self._pages[arena, slot]
        self._rewrite(arena, slot, replace(page, generation=page.generation - 1))

    def foreign_namespace(self) -> None:
        """The other namespace's page of the same slot; the same with this one's name on it."""
        arena, slot = self._take()
        self._slabs.write(arena, slot, self._world.foreign.read(arena, slot))
        if self._draw.random() < 0.5:
            page = self._pages[arena, slot]
            self._rewrite(
                arena, slot, replace(page, namespace=bytes.fromhex(self._world.foreign.manifest.digest))
            )

    def other_name(self) -> None:
        """A whole page with right checks, of another key or group."""
        arena, slot = self._take()
        page = self._pages[arena, slot]
        other = replace(page, key=self._draw.randbytes(32))
        self._rewrite(arena, slot, self._draw.choice([other, replace(page, group=page.group + 1)]))

    def truncate_the_slab(self) -> None:
        """Anywhere in its used half; pages that no longer are there whole are not `left`."""
        arena = self._draw.choice(list(self._slabs.arenas))
        used = max(slot for name, slot in self._pages if name == arena)
        low, high = self._slabs.offset(arena, used // 2), self._slabs.offset(arena, used)
        length = self._draw.randrange(low, high)
        os.truncate(self._slabs.file(arena), length)
        for name, slot in list(self._pages):
            if name == arena and self._slabs.offset(arena, slot + 1) > length:
                del self._pages[name, slot]

    @property
    def left(self) -> set[Page]:
        """Pages whose slots are there."""
        return {(page.group, page.key) for page in self._pages.values()}

    SLOTS = (
        flip_a_byte,
        flip_a_byte,
        swap_two_slots,
        copy_a_slot,
        zero_a_block,
        stale_generation,
        foreign_namespace,
        other_name,
    )

    def some(self, count: int) -> None:
        for _ in range(count):
            self._draw.choice(self.SLOTS)(self)

    def _take(self, arena: str | None = None, *, damaged: bool = True) -> tuple[str, int]:
        """A slot with a page that was not damaged yet."""
        intact = [place for place, page in self._pages.items() if (page.group, page.key) not in self.bad]
        place = self._draw.choice([place for place in intact if arena in (None, place[0])])
        if damaged:
            self.bad.add((self._pages[place].group, self._pages[place].key))
            self.done += 1
        return place

    def _rewrite(self, arena: str, slot: int, page: PageHeader) -> None:
        """The slot's payload under another header, whose checks are right."""
        data = self._slabs.read(arena, slot)
        size = len(data) - page.payload_bytes
        header = aligned_buffer(size)
        pack_page(header, page, memoryview(data)[size:])
        self._slabs.write(arena, slot, header)


def bad(tier: NVMeTier) -> int:
    return sum(group.bad for group in tier.stats().groups)


def check(world: World, tier: NVMeTier, listed: set[Page], damaged: set[Page]) -> None:
    """Everything intact comes, each damaged page is counted once, and none is read again."""
    before = bad(tier)
    assert world.present(tier) == listed
    assert world.load_all(tier) == listed - damaged
    assert bad(tier) - before == len(damaged)
    assert world.present(tier).isdisjoint(damaged)
    reads = [group.reads for group in tier.stats().groups]
    again = world.load_all(tier)
    assert again <= listed - damaged
    assert {page for page in again if page[0] == 0} == {page for page in listed - damaged if page[0] == 0}
    assert bad(tier) - before == len(damaged)
    assert sum(group.reads for group in tier.stats().groups) - sum(reads) == len(again)


@pytest.fixture(params=["solved", "shared_rows"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, request.param)


def rounds(share: float) -> range:
    """Rounds of a test that does this share of all damages; there are two partitions."""
    return range(max(1, int(NUM_DAMAGES * MORE * share / 2 / DAMAGES_PER_ROUND)))


def test_damaged_slots_of_a_closed_tier(world: World) -> None:
    done = 0
    for number in rounds(0.6):
        damage = Damage(world, random.Random(f"closed {number}"))
        damage.some(DAMAGES_PER_ROUND)
        tier = world.open()
        check(world, tier, world.all_pages(), damage.bad)
        if number % 2:  # bad pages are forgotten for good
            tier.close()
            tier = world.open()
            assert world.present(tier).isdisjoint(damage.bad)
            assert bad(tier) == 0
        world.fill(tier)
        assert len(world.load_all(tier)) == len(world.all_pages())
        tier.close()
        done += damage.done
    assert done >= DAMAGES_PER_ROUND * len(rounds(0.6))


def test_damaged_slots_of_a_running_tier(world: World) -> None:
    tier = world.open()
    for number in rounds(0.4):
        damage = Damage(world, random.Random(f"running {number}"))
        damage.some(DAMAGES_PER_ROUND)
        check(world, tier, world.all_pages(), damage.bad)
        world.fill(tier)
    assert len(world.load_all(tier)) == len(world.all_pages())
    tier.close()


def test_a_shortened_slab(world: World) -> None:
    """Its pages are gone, also when the file has grown again."""
    for number in range(6):
        damage = Damage(world, random.Random(f"short {number}"))
        damage.truncate_the_slab()
        tier = world.open()
        check(world, tier, damage.left, set())
        if number % 2:
            tier.close()
            tier = world.open()
            check(world, tier, damage.left & world.present(tier), set())
        world.fill(tier)
        tier.close()


def test_a_slab_that_is_shortened_while_it_is_used(world: World) -> None:
    tier = world.open()
    damage = Damage(world, random.Random("short and used"))
    damage.truncate_the_slab()
    lost = world.all_pages() - damage.left
    came = world.load_all(tier)
    assert came.isdisjoint(lost)
    assert 0 < bad(tier) <= len(lost)
    tier.close()
    tier = world.open()
    assert world.load_all(tier).isdisjoint(lost)
    assert bad(tier) == 0
    world.fill(tier)
    tier.close()


def test_damaged_table_entries_are_made_anew_from_the_slots(world: World) -> None:
    draw = random.Random("entries")
    for _ in range(5):
        for arena in world.slabs.arenas.values():
            size = entry_dtype(arena.span_keys).itemsize
            for _ in range(10):  # of empty slots, too
                at = BLOCK_BYTES + draw.randrange(arena.num_slots * size)
                flip(world.slabs.file(arena.name, "table"), at, draw.randrange(8))
        tier = world.open()
        check(world, tier, world.all_pages(), set())
        tier.close()


def test_entries_of_other_slots_promise_nothing(world: World) -> None:
    """A table whose entries were shifted by one slot, and one of the other namespace."""
    arena = next(iter(world.slabs.arenas.values()))
    size = entry_dtype(arena.span_keys).itemsize
    table = world.slabs.file(arena.name, "table")
    used = sorted(slot for name, slot in world.slabs.pages() if name == arena.name)
    assert used == list(range(len(used)))
    entries = table.read_bytes()[BLOCK_BYTES : BLOCK_BYTES + len(used) * size]
    write_at(table, BLOCK_BYTES, entries[size:] + entries[:size])
    tier = world.open()
    check(world, tier, world.all_pages(), set())
    tier.close()
    shutil.copy(world.foreign.file(arena.name, "table"), table)
    tier = world.open()
    check(world, tier, world.all_pages(), set())
    tier.close()


@pytest.mark.parametrize("how", ["head", "missing", "empty", "noise"])
def test_a_table_that_is_lost_is_made_anew_from_the_slots(world: World, how: str) -> None:
    for arena in world.slabs.arenas:
        table = world.slabs.file(arena, "table")
        if how == "head":
            flip(table, 20)
        elif how == "missing":
            table.unlink()
        elif how == "empty":
            os.truncate(table, 0)
        else:
            table.write_bytes(random.Random(how).randbytes(table.stat().st_size))
    tier = world.open()
    check(world, tier, world.all_pages(), set())
    tier.close()


@pytest.mark.parametrize("how", ["missing", "noise", "short"])
def test_stamps_cost_only_the_order(world: World, how: str) -> None:
    for arena in world.slabs.arenas:
        stamps = world.slabs.file(arena, "stamps")
        if how == "missing":
            stamps.unlink()
        elif how == "short":
            os.truncate(stamps, 12)
        else:
            stamps.write_bytes(random.Random(how).randbytes(stamps.stat().st_size))
    tier = world.open()
    check(world, tier, world.all_pages(), set())
    world.source.save(tier, world.source.chain("more", 160))
    assert tier.wait_idle(LIMIT_SECONDS)
    tier.audit()
    tier.close()


@pytest.mark.parametrize("how", ["head", "missing", "foreign", "foreign and table"])
def test_a_slab_that_is_lost_brings_nothing_back(world: World, how: str) -> None:
    for arena in world.slabs.arenas:
        slab = world.slabs.file(arena)
        if how == "head":
            flip(slab, 20)
        elif how == "missing":
            slab.unlink()
        else:
            shutil.copy(world.foreign.file(arena), slab)
        if how == "foreign and table":
            shutil.copy(world.foreign.file(arena, "table"), world.slabs.file(arena, "table"))
    tier = world.open()
    check(world, tier, set(), set())
    world.fill(tier)
    assert len(world.load_all(tier)) == len(world.all_pages())
    tier.close()


def test_a_foreign_slab_under_the_right_head(world: World) -> None:
    """What the table lists is read once, and is bad."""
    for arena in world.slabs.arenas:
        slab = world.slabs.file(arena)
        head = slab.read_bytes()[:BLOCK_BYTES]
        shutil.copy(world.foreign.file(arena), slab)
        write_at(slab, 0, head)
    tier = world.open()
    assert world.present(tier) == world.all_pages()
    assert world.load_all(tier) == set()
    assert 0 < bad(tier) <= len(world.all_pages())
    assert world.present(tier) == set()
    world.fill(tier)
    tier.close()


def test_slabs_of_before_a_reset_bring_nothing_back(world: World, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(world.slabs.path, old)
    tier = world.open()
    assert tier.reset()
    tier.close()
    for arena in world.slabs.arenas:
        for kind in ("slab", "table", "stamps"):
            shutil.copy(old / f"{arena}.{kind}", world.slabs.file(arena, kind))
    for table in (True, False):  # by the table, and by the headers
        if not table:
            for arena in world.slabs.arenas:
                world.slabs.file(arena, "table").unlink()
        tier = world.open()
        check(world, tier, set(), set())
        tier.close()


@pytest.mark.parametrize("how", ["missing", "empty", "short", "foreign", "noise"])
def test_without_its_manifest_nothing_comes_back(world: World, how: str) -> None:
    manifest = world.slabs.path / MANIFEST
    data = manifest.read_bytes()
    if how == "missing":
        manifest.unlink()
    elif how == "foreign":
        shutil.copy(world.foreign.path / MANIFEST, manifest)
    else:
        noise = random.Random(how).randbytes(len(data))
        manifest.write_bytes({"empty": b"", "short": data[: len(data) // 2], "noise": noise}[how])
    tier = world.open()
    check(world, tier, set(), set())
    world.fill(tier)
    tier.close()
    assert (world.slabs.path / MANIFEST).exists()


def test_a_bit_that_flips_in_the_manifest_undoes_no_reset(world: World) -> None:
    """The world has seen a reset, and its slabs were full before. Whichever bit flips, at most what was
    there comes back, and never what was reset."""
    tier = world.open()
    assert tier.reset()
    tier.close()
    old = {name: world.slabs.file(name).read_bytes() for name in world.slabs.arenas}
    manifest = world.slabs.path / MANIFEST
    data = manifest.read_bytes()
    start = data.index(b'"generation"')
    draw = random.Random("manifest")
    places = [*range(start, start + 20), *draw.sample(range(len(data)), 10)]
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 1 << draw.randrange(3)
        assert Manifest.read(world.slabs.path) is not None
        manifest.write_bytes(damaged)
        assert Manifest.read(world.slabs.path) is None
        manifest.write_bytes(data)
    damaged = data.replace(b'"generation": 3', b'"generation": 2')
    assert damaged != data
    manifest.write_bytes(damaged)
    assert old == {name: world.slabs.file(name).read_bytes() for name in old}
    tier = world.open()
    check(world, tier, set(), set())
    tier.close()


def test_every_byte_of_a_slot_is_covered() -> None:
    """Whichever bit of header, checks or payload flips, the page is not what it was."""
    payload = memoryview(bytearray(random.Random("payload").randbytes(512)))
    header = aligned_buffer(BLOCK_BYTES)
    page = PageHeader(0, 7, len(payload), bytes(range(32)), bytes(range(32, 64)), 5, bytes(range(64)))
    pack_page(header, page, payload)
    assert verify_page(header, payload, page)
    assert parse_page_header(header) == page
    draw = random.Random("bits")
    for part in (header, payload):
        for at in range(len(part)):
            bit = 1 << draw.randrange(8)
            part[at] ^= bit
            assert not verify_page(header, payload, page), at
            part[at] ^= bit
    assert verify_page(header, payload, page)
