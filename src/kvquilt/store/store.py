"""`Store`: pages of all groups in slots, found by the engine's hashes.

The slots are shared memory unless `make_arena` makes others, e.g. of a file. Every call is a batch:
one look-up per request, one reservation per engine step. Nothing here copies or reads page bytes;
callers move them between the engine and the slots it names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import KVQuiltError
from kvquilt.layout import CacheLayout
from kvquilt.store import kernels
from kvquilt.store.accounts import audit, collect_stats
from kvquilt.store.admission import Admission
from kvquilt.store.arenas import ArenaMaker, build_arenas
from kvquilt.store.chain import Chain
from kvquilt.store.changes import Change, ChangeLog
from kvquilt.store.index import GroupIndex
from kvquilt.store.kernels import Slots
from kvquilt.store.leases import Leases, PendingTicket, Reserved, Tickets
from kvquilt.store.lookup import Part, Resolution, needed_range, resolve, resolve_at
from kvquilt.store.pool import Arena, Populate, Prefault, SlotSpace, populate_extent
from kvquilt.store.records import (
    Audit,
    Found,
    Gathered,
    KnownPages,
    PageRange,
    SlotPlanLike,
    StoreStats,
    Ticket,
    Want,
)

__all__ = ["Store"]

IntArray = NDArray[np.int64]
_EVER = int(np.iinfo(np.int64).max)


class Store:
    """Pages of one layout in slots: look-up, leases, tickets, eviction.

    layout, plan: the groups and their slots; a plan for other groups or ranks is refused.
    num_ranks: local ranks whose pages lie one after another in each slot.
    clock: seconds, for leases and tickets only; recency has its own count of touches.
    lease_seconds: life of a lease whose owner is not live. ticket_seconds: after it a ticket that
    has not ended loses its keys, so that others can write them; its slots stay reserved.
    prefault: True gives the slots their memory in the background, "sync" before returning, "later"
    when `provide_memory` is called; False declares all slots usable without touching them (tests,
    benchmarks of the index). make_arena: what the slots lie in.
    populate: how an extent gets its memory.
    record_changes: keep what `take_changes` gives out; somebody must take it, or it piles up.
    optional: groups that a hit may do without (`ignore` of a look-up); by default draft groups.
    What only they lack is no reason to give up other groups' pages.

    One lock guards all state but `Arena.usable_slots`, which the prefault thread publishes; it
    is never held while memory or page bytes are touched. Calls after `close` raise KVQuiltError.
    """

    def __init__(
        self,
        layout: CacheLayout,
        plan: SlotPlanLike,
        *,
        num_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = 60.0,
        ticket_seconds: float = 120.0,
        prefault: bool | Literal["sync", "later"] = True,
        populate: Populate = populate_extent,
        make_arena: ArenaMaker = Arena,
        record_changes: bool = False,
        optional: Collection[str] | None = None,
    ) -> None:
        self.layout = layout
        built = build_arenas(layout, plan, num_ranks, make_arena)
        self.arenas: tuple[SlotSpace, ...] = built.arenas
        self.arena_of: tuple[int, ...] = built.arena_of
        self._built = built
        self._views = tuple(built.views.values())
        # Dense groups last, so that where groups share an arena a checkpoint goes before its prefix.
        self._by_age = tuple(sorted(self._views, key=lambda view: view.group.dense))
        self._lock = threading.Lock()
        self._closed = False
        self._leases = Leases(clock, lease_seconds)
        self._tickets = Tickets(clock, ticket_seconds)
        if optional is None:
            optional = [group.name for group in layout.groups if group.draft]
        self._log = ChangeLog() if record_changes else None
        self._admission = Admission(layout, built, frozenset(optional), self._log)
        self._prefault = Prefault(self.arenas, populate)
        self._may_admit = prefault != "later"
        self._start_memory(prefault)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, whether they have memory yet or not."""
        return sum(arena.num_slots * arena.slot_stride for arena in self.arenas)

    # Look-up and leases

    def lookup(
        self,
        owner: str,
        chain: Chain,
        num_tokens: int,
        *,
        local_tokens: int = 0,
        ignore: Collection[str] = (),
    ) -> Found:
        """The longest boundary below `num_tokens`, with its pages leased to `owner`.

        local_tokens: what the engine holds itself: counts as present, is not leased.
        ignore: names of groups to leave out. Pages of the boundary become the newest, tail
        before head. A draft group's peek block is required, but neither returned nor leased.
        """
        with self._lock:
            self._check_open()
            found = resolve(self.layout, self._views, chain, num_tokens, local_tokens, ignore)
            return self._lease(owner, chain, found)

    def lease_at(
        self,
        owner: str,
        chain: Chain,
        tokens: int,
        *,
        local_tokens: int = 0,
        ignore: Collection[str] = (),
    ) -> Found | None:
        """`lookup` for one given boundary; None if it is not one, or not every group can serve it."""
        with self._lock:
            self._check_open()
            if tokens < 0 or tokens % self.layout.lattice_tokens:
                return None
            found = resolve_at(self._views, chain, tokens, local_tokens, ignore)
            return None if found is None else self._lease(owner, chain, found)

    def lease_blocks(
        self, owner: str, chain: Chain, group_index: int, blocks: IntArray
    ) -> tuple[int | None, IntArray, IntArray]:
        """Lease what is visible of these blocks: (lease, its blocks, their slots); (None, none, none)
        if nothing is. Recency stays as it was. Raises ValueError as `missing` does."""
        with self._lock:
            self._check_open()
            nothing = np.zeros(0, dtype=np.int64)
            view = self._built.views.get(group_index)
            if view is None:
                return None, nothing, nothing
            wanted = self._admission.checked_blocks(view, chain, blocks)
            slots = view.find(chain, wanted)
            found = slots >= 0
            if not found.any():
                return None, nothing, nothing
            return self._hold(owner, view, slots[found]), wanted[found], slots[found]

    def gather(
        self,
        owner: str,
        chain: Chain,
        tokens: int,
        *,
        local_tokens: int = 0,
        ignore: Collection[str] = (),
    ) -> Gathered:
        """Lease what is visible of what the boundary `tokens` needs beyond `local_tokens`, the peek
        blocks included, and say what lacks. Raises ValueError for a boundary beyond the chain."""
        with self._lock:
            self._check_open()
            missing: list[tuple[int, IntArray]] = []
            awaited: list[tuple[int, IntArray]] = []
            held: list[tuple[Slots, IntArray]] = []
            for view in self._views:
                if view.group.name in ignore:
                    continue
                lo, end = needed_range(view, tokens)
                first = max(lo, local_tokens // view.group.tokens_per_block)
                blocks = np.arange(first, max(first, end), dtype=np.int64)
                self._admission.checked_blocks(view, chain, blocks)
                states = view.states(chain, blocks)
                for kind, lacking in ((kernels.FREE, missing), (kernels.TICKETED, awaited)):
                    if (states == kind).any():
                        lacking.append((view.index, blocks[states == kind]))
                slots = view.find(chain, blocks[states == kernels.RESIDENT])
                if slots.size:
                    held.append((view.slots, slots))
            for slots_of, which in held:
                kernels.pin(slots_of, which)
            lease_id = self._leases.take(owner, (), tuple(held)) if held else None
            return Gathered(lease_id, tuple(missing), tuple(awaited))

    def oldest_until(self, arena: int, count: int) -> int:
        """The clock at which the last of the `count` pages of an arena that would be evicted first was
        touched; -1 if there is none."""
        with self._lock:
            self._check_open()
            slots_of = self._built.slots[arena]
            out = np.empty(count, dtype=np.int64)
            found = kernels.oldest(slots_of, _EVER, out)
            return int(slots_of.stamp[out[found - 1]]) if found else -1

    def oldest(self, arena: int, count: int, *, before: int) -> IntArray:
        """Slots of at most `count` unleased pages last touched before this clock, the oldest first."""
        with self._lock:
            self._check_open()
            out = np.empty(count, dtype=np.int64)
            return out[: kernels.oldest(self._built.slots[arena], before, out)]

    def known_pages(self, arena: int, slots: IntArray) -> KnownPages:
        """What lies in these slots, which hold visible pages."""
        with self._lock:
            self._check_open()
            found = self._built.slots[arena]
            return KnownPages(slots, found.keys[slots], found.span[slots], found.group[slots])

    def visible(self, chain: Chain, group_index: int, first: int, last: int) -> NDArray[np.bool_]:
        """For each of blocks first..last-1: is its page visible? All False for a group without pages."""
        with self._lock:
            self._check_open()
            view = self._built.views.get(group_index)
            if view is None:
                return np.zeros(max(0, last - first), dtype=np.bool_)
            return np.asarray(view.probe(chain, first, last)[0] >= 0)

    def pages(self, lease_id: int, owner: str) -> tuple[PageRange, ...]:
        """What a lease covers. Raises LeaseError if it ended, ran out, or is someone else's."""
        with self._lock:
            self._check_open()
            return self._leases.get(lease_id, owner).pages

    def renew(self, lease_id: int, owner: str) -> None:
        """Start a lease's time again. Raises LeaseError as `pages` does."""
        with self._lock:
            self._check_open()
            self._leases.renew(lease_id, owner)

    def release(self, lease_id: int, owner: str) -> None:
        """End a lease. Raises LeaseError as `pages` does, and then changes nothing."""
        with self._lock:
            self._check_open()
            self._leases.release(lease_id, owner)

    def expire(self) -> int:
        """End leases that have run out, and take the keys of overdue tickets; how many leases."""
        with self._lock:
            self._check_open()
            return self._expire()

    def register_owner(self, owner: str, *, live: bool = False) -> None:
        """Say whether `owner` is live: its leases then don't end by time. Others need no registration."""
        with self._lock:
            self._check_open()
            self._leases.set_live(owner, live)

    def release_owner(self, owner: str) -> None:
        """End all leases of `owner` and abort all its tickets: it must have stopped copying."""
        with self._lock:
            self._check_open()
            self._leases.release_owner(owner)
            for ticket in self._tickets.take_owner(owner):
                self._abort(ticket)

    # Saving

    def missing(self, chain: Chain, group_index: int, blocks: IntArray) -> NDArray[np.bool_]:
        """For each block: is its page neither visible nor being written? All False for a group without pages.

        Raises ValueError for blocks that the chain has no hash for.
        """
        with self._lock:
            self._check_open()
            view = self._built.views.get(group_index)
            if view is None:
                return np.zeros(len(blocks), dtype=np.bool_)
            wanted = self._admission.checked_blocks(view, chain, blocks)
            return np.asarray(view.states(chain, wanted) == kernels.FREE)

    def reserve(self, owner: str, wants: Sequence[Want]) -> Ticket:
        """Slots for the wanted blocks that nobody has or is writing; makes room by eviction.

        Never waits: what finds no room is skipped and counted. Room is made by the oldest pages
        that are neither leased nor part of the prefixes being saved, so a prompt longer than
        the store keeps its head. Where a dense block is refused, pages of other groups that
        could be used only together with it are refused too.
        Raises ValueError for a group without pages, or blocks that the chain has no hash for.
        """
        with self._lock:
            self._check_open()
            self._expire()
            self._admit_memory()
            ticket, reserved = self._admission.reserve(wants)
            if not reserved:
                return ticket
            ticket_id = self._tickets.open(owner, reserved)
            return Ticket(
                ticket_id,
                ticket.grants,
                ticket.skipped_present,
                ticket.skipped_ticketed,
                ticket.skipped_full,
            )

    def split(self, ticket_id: int, owner: str, most: int) -> list[int]:
        """Tickets for at most `most` blocks each, in order, in place of a ticket for one want. Raises
        TicketError as `commit` does."""
        with self._lock:
            self._check_open()
            (whole,) = self._tickets.take(ticket_id, owner).reserved
            return [
                self._tickets.open(
                    owner,
                    (
                        Reserved(
                            whole.view,
                            whole.chain,
                            whole.blocks[at : at + most],
                            whole.slots[at : at + most],
                        ),
                    ),
                )
                for at in range(0, whole.blocks.size, most)
            ]

    def commit(
        self,
        ticket_id: int,
        owner: str,
        *,
        failed: bool = False,
        without: Sequence[tuple[int, IntArray]] = (),
        touch: int | None = None,
    ) -> tuple[Want, ...]:
        """All ranks have written: the pages become visible, and their dense prefix the newest.

        Returns what became visible. failed: one rank could not; nothing becomes visible.
        without: (group, blocks) that could not be written, of a ticket for one chain. touch: how
        many blocks of the prefix become the newest, also if it failed, 0 if another ticket of it is committed
        soon; by default up to the ticket's last. Pages reserved before a `reset`, or whose ticket was
        overdue, are dropped. Raises TicketError for an unknown or foreign ticket.
        """
        with self._lock:
            self._check_open()
            ticket = self._tickets.take(ticket_id, owner)
            if failed:
                self._abort(ticket)
                self._admission.touch_prefix(ticket, touch or 0)
                return ()
            kept = self._abort_part(ticket, without) if without else ticket
            return self._admission.commit(kept, touch=touch)

    def abort(self, ticket_id: int, owner: str) -> None:
        """End a ticket unwritten; its slots are free at once. Raises TicketError as `commit` does."""
        self.commit(ticket_id, owner, failed=True)

    def adopt(self, arena: int, pages: KnownPages, stamps: IntArray) -> int:
        """Take over pages that lie in slots already, oldest first; how many were taken.

        For slots that are not usable yet, so before `provide_memory`. stamps: recency, ascending.
        """
        with self._lock:
            self._check_open()
            return int(
                kernels.adopt(
                    self._built.slots[arena], pages.slots, pages.keys, pages.group, pages.spans, stamps
                )
            )

    def provide_memory(self, *, only_what_is_there: bool = False) -> None:
        """Start to give the slots their memory, for a store made with prefault="later"; or, where that has
        failed, try again.

        only_what_is_there: use the slots that the arenas call usable, and no more.
        """
        if not only_what_is_there:
            self._prefault.start()
        with self._lock:
            self._may_admit = True
            self._admit_memory()

    def stop_memory(self, timeout_seconds: float) -> bool:
        """Give the slots no more memory; False if that is still under way then: `close` would wait for it."""
        return self._prefault.stop(timeout_seconds)

    @property
    def now(self) -> int:
        """The store's clock: how many touches there have been."""
        return int(self._built.slots[0].clock[0]) if self._built.slots else 0

    def stamps(self, arena: int) -> IntArray:
        """Recency of each slot of an arena by the store's clock; a copy."""
        with self._lock:
            return self._built.slots[arena].stamp.copy()

    # Upkeep

    def touch(self, chain: Chain, tokens: int) -> None:
        """Make the visible pages of the last boundary within `tokens` the newest, tail before head."""
        with self._lock:
            self._check_open()
            boundary = tokens // self.layout.lattice_tokens * self.layout.lattice_tokens
            if boundary > 0:
                for view in self._by_age:
                    view.touch(chain, *needed_range(view, boundary))

    def withdraw(self, chain: Chain, group_index: int, blocks: IntArray) -> int:
        """Make pages that proved bad invisible, and the checkpoints that need them.

        Returns how many of the blocks were visible. Raises ValueError as `missing` does.
        """
        with self._lock:
            self._check_open()
            view = self._built.views.get(group_index)
            if view is None:
                return 0
            return self._admission.withdraw(view, chain, self._admission.checked_blocks(view, chain, blocks))

    def reset(self) -> None:
        """Forget all pages. Leased ones stay readable by their leases; tickets land invisibly."""
        with self._lock:
            self._check_open()
            for slots, usable in zip(self._built.slots, self._admission.usable, strict=True):
                if self._log is not None:
                    self._log.resetting(slots, usable)
                kernels.clear(slots, usable)

    def take_changes(self) -> list[Change]:
        """What has become visible and what has gone since the last call, in order.

        Always empty unless made with `record_changes`. Applied to the set of visible keys of then,
        it gives the set of now. May be called after `close`, which changes nothing.
        """
        with self._lock:
            return self._log.take() if self._log is not None else []

    def audit(self) -> Audit:
        """Count everything twice. Raises StoreCorruptError with all that does not add up."""
        with self._lock:
            self._check_open()
            return audit(self._built, self._admission.usable, self._leases, self._tickets)

    def stats(self) -> StoreStats:
        """Counters and levels per group."""
        with self._lock:
            self._check_open()
            self._admit_memory()
            return collect_stats(
                self.layout,
                self._built,
                self._admission,
                self._leases,
                self._tickets,
                self._prefault.failures,
            )

    def close(self) -> None:
        """Stop the prefault thread and close the arenas. May be called twice."""
        with self._lock:
            self._closed = True
        self._prefault.stop()
        for arena in self.arenas:
            arena.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lease(self, owner: str, chain: Chain, found: Resolution) -> Found:
        """Touch what the boundary needs and lease what the engine lacks."""
        if found.tokens == 0:
            return Found(0, found.limited_by, None, (), found.dense_tokens)
        loaded = [part for part in found.parts if part.loaded.size]
        pages = tuple(PageRange(part.view.index, part.first, part.loaded) for part in loaded)
        held = tuple((part.view.slots, part.loaded) for part in loaded)
        counted: list[Part] = []
        try:
            # Dense groups last, as in `touch`.
            for part in sorted(found.parts, key=lambda part: part.view.group.dense):
                kernels.touch_slots(part.view.slots, part.slots, part.loaded.size)
                counted.append(part)
                part.view.touch(chain, part.lo, part.first)
            lease_id = self._leases.take(owner, pages, held) if pages else None
        except BaseException:
            for part in counted:
                kernels.unpin(part.view.slots, part.loaded)
            raise
        return Found(found.tokens, found.limited_by, lease_id, pages, found.dense_tokens)

    def _hold(self, owner: str, view: GroupIndex, slots: IntArray) -> int:
        kernels.pin(view.slots, slots)
        return self._leases.take(owner, (), ((view.slots, slots),))

    def _abort(self, ticket: PendingTicket) -> None:
        for part in ticket.reserved:
            kernels.abort(part.view.slots, part.slots)

    def _abort_part(self, ticket: PendingTicket, without: Sequence[tuple[int, IntArray]]) -> PendingTicket:
        """The ticket without these blocks, whose slots are given back."""
        bad = dict(without)
        kept = []
        for part in ticket.reserved:
            gone = np.isin(part.blocks, bad.get(part.view.index, ()))
            kernels.abort(part.view.slots, part.slots[gone])
            if not gone.all():
                kept.append(Reserved(part.view, part.chain, part.blocks[~gone], part.slots[~gone]))
        return replace(ticket, reserved=tuple(kept))

    def watch_evictions(self, evicted: Callable[[int, IntArray], None]) -> None:
        """Call `evicted(arena, slots)` for pages that make room. It holds the lock: it must be short, and
        must not call the store."""
        with self._lock:
            self._admission.on_evicted = evicted

    def free_slots(self, arena: int) -> int:
        """Free slots of an arena, those without memory yet included."""
        with self._lock:
            self._check_open()
            unusable = self.arenas[arena].num_slots - self._admission.usable[arena]
            return int(self._built.slots[arena].meta[kernels.NUM_FREE]) + unusable

    def _expire(self) -> int:
        self._tickets.detach_overdue()
        return self._leases.expire()

    def _admit_memory(self) -> None:
        if self._may_admit:  # before `provide_memory`, `adopt` is still to fill slots that count as usable
            self._admission.admit_memory([arena.usable_slots for arena in self.arenas])

    def _check_open(self) -> None:
        if self._closed:
            raise KVQuiltError("the store is closed")

    def _start_memory(self, prefault: bool | Literal["sync", "later"]) -> None:
        if prefault == "later":
            return
        if prefault == "sync":
            self._prefault.run()
        elif prefault:
            self._prefault.start()
        else:
            for arena in self.arenas:
                arena.usable_slots = arena.num_slots
