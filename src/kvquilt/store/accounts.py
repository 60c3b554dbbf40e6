"""Counting the store: `stats` for operators, `audit` as proof that nothing leaked."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import StoreCorruptError
from kvquilt.layout import CacheLayout
from kvquilt.store import kernels
from kvquilt.store.admission import Admission
from kvquilt.store.arenas import Arenas
from kvquilt.store.kernels import Slots
from kvquilt.store.leases import Leases, Tickets
from kvquilt.store.pool import SlotSpace
from kvquilt.store.records import ArenaAudit, Audit, GroupStats, StoreStats

__all__ = ["audit", "collect_stats"]


def audit(built: Arenas, usable: list[int], leases: Leases, tickets: Tickets) -> Audit:
    """Check every arena against the leases and tickets; StoreCorruptError lists what is off."""
    problems: list[str] = []
    arenas = []
    for arena, slots, number in zip(built.arenas, built.slots, usable, strict=True):
        held = [which for lease in leases for owner, which in lease.held if owner is slots]
        written = [p.slots for ticket in tickets for p in ticket.reserved if p.view.slots is slots]
        arenas.append(_audit_arena(arena, slots, number, held, written, problems))
    _audit_pages(built, usable, problems)
    if problems:
        raise StoreCorruptError("; ".join(problems))
    return Audit(arenas, len(leases), len(tickets))


def _audit_arena(
    arena: SlotSpace,
    slots: Slots,
    usable: int,
    held: list[NDArray[np.int64]],
    written: list[NDArray[np.int64]],
    problems: list[str],
) -> ArenaAudit:
    def check(name: str, found: object, expected: object) -> None:
        if found != expected:
            problems.append(f"arena {arena.name!r}: {name}: {found}, should be {expected}")

    state = slots.state[:usable]
    number = np.bincount(state, minlength=5)
    free = slots.free[: slots.meta[kernels.NUM_FREE]]
    check("slots on the free stack", free.size, int(number[kernels.FREE]))
    check("free slots listed once", np.unique(free).size, free.size)
    check("listed slots that are not free", int(np.count_nonzero(slots.state[free] != kernels.FREE)), 0)
    check("slots in use beyond the usable ones", int(np.count_nonzero(slots.state[usable:])), 0)
    indexed = int(number[kernels.TICKETED] + number[kernels.RESIDENT])
    check("index entries", int(np.count_nonzero(slots.table)), indexed)
    check("index count", int(slots.meta[kernels.NUM_ENTRIES]), indexed)
    check("slots not found by their key", kernels.check_index(slots, usable), 0)
    check("recency list", kernels.check_recency(slots, usable), int(number[kernels.RESIDENT]))
    check(
        "never used slots",
        int(slots.meta[kernels.NUM_FRESH]),
        int(np.count_nonzero(slots.stamp[:usable] < 0)),
    )
    pins = _tally(held, slots.pins.size)
    check("slots whose leases and count differ", int(np.count_nonzero(pins != slots.pins)), 0)
    readable = np.isin(slots.state, (kernels.RESIDENT, kernels.DETACHED_READ))
    check("leased slots that hold nothing", int(np.count_nonzero((pins > 0) & ~readable)), 0)
    detached = (slots.state == kernels.DETACHED_READ) & (pins == 0)
    check("withdrawn slots that nobody leases", int(np.count_nonzero(detached)), 0)
    tickets = _tally(written, slots.pins.size)
    being_written = np.isin(slots.state, (kernels.TICKETED, kernels.DETACHED_WRITE))
    check("slots whose ticket and state differ", int(np.count_nonzero(tickets != being_written)), 0)
    used = int(number[kernels.RESIDENT] + number[kernels.DETACHED_READ])
    reserved = int(number[kernels.TICKETED] + number[kernels.DETACHED_WRITE])
    unusable = arena.num_slots - usable
    check("free + used + reserved + unusable", free.size + used + reserved + unusable, arena.num_slots)
    return ArenaAudit(
        arena.name, arena.num_slots, free.size, used, reserved, unusable, int(np.count_nonzero(pins))
    )


def _audit_pages(built: Arenas, usable: list[int], problems: list[str]) -> None:
    for index, view in built.views.items():
        last = usable[view.arena]
        resident = (view.slots.state[:last] == kernels.RESIDENT) & (view.slots.group[:last] == index)
        found, expected = int(view.slots.pages[index]), int(np.count_nonzero(resident))
        if found != expected:
            problems.append(f"cache group {view.group.name!r}: page count: {found}, should be {expected}")


def _tally(parts: Iterable[NDArray[np.int64]], size: int) -> NDArray[np.int64]:
    """How often each slot occurs."""
    joined = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    return np.bincount(joined, minlength=size)


def collect_stats(
    layout: CacheLayout,
    built: Arenas,
    admission: Admission,
    leases: Leases,
    tickets: Tickets,
    prefault_failures: int,
) -> StoreStats:
    """Levels and counters of every group that keeps pages."""
    groups = []
    for index, view in built.views.items():
        arena = built.arenas[view.arena]
        pages = int(view.slots.pages[index])
        reasons = {reason: int(count[index]) for reason, count in admission.evicted.items()}
        groups.append(
            GroupStats(
                name=view.group.name,
                slots=arena.num_slots,
                usable_slots=admission.usable[view.arena],
                pages=pages,
                bytes_used=pages * arena.slot_stride,
                idle_slots=int(view.slots.meta[kernels.NUM_FREE]),
                never_used_slots=int(view.slots.meta[kernels.NUM_FRESH]),
                committed_pages=int(admission.committed[index]),
                evictions=sum(reasons.values()),
                evictions_by_reason=reasons,
            )
        )
    return StoreStats(
        groups=groups,
        leases=len(leases),
        leased_slots=sum(which.size for lease in leases for _, which in lease.held),
        tickets=len(tickets),
        ticketed_slots=sum(part.slots.size for ticket in tickets for part in ticket.reserved),
        expired_leases=leases.expired,
        detached_tickets=tickets.detached,
        prefault_failures=prefault_failures,
    )
