"""The NVMe tier: pages in slab files, found by a `Store` of their own, written and read by few threads."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import ConfigError, KVQuiltError
from kvquilt.layout import CacheLayout
from kvquilt.layout.namespace import NamespaceFactors
from kvquilt.sizing import Partition, SlotPlan
from kvquilt.store import Chain
from kvquilt.tiers.base import GroupTierStats, Loaded, Pages, TierStats
from kvquilt.tiers.batches import Ending
from kvquilt.tiers.counts import Counts
from kvquilt.tiers.directory import Claim
from kvquilt.tiers.files import Files
from kvquilt.tiers.health import Health
from kvquilt.tiers.opening import OWNER, DiskOptions, Opened, Opener
from kvquilt.tiers.queues import Queues
from kvquilt.tiers.workers import Batch, Workers

__all__ = ["DiskOptions", "NVMeTier"]

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_STALL_SECONDS = 10.0
_TICK_SECONDS = 0.5
_STAMP_SECONDS = 30.0
_BAD_PAGES_SECONDS = 60.0  # between two lines in the log
_DRAIN_SECONDS = 5.0
_MORE_THREADS = 2  # than calls at once: see `Calls`
_SLOTS_READ_AT_ONCE = 10_000  # headers that a start waits for; beyond it they are read in the background


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
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._tick_seconds = tick_seconds
        self._opener = Opener(
            layout,
            namespace,
            options,
            num_ranks=num_ranks,
            partition=partition,
            checkpoint_interval=checkpoint_interval,
            state_interval=state_interval,
            optional=optional,
            files=files or Files(),
            clock=clock,
        )
        self._arena_of = self._opener.arena_of
        self._counts = Counts(layout, num_ranks)
        self._health = Health("the disk tier", clock)
        # Guards _opened, _must_forget and the change of state; the medium may work meanwhile.
        self._lock = threading.RLock()
        self._turn = threading.Lock()  # of Queues
        self._opened: Opened | None = None
        self._must_forget = False
        self._takes_over = True  # until a reader is reset, which can't record it
        self._closed = False
        self._closing = threading.Lock()  # guards the change of _closed; never held while the medium works
        self._one_reset = threading.Lock()  # guards _resetting
        self._resetting: threading.Thread | None = None
        self._stamps_saved_at = clock()
        self._bad_told, self._bad_told_at = 0, -math.inf
        self._stop = threading.Event()
        self._try_open()
        self._workers = Workers("kvquilt-disk", options.threads + _MORE_THREADS, clock)
        self._queues = Queues(
            layout,
            self._workers,
            health=self._health,
            counts=self._counts,
            turn=self._turn,
            calls=options.threads,
            queue_bytes=options.queue_bytes,
        )
        try:
            if not self._has_much_to_read():
                self._finish_opening()
        except BaseException:
            self._workers.close(_DRAIN_SECONDS)
            self._close_opened()
            raise
        self._upkeep = threading.Thread(target=self._keep_up, name="kvquilt-disk-upkeep", daemon=True)
        self._upkeep.start()

    # ---- opening ----

    def _try_open(self) -> None:
        """Open the directory; what the medium refuses switches the tier off. Raises ConfigError."""
        forget = self._must_forget
        try:
            opened = self._opener.open(forget=forget)
        except OSError as error:
            self._health.switch_off(f"{self.options.path}: {error}")
            return
        with self._lock:
            self._opened = opened
            if forget and opened.claim is not None:  # what was asked for meanwhile has still to be recorded
                self._must_forget = False

    def _finish_opening(self) -> None:
        """Take over what an earlier run left, and switch on. Reads every slot's header where a table
        has been lost: that takes a while."""
        opened = self._opened
        if opened is None:
            return
        try:
            self._opener.recover(opened, partial(self._taking, opened.generation), self._stop.is_set)
        except OSError as error:
            self._health.switch_off(f"{self.options.path}: {error}")
            return
        opened.recovered = True
        opened.index.provide_memory(only_what_is_there=opened.claim is None)
        with self._lock:
            if self._must_forget:
                self._health.switch_off("a reset could not be recorded")
            else:
                self._health.switch_on()

    @contextlib.contextmanager
    def _taking(self, generation: int) -> Iterator[bool]:
        """Nobody resets meanwhile; False if somebody has."""
        with self._lock:
            opened = self._opened
            fresh = self._takes_over and not self._must_forget
            yield fresh and opened is not None and opened.generation == generation

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
        ending = Ending(done)
        accepted = 0
        try:
            for part in pages:
                with contextlib.suppress(KVQuiltError):
                    accepted += self._queues.write(opened, part, ending)
        finally:
            ending.release()
        return accepted

    def room_bytes(self) -> int:
        opened = self._usable()
        if opened is None or opened.claim is None:
            return 0
        return self._queues.room_bytes(opened)

    def load(self, pages: Sequence[Pages], done: Loaded) -> None:
        results = [np.zeros(part.blocks.size, dtype=np.bool_) for part in pages]
        ending = Ending(lambda: done(results))
        opened = self._usable()
        try:
            if opened is not None:
                for part, result in zip(pages, results, strict=True):
                    with contextlib.suppress(KVQuiltError):
                        self._queues.read(opened, part, result, ending)
        finally:
            ending.release()

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
            lease_id, _, slots = opened.index.lease_blocks(OWNER, chain, group, blocks)
            if lease_id is None:
                return 0
            gone = opened.index.withdraw(chain, group, blocks)
            try:
                opened.forget(group, slots)
            except OSError as error:
                self._health.bad(str(error))
            opened.index.release(lease_id, OWNER)
            return gone
        return 0

    def reset(self) -> bool:
        if self.options.write == "never":
            with self._lock:
                self._takes_over = False
                if self._opened is not None:
                    self._opened.index.reset()
            return False
        opened = self._opened
        if opened is not None:
            with contextlib.suppress(KVQuiltError):
                opened.index.reset()
        recorded = self._reset_in_time()
        if recorded is None:
            why = f"no answer for {self._stall_seconds:.0f} s"
            self._health.switch_off(f"a reset could not be recorded: {why}")
        return bool(recorded)

    def _reset_in_time(self) -> bool | None:
        """Record a reset in a thread of its own, since a medium that does not answer must not hold up who
        asks; None if there is no answer yet."""
        deadline = time.monotonic() + self._stall_seconds
        if not self._one_reset.acquire(timeout=self._stall_seconds):
            return None
        try:
            answers: list[bool] = []
            if _ended(self._resetting, max(0.0, deadline - time.monotonic())):
                thread = threading.Thread(
                    target=lambda: answers.append(self._reset()), name="kvquilt-disk-reset", daemon=True
                )
                thread.start()
                self._resetting = thread  # `close`, which waits for it, may come now
                if _ended(thread, max(0.0, deadline - time.monotonic())):
                    return answers == [True]
            return None
        finally:
            self._one_reset.release()

    def _reset(self) -> bool:
        with self._lock:
            opened = self._opened
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

    def _next_generation(self, opened: Opened, claim: Claim) -> None:
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
            opened.index.audit().check_idle()

    def wait_idle(self, timeout_seconds: float) -> bool:
        return self._workers.wait_idle(timeout_seconds)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        if self._health.on:
            self._workers.wait_idle(_DRAIN_SECONDS)
        ended = self._workers.close(_DRAIN_SECONDS)
        for thread in (self._upkeep, self._resetting):  # they may wait for the medium, too
            ended &= _ended(thread, _DRAIN_SECONDS)
        if ended and (self._opened is None or self._opened.index.stop_memory(_DRAIN_SECONDS)):
            self._record_reset()
            self._save_stamps()
            self._close_opened()
        else:
            logger.error("kvquilt: disk: a thread still waits for the medium; its files stay open")

    # ---- health ----

    @property
    def path(self) -> Path:
        """Where its files lie."""
        return self._opener.path

    @property
    def plan(self) -> SlotPlan:
        """The slots of each group."""
        return self._opener.plan

    @property
    def state(self) -> str:
        """ "starting", "on" or "off"."""
        return self._health.state

    def _usable(self) -> Opened | None:
        return self._opened if self._health.on and not self._closed else None

    def _has_much_to_read(self) -> bool:
        slabs = self._opened.slabs if self._opened is not None else ()
        return sum(slab.usable_slots for slab in slabs if slab.table_lost) > _SLOTS_READ_AT_ONCE

    def _keep_up(self) -> None:
        if self._health.state == "starting":
            try:
                self._finish_opening()
            except Exception as error:
                logger.exception("kvquilt: disk: what an earlier run left could not be taken over")
                self._health.switch_off(str(error))
        while not self._stop.wait(self._tick_seconds):
            try:
                self._tick()
            except Exception:
                logger.exception("kvquilt: disk: upkeep failed")

    def _tell_of_bad_pages(self) -> None:
        """Metrics count them; the log says it now and then."""
        bad = self._counts.bad()
        if bad > self._bad_told and self._clock() >= self._bad_told_at + _BAD_PAGES_SECONDS:
            logger.warning(
                "kvquilt: disk: %d pages under %s did not pass their check, or could not be read: they are "
                "dropped and computed again (%d since the start); kvquilt fsck checks all of them",
                bad - self._bad_told,
                self.options.path,
                bad,
            )
            self._bad_told, self._bad_told_at = bad, self._clock()

    def _tick(self) -> None:
        self._tell_of_bad_pages()
        opened = self._opened
        since = self._workers.oldest_start()
        stalled = since is not None and self._clock() - since > self._stall_seconds
        if self._health.on:
            if stalled:
                self._health.switch_off(f"no answer for {self._stall_seconds:.0f} s")
            elif opened is not None and not opened.still_there():
                why = "has been removed, replaced or reset, or cannot be read"
                self._health.switch_off(f"{self.options.path} {why}")
            elif self._clock() - self._stamps_saved_at > _STAMP_SECONDS:
                self._stamps_saved_at = self._clock()
                # By a worker: if the medium hangs there, this thread must be left to see it.
                self._workers.submit(Batch("write", 0, 0, self._save_and_grow, lambda: None))
        if not self._health.on:
            self._workers.drop_queued()
            if self._health.due and not stalled:
                self._try_again()

    def _try_again(self) -> None:
        """Off, and due for a try: reopen what has gone, otherwise probe what is there."""
        opened = self._opened
        gone = opened is None or not opened.still_there()
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
            if not opened.recovered:
                self._finish_opening()
                return
            for slab in opened.slabs:
                slab.probe()
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
        if self._opened is not None:
            self._opened.save_stamps()

    def _save_and_grow(self) -> None:
        self._save_stamps()
        if (opened := self._usable()) is not None:
            opened.grow()

    def _close_opened(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _ended(thread: threading.Thread | None, timeout_seconds: float) -> bool:
    """Wait until a thread has ended, if there is one; False if that took too long."""
    if thread is None:
        return True
    thread.join(timeout_seconds)
    return not thread.is_alive()
