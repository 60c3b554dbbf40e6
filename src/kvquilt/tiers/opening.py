"""Opens one namespace's directory: plans its slabs, claims it, takes over what an earlier run left."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import ConfigError, KVQuiltError, SizingError
from kvquilt.layout import CacheLayout
from kvquilt.layout.namespace import NamespaceFactors
from kvquilt.sizing import Partition, SlotPlan, arena_indices, plan_slots
from kvquilt.store import Store, arena_span_keys
from kvquilt.tiers.directory import Claim, claim_namespace, open_for_reading
from kvquilt.tiers.files import Calls, Files, probe_direct
from kvquilt.tiers.format import BLOCK_BYTES, FORMAT_VERSION, entry_dtype, header_bytes
from kvquilt.tiers.manifest import Manifest, ManifestArena, disk_digest
from kvquilt.tiers.namespaces import namespace_path
from kvquilt.tiers.room import Reclaim
from kvquilt.tiers.slab import Slab
from kvquilt.tiers.table import SlabFacts

__all__ = ["OWNER", "DiskOptions", "Opened", "Opener"]

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]

Taking = Callable[[], contextlib.AbstractContextManager[bool]]

OWNER = "disk"
"""Who holds the leases and tickets of a disk tier's index."""

_FIXED_BYTES = 256 << 10  # heads, locks, a draft of the manifest


@dataclass(frozen=True)
class DiskOptions:
    """Where and how much. path: absolute. num_bytes: of the whole directory, all namespaces and ranks.

    write: "never" opens what another process writes, and only reads. dp_rank of dp_size: the rank's
    subdirectory and share. threads: as of `Calls`. queue_bytes: payload that may wait to be written.
    """

    path: Path
    num_bytes: int
    write: Literal["through", "evicted", "never"] = "through"
    threads: int = 4
    reclaim: Reclaim = "auto"
    dp_rank: int = 0
    dp_size: int = 1
    queue_bytes: int = 256 << 20


@dataclass(eq=False)
class Opened:
    """What is there while the directory is: the index's slots are the slabs'.

    path: the namespace's directory. arena_of: group index -> slab. recovered: what an earlier run left has
    been taken over. generation: of what is written now; guarded by the tier's turn.
    """

    path: Path
    index: Store
    slabs: tuple[Slab, ...]
    claim: Claim | None
    generation: int
    arena_of: tuple[int, ...]
    recovered: bool = False

    def slab_of(self, group: int) -> Slab:
        """The slab that a group's pages lie in."""
        return self.slabs[self.arena_of[group]]

    def still_there(self) -> bool:
        """Is the directory still the one that was opened? To who only reads also not, once its writer has
        been reset."""
        if self.claim is not None:
            return self.claim.still_there()
        with contextlib.suppress(OSError):
            manifest = Manifest.read(self.path)
            return manifest is not None and manifest.generation == self.generation
        return False

    def forget(self, group: int, slots: IntArray) -> None:
        """Let no later start find these slots' pages. Raises OSError."""
        if self.claim is not None:
            self.slab_of(group).forget(slots.tolist())

    def save_stamps(self) -> None:
        """Keep the recency of all slots, and of the namespace, as far as the medium lets it."""
        if self.claim is not None:
            self.claim.used()
            if not self.recovered:
                return  # the index knows nothing of what the last run kept
            with contextlib.suppress(OSError, KVQuiltError):
                for slab in self.slabs:
                    slab.table.save_stamps(self.index.stamps(slab.index))

    def grow(self) -> None:
        """Ask again for slots for which there was no space."""
        if self.claim is not None and any(slab.usable_slots < slab.num_slots for slab in self.slabs):
            with contextlib.suppress(KVQuiltError):
                self.index.provide_memory()

    def close(self) -> None:
        """Give up index, files and claim."""
        self.index.close()  # closes the slabs, its arenas
        if self.claim is not None:
            self.claim.close()


class Opener:
    """Knows what a layout's directory has to look like, and opens it.

    path: the directory. plan: the slots of each group; of a reader, those that the writer has made.
    Raises ConfigError for too few bytes.
    """

    def __init__(
        self,
        layout: CacheLayout,
        namespace: NamespaceFactors,
        options: DiskOptions,
        *,
        num_ranks: int,
        partition: Partition,
        checkpoint_interval: int | None,
        state_interval: int | None,
        optional: frozenset[str] | None,
        files: Files,
        clock: Callable[[], float],
    ) -> None:
        self.arena_of = arena_indices(layout, partition)
        self.writable = options.write != "never"
        self._layout = layout
        self._namespace = namespace
        self._options = options
        self._num_ranks = num_ranks
        self._partition: Partition = partition
        self._optional = optional
        self._files = files
        self._clock = clock
        self._digest = disk_digest(namespace, partition)
        self.path = namespace_path(options.path, self._digest.hex(), options.dp_rank)
        self._span_keys = arena_span_keys(layout, partition)
        self._direct = True
        self._calls = Calls(options.threads)
        self.plan = self._plan(checkpoint_interval, state_interval)

    def _plan(self, checkpoint_interval: int | None, state_interval: int | None) -> SlotPlan:
        share = self._options.num_bytes // self._options.dp_size
        if self._options.write == "never":
            share = 1 << 62  # what the writer has made counts: see `_plan_of`
        spans = max(self._span_keys.values(), default=0)
        overhead = header_bytes(spans) + entry_dtype(spans).itemsize + 8
        fixed = _FIXED_BYTES + 4 * BLOCK_BYTES * len(self._span_keys) + 3 * len(self._namespace.to_json())
        try:
            return plan_slots(
                self._layout,
                max(1, share - fixed),
                checkpoint_interval,
                num_ranks=self._num_ranks,
                partition=self._partition,
                state_interval=state_interval,
                slot_overhead_bytes=overhead,
            )
        except SizingError as error:
            least = (error.least_bytes or 0) + fixed
            raise ConfigError(
                f"disk_bytes={self._options.num_bytes} ({share} for this rank): too few for one boundary and "
                f"the files around it; the least disk_bytes that works is {least * self._options.dp_size}"
            ) from error

    def _facts(self, index: int, name: str, num_slots: int, payload_bytes: int) -> SlabFacts:
        spans = self._span_keys[index]
        return SlabFacts(index, name, num_slots, payload_bytes + header_bytes(spans), spans, self._digest)

    def _wanted_manifest(self) -> tuple[Manifest, dict[str, int]]:
        """The manifest of a new directory, and the lengths of its files."""
        arenas, total = [], 0
        lengths: dict[str, int] = {}
        for index in self._span_keys:
            inside = self._inside(index)
            names = [self._layout.groups[i].name for i in inside]
            slots = sum(self.plan.slots[name] for name in names)
            facts = self._facts(index, f"arena{index:02d}", slots, self.plan.slot_bytes[names[0]])
            total += facts.total_bytes
            lengths |= facts.lengths
            arenas.append(
                ManifestArena(
                    facts.name,
                    list(zip(inside, names, strict=True)),
                    slots,
                    facts.slot_bytes,
                    facts.span_keys,
                )
            )
        manifest = Manifest(
            FORMAT_VERSION,
            1,
            self._digest.hex(),
            self._partition,
            self._num_ranks,
            0,
            arenas,
            self._namespace,
        )
        # A draft beside the old one, and the planned size written out.
        total += 3 * (len(manifest.encode()) + BLOCK_BYTES)
        return msgspec.structs.replace(manifest, planned_bytes=total), lengths

    def open(self, *, forget: bool = False) -> Opened:
        """Open the directory, with an index that knows of no page yet.

        forget: a reset could not be recorded before, and is recorded now. Raises ConfigError as
        `claim_namespace` does, OSError for what the medium does.
        """
        manifest, lengths = self._wanted_manifest()
        root = self._options.path
        claim: Claim | None = None
        if self.writable:
            claim = claim_namespace(
                root,
                manifest,
                lengths=lengths,
                disk_bytes=self._options.num_bytes,
                reclaim=self._options.reclaim,
                dp_rank=self._options.dp_rank,
                files=self._files,
            )
            path, manifest = claim.path, claim.manifest
        else:
            path, manifest = open_for_reading(root, self._digest.hex(), self._options.dp_rank)
            self.plan = self._plan_of(manifest)
        slabs: list[Slab] = []
        try:
            if claim is not None and forget:
                claim.next_generation()
                manifest = claim.manifest
            self._direct = self._probe(path) if self.writable else self._direct
            index = self._make_index(path, manifest.generation, slabs)
        except BaseException:
            for slab in slabs:
                slab.close()
            if claim is not None:
                claim.close()
            raise
        return Opened(path, index, tuple(slabs), claim, manifest.generation, self.arena_of)

    def _plan_of(self, manifest: Manifest) -> SlotPlan:
        """The slots that a writer has made; of a row that groups share, all but one each go to the first."""
        slots = {group.name: 0 for group in self._layout.groups}
        for arena in manifest.arenas:
            names = [name for _, name in arena.groups]
            slots |= dict.fromkeys(names, 1)
            slots[names[0]] = arena.num_slots - (len(names) - 1)
        return replace(self.plan, slots=slots)

    def _probe(self, path: Path) -> bool:
        direct = probe_direct(self._files, path)
        if not direct and self._direct:
            logger.warning("kvquilt: disk: %s takes no direct I/O: going through the page cache", path)
        return direct

    def _make_index(self, path: Path, generation: int, slabs: list[Slab]) -> Store:
        def make(index: int, _name: str, num_slots: int, payload_bytes: int) -> Slab:
            facts = self._facts(index, f"arena{index:02d}", num_slots, payload_bytes)
            slab = Slab.open(
                path,
                facts,
                self._files,
                generation,
                direct=self._direct,
                writable=self.writable,
                calls=self._calls,
            )
            slabs.append(slab)
            return slab

        def populate(fd: int, offset: int, length: int) -> None:
            next(slab for slab in slabs if slab.fd == fd).allocate(fd, offset, length)

        try:
            return Store(
                self._layout,
                self.plan,
                num_ranks=self._num_ranks,
                clock=self._clock,
                prefault="later",
                populate=populate,
                make_arena=make,
                optional=self._optional,
            )
        except MemoryError:
            slots = sum(self.plan.slots.values())
            raise ConfigError(
                f"disk_bytes={self._options.num_bytes}: there is no memory for an index of {slots} slots"
            ) from None

    def recover(
        self,
        opened: Opened,
        taking: Callable[[], contextlib.AbstractContextManager[bool]],
        stopped: Callable[[], bool],
    ) -> None:
        """Take over the pages that an earlier run left in the slabs.

        taking: entered while pages of one slab are taken over; False if that is no longer wanted, since a
        reset has come first. stopped: asked now and then; True ends it. Raises OSError.
        """
        opened.index.register_owner(OWNER, live=True)
        generation = opened.generation
        for slab in opened.slabs:
            started = self._clock()
            inside = self._inside(slab.index)
            found = slab.recover(inside, generation, stopped)
            with taking() as wanted:
                if not wanted:
                    return
                taken = opened.index.adopt(slab.index, found.pages, found.stamps)
            if taken or found.scanned:
                logger.info(
                    "kvquilt: disk: %s: %d pages found again by %s in %.2f s",
                    ", ".join(self._layout.groups[i].name for i in inside),
                    taken,
                    "their headers" if found.scanned else "the table",
                    self._clock() - started,
                )

    def _inside(self, arena: int) -> list[int]:
        """The groups whose pages lie in a slab."""
        return [i for i, own in enumerate(self.arena_of) if own == arena]
