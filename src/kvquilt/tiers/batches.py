"""What a thread of the disk tier does at a time: it writes under one ticket, or reads under one lease."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import KVQuiltError
from kvquilt.tiers.base import Pages
from kvquilt.tiers.counts import Counts
from kvquilt.tiers.health import Health
from kvquilt.tiers.opening import OWNER, Opened
from kvquilt.tiers.slot_pages import SlotPages

__all__ = ["Ending", "ReadBatch", "Together", "WriteBatch"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class Ending:
    """Calls `done` when everything that holds it has let go."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._held = 1

    def hold(self) -> None:
        """Wait for one more."""
        with self._lock:
            self._held += 1

    def release(self) -> None:
        """One less to wait for."""
        with self._lock:
            self._held -= 1
            last = self._held == 0
        if last:
            self._done()


class Together:
    """Batches of one group's pages that are saved together, and end in any order. Whichever ends last makes
    their prefix the newest, once for all, tail before head. num_blocks: up to the last block of all."""

    def __init__(self, batches: int, num_blocks: int) -> None:
        self._left = batches
        self._num_blocks = num_blocks
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one_ends(self) -> Iterator[int]:
        """One batch after the other; how many blocks this one has to make the newest."""
        with self._lock:
            self._left -= 1
            yield 0 if self._left else self._num_blocks


@dataclass(eq=False)
class WriteBatch:
    """Pages that one thread writes under one ticket of the index.

    stamps: recency of each, for a start that finds nothing newer. together: those that are saved with it.
    """

    opened: Opened
    health: Health
    counts: Counts
    generation: int
    ticket_id: int
    group: int
    pages: SlotPages
    stamps: IntArray
    ending: Ending
    together: Together

    def __post_init__(self) -> None:
        self.queued_at = time.monotonic()

    def run(self) -> None:
        """Let the medium work, and end it."""
        good, group = False, self.group
        try:
            self.opened.slab_of(group).write_pages(self.pages, self.generation, self.stamps)
            self.health.good()
            good = True
        except (OSError, ValueError) as error:
            self.health.bad(str(error))
        finally:
            self._end(good, "error")
        if good:
            self.counts.wrote(group, len(self.pages), time.monotonic() - self.queued_at)

    def drop(self) -> None:
        """End it undone."""
        self._end(False, "off")

    def _end(self, good: bool, why: Literal["error", "off"]) -> None:
        if not good:
            self.counts.drop(self.group, why, len(self.pages))
        try:
            with contextlib.suppress(KVQuiltError), self.together.one_ends() as touch:
                self.opened.index.commit(self.ticket_id, OWNER, failed=not good, touch=touch)
        finally:
            self.ending.release()


@dataclass(eq=False)
class ReadBatch:
    """Pages that one thread reads under one lease of the index. places: where in `result` they stand."""

    opened: Opened
    health: Health
    counts: Counts
    generation: int
    lease_id: int
    pages: Pages
    places: IntArray
    blocks: IntArray
    slot_pages: SlotPages
    result: BoolArray
    ending: Ending

    def __post_init__(self) -> None:
        self.queued_at = time.monotonic()

    def run(self) -> None:
        """Let the medium work, and end it."""
        group = self.pages.group
        try:
            good, unread = self.opened.slab_of(group).read_pages(self.slot_pages, self.generation)
            if unread.any():
                self.health.bad("a page could not be read")
            else:
                self.health.good()
            self.result[self.places[good]] = True
            self.counts.read(group, int(good.sum()), time.monotonic() - self.queued_at)
            self._withdraw(~good)
        except (OSError, ValueError) as error:
            self.health.bad(str(error))
            self._withdraw(np.ones(len(self.slot_pages), dtype=np.bool_))
        finally:
            self._end()

    def drop(self) -> None:
        """End it undone."""
        self._end()

    def _withdraw(self, bad: BoolArray) -> None:
        """Forget pages that proved bad. Those that somebody has forgotten meanwhile were overwritten on
        purpose, or are counted already; and a page saved since under the same key is another one."""
        if not bad.any():
            return
        group, chain, index = self.pages.group, self.pages.chain, self.opened.index
        slot_of = dict(zip(self.blocks[bad].tolist(), self.slot_pages.slots[bad].tolist(), strict=True))
        with contextlib.suppress(KVQuiltError):
            lease_id, blocks, slots = index.lease_blocks(OWNER, chain, group, np.asarray(list(slot_of)))
            if lease_id is None:
                return
            still = np.asarray(
                [slot_of[b] == s for b, s in zip(blocks.tolist(), slots.tolist(), strict=True)]
            )
            self.counts.found_bad(group, index.withdraw(chain, group, blocks[still]))
            try:
                self.opened.forget(group, slots[still])
            except OSError as error:
                self.health.bad(str(error))
            index.release(lease_id, OWNER)

    def _end(self) -> None:
        try:
            with contextlib.suppress(KVQuiltError):
                self.opened.index.release(self.lease_id, OWNER)
        finally:
            self.ending.release()
