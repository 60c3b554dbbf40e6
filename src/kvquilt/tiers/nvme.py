"""The NVMe tier: pages in slab files, found by a `Store` of their own, written and read by few threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
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
from kvquilt.store import KEY_BYTES, Chain, Store, Want, arena_span_keys, span_steps
from kvquilt.tiers.base import GroupTierStats, Loaded, Pages, TierStats
from kvquilt.tiers.counts import Counts
from kvquilt.tiers.directory import (
    Claim,
    Manifest,
    ManifestArena,
    Reclaim,
    claim_namespace,
    disk_digest,
    open_for_reading,
)
from kvquilt.tiers.files import Files, probe_direct
from kvquilt.tiers.format import BLOCK_BYTES, FORMAT_VERSION, entry_dtype, header_bytes
from kvquilt.tiers.health import Health
from kvquilt.tiers.slab import Slab, SlabFacts, SlotPage
from kvquilt.tiers.workers import Batch, Workers

__all__ = ["DiskOptions", "NVMeTier"]

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_BATCH_BYTES = 4 << 20
_STALL_SECONDS = 10.0
_TICK_SECONDS = 0.5
_STAMP_SECONDS = 30.0
_DRAIN_SECONDS = 5.0
_SLOTS_READ_AT_ONCE = 10_000  # headers that a start waits for; beyond it they are read in the background
_FIXED_BYTES = 256 << 10  # heads, locks, a draft of the manifest


@dataclass(frozen=True)
class DiskOptions:
    """Where and how much. path: absolute. num_bytes: of the whole directory, all namespaces and ranks.

    write: "never" opens what another process writes, and only reads. dp_rank of dp_size: the rank's
    subdirectory and share. queue_bytes: payload that may wait to be written.
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
class _Opened:
    """What is there while the directory is: the index's slots are the slabs'. generation: of what is
    written now; guarded by `NVMeTier._turn`."""

    index: Store
    slabs: tuple[Slab, ...]
    claim: Claim | None
    generation: int


class NVMeTier:
    """Pages of one layout in one directory, bounded, checked on every read, found again after a restart.

    checkpoint_interval, state_interval: as of `plan_slots`, for the split of the bytes over the groups.

    Raises ConfigError for what the user has to change: a directory that others may write to or that is in
    use, too few bytes. What the medium does (no space, read-only, I/O errors) switches the tier
    off; it is tried again with growing pauses. Thread-safe.
    """

    name = "nvme"

    def __init__(
        self,
        layout: CacheLayout,
        namespace: NamespaceFactors,
        options: DiskOptions,
        *,
        num_ranks: int = 1,
        partition: Partition = "solved",
        checkpoint_interval: int | None = None,
        state_interval: int | None = None,
        optional: frozenset[str] | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        stall_seconds: float = _STALL_SECONDS,
        tick_seconds: float = _TICK_SECONDS,
    ) -> None:
        self.layout = layout
        self.options = options
        self._files = files or Files()
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._tick_seconds = tick_seconds
        self._num_ranks = num_ranks
        self._partition: Partition = partition
        self._optional = optional
        self._digest = disk_digest(namespace, partition)
        self._namespace = namespace
        self._span_keys = arena_span_keys(layout, partition)
        self._steps = span_steps(layout)
        self._arena_of = arena_indices(layout, partition)
        self._direct = True
        self.plan = self._plan(checkpoint_interval, state_interval)
        self._counts = Counts(layout, num_ranks)
        self._health = Health("the disk tier", clock)
        self._lock = threading.RLock()  # guards _opened, _must_forget and the change of state
        # Slots are taken from the index together with the generation that they are used under; never
        # held while the medium works.
        self._turn = threading.Lock()
        self._opened: _Opened | None = None
        self._must_forget = False
        self._closed = False
        self._stamps_saved_at = clock()
        self._owner = "disk"
        self._stop = threading.Event()
        self._try_open()
        self._workers = Workers("kvquilt-disk", options.threads, clock)
        if not self._has_much_to_read():
            self._finish_opening()
        self._upkeep = threading.Thread(target=self._keep_up, name="kvquilt-disk-upkeep", daemon=True)
        self._upkeep.start()

    # ---- opening ----

    def _plan(self, checkpoint_interval: int | None, state_interval: int | None) -> SlotPlan:
        share = self.options.num_bytes // self.options.dp_size
        if self.options.write == "never":
            share = 1 << 62  # what the writer has made counts: see `_plan_of`
        spans = max(self._span_keys.values(), default=0)
        overhead = header_bytes(spans) + entry_dtype(spans).itemsize + 8
        fixed = _FIXED_BYTES + 4 * BLOCK_BYTES * len(self._span_keys) + 3 * len(self._namespace.to_json())
        try:
            return plan_slots(
                self.layout,
                max(1, share - fixed),
                checkpoint_interval,
                num_ranks=self._num_ranks,
                partition=self._partition,
                state_interval=state_interval,
                slot_overhead_bytes=overhead,
            )
        except SizingError as error:
            raise ConfigError(
                f"disk_bytes={self.options.num_bytes} ({share} for this rank): {error}"
            ) from error

    def _facts(self, index: int, name: str, num_slots: int, payload_bytes: int) -> SlabFacts:
        spans = self._span_keys[index]
        return SlabFacts(index, name, num_slots, payload_bytes + header_bytes(spans), spans, self._digest)

    def _wanted_manifest(self) -> tuple[Manifest, dict[str, int]]:
        """The manifest of a new directory, and the lengths of its files."""
        arenas, total = [], 0
        lengths: dict[str, int] = {}
        for index in self._span_keys:
            inside = [i for i, arena in enumerate(self._arena_of) if arena == index]
            names = [self.layout.groups[i].name for i in inside]
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

    def _try_open(self) -> None:
        """Open the directory; what the medium refuses switches the tier off. Raises ConfigError."""
        try:
            opened = self._open()
        except OSError as error:
            self._health.switch_off(f"{self.options.path}: {error}")
            return
        with self._lock:
            self._opened = opened

    def _open(self) -> _Opened:
        manifest, lengths = self._wanted_manifest()
        writable = self.options.write != "never"
        root = self.options.path
        claim: Claim | None = None
        if writable:
            claim = claim_namespace(
                root,
                manifest,
                lengths=lengths,
                disk_bytes=self.options.num_bytes,
                reclaim=self.options.reclaim,
                dp_rank=self.options.dp_rank,
                files=self._files,
            )
            path, manifest = claim.path, claim.manifest
        else:
            path, manifest = open_for_reading(root, self._digest.hex(), self.options.dp_rank)
            self.plan = self._plan_of(manifest)
        slabs: list[Slab] = []
        try:
            if claim is not None and self._must_forget:
                claim.next_generation()
                manifest = claim.manifest
                self._must_forget = False
            self._direct = self._probe(path) if writable else self._direct
            index = self._make_index(path, manifest.generation, slabs, writable)
        except BaseException:
            for slab in slabs:
                slab.close()
            if claim is not None:
                claim.close()
            raise
        return _Opened(index, tuple(slabs), claim, manifest.generation)

    def _plan_of(self, manifest: Manifest) -> SlotPlan:
        """The slots that a writer has made; of a row that groups share, all but one each go to the first."""
        slots = {group.name: 0 for group in self.layout.groups}
        for arena in manifest.arenas:
            names = [name for _, name in arena.groups]
            slots |= dict.fromkeys(names, 1)
            slots[names[0]] = arena.num_slots - (len(names) - 1)
        return replace(self.plan, slots=slots)

    def _finish_opening(self) -> None:
        """Take over what an earlier run left, and switch on. Reads every slot's header where a table
        has been lost: that takes a while."""
        opened = self._opened
        if opened is None:
            return
        try:
            self._recover(opened)
        except OSError as error:
            self._health.switch_off(f"{self.options.path}: {error}")
            return
        opened.index.provide_memory(only_what_is_there=opened.claim is None)
        with self._lock:
            if self._must_forget:
                self._health.switch_off("a reset could not be recorded")
            else:
                self._health.switch_on()

    def _probe(self, path: Path) -> bool:
        direct = probe_direct(self._files, path)
        if not direct and self._direct:
            logger.warning("kvquilt: disk: %s takes no direct I/O: going through the page cache", path)
        return direct

    def _make_index(self, path: Path, generation: int, slabs: list[Slab], writable: bool) -> Store:
        def make(index: int, _name: str, num_slots: int, payload_bytes: int) -> Slab:
            facts = self._facts(index, f"arena{index:02d}", num_slots, payload_bytes)
            slab = Slab.open(path, facts, self._files, generation, direct=self._direct, writable=writable)
            slabs.append(slab)
            return slab

        def populate(fd: int, offset: int, length: int) -> None:
            next(slab for slab in slabs if slab.fd == fd).allocate(fd, offset, length)

        return Store(
            self.layout,
            self.plan,
            num_ranks=self._num_ranks,
            clock=self._clock,
            prefault="later",
            populate=populate,
            make_arena=make,
            optional=self._optional,
        )

    def _recover(self, opened: _Opened) -> None:
        opened.index.register_owner(self._owner, live=True)
        generation = opened.generation
        for slab in opened.slabs:
            started = self._clock()
            inside = [i for i, arena in enumerate(self._arena_of) if arena == slab.index]
            found = slab.recover(inside, self._stop.is_set)
            with self._lock:
                if self._must_forget or opened.generation != generation:
                    return  # a reset has come first
                taken = opened.index.adopt(slab.index, found.pages, found.stamps)
            if taken or found.scanned:
                logger.info(
                    "kvquilt: disk: %s: %d pages found again by %s in %.2f s",
                    ", ".join(self.layout.groups[i].name for i in inside),
                    taken,
                    "their headers" if found.scanned else "the table",
                    self._clock() - started,
                )

    # ---- the protocol ----

    def present(self, chain: Chain, group: int, first: int, last: int) -> BoolArray:
        opened = self._usable()
        if opened is None:
            return np.zeros(max(0, last - first), dtype=np.bool_)
        with contextlib.suppress(KVQuiltError):
            return opened.index.visible(chain, group, first, last)
        return np.zeros(max(0, last - first), dtype=np.bool_)

    def save(self, pages: Sequence[Pages], done: Callable[[], None]) -> int:
        opened = self._usable()
        if opened is None or opened.claim is None:
            for part in pages:
                self._counts.drop(part.group, "off", part.blocks.size)
            done()
            return 0
        ending = _Ending(done)
        accepted = 0
        try:
            for part in pages:
                with contextlib.suppress(KVQuiltError):
                    accepted += self._queue_writes(opened, part, ending)
        finally:
            ending.release()
        return accepted

    def _queue_writes(self, opened: _Opened, pages: Pages, ending: _Ending) -> int:
        slab = opened.slabs[self._arena_of[pages.group]]
        missing = opened.index.missing(pages.chain, pages.group, pages.blocks)
        wanted = np.flatnonzero(missing)
        room = (self.options.queue_bytes - self._workers.num_bytes("write")) // slab.slot_stride
        if wanted.size > room:
            self._counts.drop(pages.group, "queue", wanted.size - max(0, room))
            wanted = wanted[: max(0, room)]
        accepted = 0
        per_batch = max(1, _BATCH_BYTES // slab.slot_stride)
        for start in range(0, wanted.size, per_batch):
            chosen = wanted[start : start + per_batch]
            want = Want(pages.chain, pages.group, pages.blocks[chosen])
            with self._turn:
                ticket, generation = opened.index.reserve(self._owner, [want]), opened.generation
            self._counts.drop(pages.group, "full", sum(ticket.skipped_full.values()))
            if ticket.ticket_id is None:
                continue
            grant = ticket.grants[0]
            # The grant is in order and names each block once; what was offered need not be.
            order = np.argsort(pages.blocks[chosen], kind="stable")
            places = chosen[order[np.searchsorted(pages.blocks[chosen], grant.blocks, sorter=order)]]
            out = self._slot_pages(pages, places, grant.slots)
            batch = _Write(self, opened, slab, generation, ticket.ticket_id, out, ending)
            accepted += grant.slots.size
            ending.hold()
            self._workers.submit(
                Batch("write", grant.slots.size, grant.slots.size * slab.slot_stride, batch.run, batch.drop)
            )
        return accepted

    def _slot_pages(self, pages: Pages, places: IntArray, slots: IntArray) -> list[SlotPage]:
        payload = self.plan.slot_bytes[self.layout.groups[pages.group].name]
        blocks = pages.blocks[places]
        keys = pages.chain.keys(pages.group)[blocks].tobytes()
        spans = pages.chain.spans(pages.group, self._steps.get(pages.group, 0))
        starts = pages.offsets[places].tolist()
        memory, group = pages.memory, pages.group
        return [
            SlotPage(
                slot,
                group,
                keys[i * KEY_BYTES : (i + 1) * KEY_BYTES],
                spans(block),
                memory[starts[i] : starts[i] + payload],
            )
            for i, (slot, block) in enumerate(zip(slots.tolist(), blocks.tolist(), strict=True))
        ]

    def load(self, pages: Sequence[Pages], done: Loaded) -> None:
        results = [np.zeros(part.blocks.size, dtype=np.bool_) for part in pages]
        ending = _Ending(lambda: done(results))
        opened = self._usable()
        try:
            if opened is not None:
                for part, result in zip(pages, results, strict=True):
                    with contextlib.suppress(KVQuiltError):
                        self._queue_reads(opened, part, result, ending)
        finally:
            ending.release()

    def _queue_reads(self, opened: _Opened, pages: Pages, result: BoolArray, ending: _Ending) -> None:
        slab = opened.slabs[self._arena_of[pages.group]]
        per_batch = max(1, _BATCH_BYTES // slab.slot_stride)
        for start in range(0, pages.blocks.size, per_batch):
            wanted = pages.blocks[start : start + per_batch]
            with self._turn:
                lease_id, blocks, slots = opened.index.lease_blocks(
                    self._owner, pages.chain, pages.group, wanted
                )
                generation = opened.generation
            if lease_id is None:
                continue
            places = start + np.flatnonzero(np.isin(wanted, blocks))
            into = self._slot_pages(pages, places, slots)
            batch = _Read(
                self, opened, slab, generation, lease_id, pages, places, blocks, slots, into, result, ending
            )
            ending.hold()
            self._workers.submit(
                Batch("read", slots.size, slots.size * slab.slot_stride, batch.run, batch.drop)
            )

    def touch(self, chain: Chain, tokens: int) -> None:
        opened = self._usable()
        if opened is not None:
            with contextlib.suppress(KVQuiltError):
                opened.index.touch(chain, tokens)

    def withdraw(self, chain: Chain, group: int, blocks: IntArray) -> int:
        opened = self._usable()
        if opened is None:
            return 0
        with contextlib.suppress(KVQuiltError):
            lease_id, _, slots = opened.index.lease_blocks(self._owner, chain, group, blocks)
            if lease_id is None:
                return 0
            gone = opened.index.withdraw(chain, group, blocks)
            self._forget(opened, group, slots)
            opened.index.release(lease_id, self._owner)
            return gone
        return 0

    def reset(self) -> bool:
        with self._lock:
            opened = self._opened
            if self.options.write == "never":
                if opened is not None:
                    opened.index.reset()
                return False
            self._must_forget = True
            if opened is None or opened.claim is None:
                return False
            opened.index.reset()
            try:
                self._next_generation(opened, opened.claim)
            except OSError as error:
                self._health.switch_off(f"a reset could not be recorded: {error}")
                return False
            return True

    def _next_generation(self, opened: _Opened, claim: Claim) -> None:
        """Record a reset. What has been saved since it began belongs to the old generation, and goes too."""
        claim.next_generation()
        with self._turn:
            opened.generation = claim.manifest.generation
            opened.index.reset()
        self._must_forget = False

    def stats(self) -> TierStats:
        opened = self._opened
        stats = None
        if opened is not None:
            with contextlib.suppress(KVQuiltError):
                stats = {group.name: group for group in opened.index.stats().groups}
        groups = []
        for index, group in enumerate(self.layout.groups):
            if self._arena_of[index] < 0:
                continue
            level = stats.get(group.name) if stats else None
            groups.append(
                GroupTierStats(
                    name=group.name,
                    slots=level.slots if level else 0,
                    pages=level.pages if level else 0,
                    bytes_used=level.bytes_used if level else 0,
                    evictions=level.evictions_by_reason["room"] + level.evictions_by_reason["orphan"]
                    if level
                    else 0,
                    **self._counts.of(index),
                )
            )
        return TierStats(
            self.name,
            self._health.state,
            self._health.why,
            groups,
            self._workers.pages("read"),
            self._workers.pages("write"),
        )

    def take_seconds(self) -> dict[str, list[float]]:
        """How long batches took since the last call, from their queueing: by "read" and "write"."""
        return self._counts.take_seconds()

    def audit(self) -> None:
        """Prove that the index leaks nothing; call it when idle. Raises StoreCorruptError."""
        opened = self._opened
        if opened is not None:
            opened.index.audit()

    def wait_idle(self, timeout_seconds: float) -> bool:
        return self._workers.wait_idle(timeout_seconds)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        if self._health.on:
            self._workers.wait_idle(_DRAIN_SECONDS)
        ended = self._workers.close(_DRAIN_SECONDS)
        self._upkeep.join(_DRAIN_SECONDS)  # it may wait for the medium, too
        if ended and not self._upkeep.is_alive():
            self._record_reset()
            self._save_stamps()
            self._close_opened()
        else:
            logger.error("kvquilt: disk: a thread still waits for the medium; its files stay open")

    # ---- health ----

    @property
    def state(self) -> str:
        """ "starting", "on" or "off"."""
        return self._health.state

    def _usable(self) -> _Opened | None:
        return self._opened if self._health.on and not self._closed else None

    def _has_much_to_read(self) -> bool:
        slabs = self._opened.slabs if self._opened is not None else ()
        return sum(slab.usable_slots for slab in slabs if slab.table_lost) > _SLOTS_READ_AT_ONCE

    def _keep_up(self) -> None:
        if self._health.state == "starting":
            self._finish_opening()
        while not self._stop.wait(self._tick_seconds):
            try:
                self._tick()
            except Exception:
                logger.exception("kvquilt: disk: upkeep failed")

    def _tick(self) -> None:
        opened = self._opened
        since = self._workers.oldest_start()
        stalled = since is not None and self._clock() - since > self._stall_seconds
        if self._health.on:
            if stalled:
                self._health.switch_off(f"no answer for {self._stall_seconds:.0f} s")
            elif opened is not None and opened.claim is not None and not opened.claim.still_there():
                self._health.switch_off(f"{opened.claim.path} has been removed or replaced")
            elif self._clock() - self._stamps_saved_at > _STAMP_SECONDS:
                self._stamps_saved_at = self._clock()
                self._save_stamps()
        if not self._health.on:
            self._workers.drop_queued()
            if self._health.due and not stalled:
                self._try_again()

    def _try_again(self) -> None:
        """Off, and due for a try: reopen what has gone, otherwise probe what is there."""
        opened = self._opened
        gone = opened is None or (opened.claim is not None and not opened.claim.still_there())
        try:
            if gone:
                if self._workers.oldest_start() is not None:
                    return
                self._close_opened()
                self._try_open()
                self._finish_opening()
                return
            assert opened is not None
            with self._lock:
                if self._must_forget and opened.claim is not None:
                    self._next_generation(opened, opened.claim)
            for slab in opened.slabs:
                slab.write_head()
        except (OSError, ConfigError) as error:
            self._health.switch_off(str(error))
            return
        self._health.switch_on()

    def _record_reset(self) -> None:
        """A last try at a reset that could not be recorded when it was asked for."""
        with self._lock, contextlib.suppress(OSError, KVQuiltError):
            opened = self._opened
            if self._must_forget and opened is not None and opened.claim is not None:
                self._next_generation(opened, opened.claim)

    def _save_stamps(self) -> None:
        opened = self._opened
        if opened is None or opened.claim is None:
            return
        with contextlib.suppress(OSError, KVQuiltError):
            for slab in opened.slabs:
                slab.save_stamps(opened.index.stamps(slab.index))

    def _close_opened(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.index.close()  # closes the slabs, its arenas
            if opened.claim is not None:
                opened.claim.close()

    def _forget(self, opened: _Opened, group: int, slots: IntArray) -> None:
        """Bad pages must not be found by a later start either."""
        if opened.claim is not None:
            try:
                opened.slabs[self._arena_of[group]].forget(slots.tolist())
            except OSError as error:
                self._health.bad(str(error))


class _Ending:
    """Calls `done` when everything that holds it has let go."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._held = 1

    def hold(self) -> None:
        with self._lock:
            self._held += 1

    def release(self) -> None:
        with self._lock:
            self._held -= 1
            last = self._held == 0
        if last:
            self._done()


@dataclass(eq=False)
class _Write:
    """Pages that one thread writes under one ticket of the index."""

    tier: NVMeTier
    opened: _Opened
    slab: Slab
    generation: int
    ticket_id: int
    pages: list[SlotPage]
    ending: _Ending

    def __post_init__(self) -> None:
        self.queued_at = time.monotonic()

    def run(self) -> None:
        tier, good = self.tier, False
        try:
            stamp = int(self.opened.index.now)
            self.slab.write_pages(self.pages, self.generation, stamp)
            tier._health.good()
            good = True
        except (OSError, ValueError) as error:
            tier._health.bad(str(error))
        finally:
            self._end(good, "error")
        if good:
            tier._counts.wrote(self.pages[0].group, len(self.pages), time.monotonic() - self.queued_at)

    def drop(self) -> None:
        self._end(False, "off")

    def _end(self, good: bool, why: Literal["error", "off"]) -> None:
        if not good:
            self.tier._counts.drop(self.pages[0].group, why, len(self.pages))
        try:
            with contextlib.suppress(KVQuiltError):
                self.opened.index.commit(self.ticket_id, self.tier._owner, failed=not good)
        finally:
            self.ending.release()


@dataclass(eq=False)
class _Read:
    """Pages that one thread reads under one lease of the index. places: where in `result` they stand."""

    tier: NVMeTier
    opened: _Opened
    slab: Slab
    generation: int
    lease_id: int
    pages: Pages
    places: IntArray
    blocks: IntArray
    slots: IntArray
    slot_pages: list[SlotPage]
    result: BoolArray
    ending: _Ending

    def __post_init__(self) -> None:
        self.queued_at = time.monotonic()

    def run(self) -> None:
        tier = self.tier
        try:
            verdicts = self.slab.read_pages(self.slot_pages, self.generation)
            good = np.asarray([verdict is True for verdict in verdicts], dtype=np.bool_)
            if any(verdict is None for verdict in verdicts):
                tier._health.bad("a page could not be read")
            else:
                tier._health.good()
            self.result[self.places[good]] = True
            tier._counts.read(self.pages.group, int(good.sum()), time.monotonic() - self.queued_at)
            self._withdraw(~good)
        except (OSError, ValueError) as error:
            tier._health.bad(str(error))
            self._withdraw(np.ones(len(self.slot_pages), dtype=np.bool_))
        finally:
            self._end()

    def drop(self) -> None:
        self._end()

    def _withdraw(self, bad: BoolArray) -> None:
        """Forget pages that proved bad. Those that somebody has forgotten meanwhile were overwritten on
        purpose, or are counted already; and a page saved since under the same key is another one."""
        if not bad.any():
            return
        tier, group, chain, index = self.tier, self.pages.group, self.pages.chain, self.opened.index
        slot_of = dict(zip(self.blocks[bad].tolist(), self.slots[bad].tolist(), strict=True))
        with contextlib.suppress(KVQuiltError):
            lease_id, blocks, slots = index.lease_blocks(tier._owner, chain, group, np.asarray(list(slot_of)))
            if lease_id is None:
                return
            still = np.asarray(
                [slot_of[b] == s for b, s in zip(blocks.tolist(), slots.tolist(), strict=True)]
            )
            tier._counts.found_bad(group, index.withdraw(chain, group, blocks[still]))
            tier._forget(self.opened, group, slots[still])
            index.release(lease_id, tier._owner)

    def _end(self) -> None:
        try:
            with contextlib.suppress(KVQuiltError):
                self.opened.index.release(self.lease_id, self.tier._owner)
        finally:
            self.ending.release()
