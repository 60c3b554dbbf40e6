"""Host RAM as a tier: the smallest complete member of the protocol, and what others are measured by."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import KVQuiltError
from kvquilt.layout import CacheLayout
from kvquilt.sizing import Partition, plan_slots
from kvquilt.store import Chain, Store, Want
from kvquilt.tiers.base import GroupTierStats, Loaded, Pages, TierStats
from kvquilt.tiers.counts import Counts
from kvquilt.tiers.memory import RamMemory

__all__ = ["RamTier"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_OWNER = "ram"


class RamTier:
    """Pages of one layout in memory of its own, at most `num_bytes`. Copies in the caller's thread.

    checkpoint_interval, state_interval: as of `plan_slots`. Raises SizingError for too few bytes.
    Thread-safe.
    """

    name = "ram"

    def __init__(
        self,
        layout: CacheLayout,
        num_bytes: int,
        *,
        num_ranks: int = 1,
        partition: Partition = "solved",
        checkpoint_interval: int | None = None,
        state_interval: int | None = None,
        optional: frozenset[str] | None = None,
    ) -> None:
        self.layout = layout
        self.plan = plan_slots(
            layout,
            num_bytes,
            checkpoint_interval,
            num_ranks=num_ranks,
            partition=partition,
            state_interval=state_interval,
        )
        self._store = Store(layout, self.plan, num_ranks=num_ranks, optional=optional)
        self._store.register_owner(_OWNER, live=True)
        self._memory = RamMemory(self._store)
        self._counts = Counts(layout, num_ranks)
        # Guards what is below: calls that copy, and whether more may begin.
        self._changed = threading.Condition()
        self._copying = 0
        self._closed = False

    def present(self, chain: Chain, group: int, first: int, last: int) -> BoolArray:
        with contextlib.suppress(KVQuiltError):
            return self._store.visible(chain, group, first, last)
        return np.zeros(max(0, last - first), dtype=np.bool_)

    def save(self, pages: Sequence[Pages], done: Callable[[], None]) -> int:
        with self._begun(done) as begun:
            if begun:
                return self._save([part for part in pages if self._store.arena_of[part.group] >= 0])
            for part in pages:
                self._counts.drop(part.group, "off", part.blocks.size)
        return 0

    def room_bytes(self) -> int:
        if self._closed:
            return 0
        return self._store.size_bytes

    def _save(self, pages: Sequence[Pages]) -> int:
        began = time.monotonic()
        wants = [Want(part.chain, part.group, part.blocks) for part in pages]
        ticket = self._store.reserve(_OWNER, wants)
        for index, group in enumerate(self.layout.groups):
            self._counts.drop(index, "full", ticket.skipped_full.get(group.name, 0))
        if ticket.ticket_id is None:
            return 0
        good = False
        try:
            for grant in ticket.grants:
                part = pages[grant.want]
                order = np.argsort(part.blocks, kind="stable")
                places = order[np.searchsorted(part.blocks, grant.blocks, sorter=order)]
                own = self._memory.pages(part.chain, part.group, grant.blocks, grant.slots)
                self._copy(part, part.offsets[places], own, own.offsets)
            good = True
        finally:
            self._store.commit(ticket.ticket_id, _OWNER, failed=not good)
        for grant in ticket.grants:
            self._counts.wrote(pages[grant.want].group, grant.slots.size, time.monotonic() - began)
        return sum(grant.slots.size for grant in ticket.grants)

    def load(self, pages: Sequence[Pages], done: Loaded) -> None:
        results = [np.zeros(part.blocks.size, dtype=np.bool_) for part in pages]
        with self._begun(lambda: done(results)) as begun:
            if begun:
                for part, result in zip(pages, results, strict=True):
                    self._load(part, result)

    def _load(self, part: Pages, result: BoolArray) -> None:
        began = time.monotonic()
        lease_id, blocks, slots = self._store.lease_blocks(_OWNER, part.chain, part.group, part.blocks)
        if lease_id is None:
            return
        try:
            found = np.isin(part.blocks, blocks)
            own = self._memory.pages(part.chain, part.group, blocks, slots)
            self._copy(own, own.offsets, part, part.offsets[found])
            result[found] = True
        finally:
            self._store.release(lease_id, _OWNER)
        self._counts.read(part.group, slots.size, time.monotonic() - began)

    def _copy(self, source: Pages, at: IntArray, target: Pages, to: IntArray) -> None:
        """One page after the other; numpy lets other threads run meanwhile."""
        size = self.plan.slot_bytes[self.layout.groups[source.group].name]
        old = np.frombuffer(source.memory, dtype=np.uint8)
        new = np.frombuffer(target.memory, dtype=np.uint8)
        for start, end in zip(at.tolist(), to.tolist(), strict=True):
            new[end : end + size] = old[start : start + size]

    def touch(self, chain: Chain, tokens: int) -> None:
        with contextlib.suppress(KVQuiltError):
            self._store.touch(chain, tokens)

    def withdraw(self, chain: Chain, group: int, blocks: IntArray) -> int:
        with contextlib.suppress(KVQuiltError):
            return self._store.withdraw(chain, group, blocks)
        return 0

    def reset(self) -> bool:
        """Forget all pages; True, since nothing of them outlives the process."""
        with contextlib.suppress(KVQuiltError):
            self._store.reset()
        return True

    def stats(self) -> TierStats:
        levels = {}
        with contextlib.suppress(KVQuiltError):
            levels = {group.name: group for group in self._store.stats().groups}
        groups = []
        for index, arena in enumerate(self._store.arena_of):
            if arena < 0:
                continue
            name = self.layout.groups[index].name
            level = levels.get(name)
            evicted = level.evictions_by_reason if level else {}
            groups.append(
                GroupTierStats(
                    name=name,
                    slots=level.slots if level else 0,
                    pages=level.pages if level else 0,
                    bytes_used=level.bytes_used if level else 0,
                    evictions=evicted.get("room", 0) + evicted.get("orphan", 0),
                    **self._counts.of(index),
                )
            )
        state, why = ("off", "closed") if self._closed else ("on", "")
        return TierStats(self.name, state, why, groups, 0, 0)

    def audit(self) -> None:
        """Prove that the index leaks nothing; call it when idle. Raises StoreCorruptError."""
        if not self._closed:
            self._store.audit().check_idle()

    def wait_idle(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._copying, timeout_seconds)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._copying)
        self._store.close()

    @contextlib.contextmanager
    def _begun(self, done: Callable[[], None]) -> Iterator[bool]:
        """While in force, `close` waits; False if the tier is closed. Calls `done` at the end."""
        with self._changed:
            begun = not self._closed
            self._copying += begun
        try:
            yield begun
        finally:
            try:
                done()
            finally:
                with self._changed:
                    self._copying -= begun
                    self._changed.notify_all()
