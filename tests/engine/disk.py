"""What the engine tests of the disk tier share: engines over a directory, and damage to it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.processes import wait_until
from engine.rig import RAM_BYTES, Rig, Truth
from kvquilt.testing import Engine
from kvquilt.tiers.files import Files
from kvquilt.tiers.format import BLOCK_BYTES, parse_page_header
from kvquilt.tiers.manifest import Manifest

MODEL = "gemma4-mini"
DISK_BYTES = "24MiB"
SMALL_RAM = "2MiB"
"""Less than two of SOME take."""
POOL_BLOCKS = 400


def disk_options(path: Path, **more: Any) -> dict[str, Any]:
    return {"ram_bytes": RAM_BYTES, "disk_path": str(path), "disk_bytes": DISK_BYTES} | more


class DiskRig(Rig):
    """A rig whose engine has a disk tier."""

    @property
    def tier(self) -> Any:
        return self.side.below.tier

    @property
    def promoter(self) -> Any:
        return self.side.below.promoter

    def attach(self) -> None:
        """Step until the worker has attached the pools: nothing is looked up before. From then on no save
        and no write is skipped because many others are under way, as they are on a busy machine."""
        self.engine.step_until_idle()
        self.side.pins.cap = 1_000_000
        self.tier._queues._queue_bytes = 1 << 30

    def rest(self) -> None:
        """Nothing is queued or under way, in the engine or below."""
        self.engine.step_until_idle()
        assert self.tier.wait_idle(30)

    def forget_ram(self) -> None:
        """Empty the engine's cache and host memory: the disk alone is left."""
        self.rest()
        assert self.engine.reset_prefix_cache()
        self.side.store.reset()

    def counted(self, name: str) -> dict[str, int]:
        """A number of each group of the tier."""
        return {group.name: getattr(group, name) for group in self.tier.stats().groups}

    def sum(self, name: str) -> int:
        return sum(self.counted(name).values())

    def assert_clean(self) -> None:
        self.rest()  # pages are leased while they are written
        super().assert_clean()
        assert not self.promoter._promotions
        index = self.tier._opened.index if self.tier._opened is not None else None
        for store in filter(None, (self.side.store, index)):
            audit = store.audit()
            assert (audit.leases, audit.tickets) == (0, 0)
        hook_errors = [sum(c._hook_errors.values()) for c in (self.connector, self.worker_connector)]
        assert hook_errors == [0, 0]


@contextmanager
def disk_engine(truth: Truth, path: Path, **options: Any) -> Iterator[DiskRig]:
    """An engine over the directory; clean when the block ends."""
    engine_arguments = {n: options.pop(n) for n in ("enable_prefix_caching",) if n in options}
    with Engine(
        truth.model,
        connector=disk_options(path, **options),
        num_blocks=POOL_BLOCKS,
        max_model_len=512,
        **engine_arguments,
    ) as engine:
        rig = DiskRig(engine, truth)
        rig.attach()
        yield rig
        rig.assert_clean()


def namespaces(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("dp*/*/manifest.json"))


def used_slots(directory: Path, group: str) -> tuple[Path, int, list[int]]:
    """(slab, bytes of a slot, slots with a page) of a group; its header is read, no table."""
    manifest = Manifest.read(directory)
    assert manifest is not None
    [arena] = [arena for arena in manifest.arenas if group in [name for _, name in arena.groups]]
    slab = directory / f"{arena.name}.slab"
    found = []
    with slab.open("rb") as file:
        for slot in range(arena.num_slots):
            file.seek(BLOCK_BYTES + slot * arena.slot_bytes)
            header = file.read(BLOCK_BYTES)
            if len(header) == BLOCK_BYTES and parse_page_header(header) is not None:
                found.append(slot)
    return slab, arena.slot_bytes, found


def flip(slab: Path, slot_bytes: int, slots: Sequence[int], seed: int = 0) -> None:
    """Flip one bit of each slot's payload."""
    draw = random.Random(seed)
    with slab.open("r+b") as file:
        for slot in slots:
            place = BLOCK_BYTES + slot * slot_bytes + draw.randrange(BLOCK_BYTES, slot_bytes)
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


class FaultyFiles(Files):
    """Calls that go wrong while told to.

    read_error, write_error: raised by each read or write of pages. `hold`: reads wait until `let_go`.
    """

    def __init__(self) -> None:
        self.read_error: OSError | None = None
        self.write_error: OSError | None = None
        self.held = 0
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def heal(self) -> None:
        self.read_error = self.write_error = None
        self.let_go()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if not self._open.is_set():
            self.held += 1
            assert self._open.wait(120)
        if self.read_error is not None:
            raise self.read_error
        super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        if self.write_error is not None:
            raise self.write_error
        super().write(fd, buffers, offset)


def break_files(rig: DiskRig) -> FaultyFiles:
    """From now on the tier's calls go through the returned object."""
    files = FaultyFiles()
    rig.tier._opener._files = files
    for slab in rig.tier._opened.slabs:
        slab._files = files
    return files


def step_until(rig: Rig, condition: Callable[[], bool], message: str) -> None:
    """Step the engine until something is so."""

    def stepped() -> bool:
        rig.engine.step()
        return condition()

    wait_until(stepped, message)
