"""Leases and tickets: who may read which slots, and who is writing which.

Both are ended by their owner, by `Store.release_owner`, or by time: an expired lease frees its
slots; an overdue ticket only loses its keys, since its writer may still be copying into its
slots, and these stay reserved until the ticket ends. Guarded by the store's lock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import LeaseError, TicketError
from kvquilt.store import kernels
from kvquilt.store.chain import Chain
from kvquilt.store.index import GroupIndex
from kvquilt.store.kernels import Slots
from kvquilt.store.records import PageRange

__all__ = ["Lease", "Leases", "PendingTicket", "Reserved", "Tickets"]

IntArray = NDArray[np.int64]


@dataclass(eq=False)
class Lease:
    """The right of `owner` to read `pages` until `deadline` (infinite for a live owner)."""

    owner: str
    deadline: float
    pages: tuple[PageRange, ...]
    held: tuple[tuple[Slots, IntArray], ...]


class Leases:
    """All leases, and which owners are live."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self.expired = 0
        self._clock = clock
        self._seconds = seconds
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._live: set[str] = set()
        self._earliest = math.inf  # no lease ends before it

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def set_live(self, owner: str, live: bool) -> None:
        """A live owner's leases do not end by time; its present ones follow the change."""
        (self._live.add if live else self._live.discard)(owner)
        for lease in self._leases.values():
            if lease.owner == owner:
                self._set_deadline(lease)

    def take(self, owner: str, pages: tuple[PageRange, ...], held: tuple[tuple[Slots, IntArray], ...]) -> int:
        """A new lease for slots that `kernels.touch_slots` has counted as leased; its id."""
        lease = Lease(owner, math.inf, pages, held)
        self._set_deadline(lease)
        lease_id = next(self._ids)
        self._leases[lease_id] = lease
        return lease_id

    def get(self, lease_id: int, owner: str) -> Lease:
        """That lease; LeaseError if it has ended, has run out, or is someone else's."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseError(
                f"lease {lease_id} of owner {owner!r} is unknown: released, expired or never given"
            )
        if lease.owner != owner:
            raise LeaseError(f"lease {lease_id} belongs to owner {lease.owner!r}, not to {owner!r}")
        if self._clock() >= lease.deadline:
            self._end(lease_id)
            self.expired += 1
            raise LeaseError(f"lease {lease_id} of owner {owner!r} has run out: look the pages up again")
        return lease

    def renew(self, lease_id: int, owner: str) -> None:
        """Start its time again."""
        self._set_deadline(self.get(lease_id, owner))

    def release(self, lease_id: int, owner: str) -> None:
        """End it."""
        self.get(lease_id, owner)
        self._end(lease_id)

    def release_owner(self, owner: str) -> None:
        """End all leases of `owner` and forget that it was live."""
        for lease_id in [i for i, lease in self._leases.items() if lease.owner == owner]:
            self._end(lease_id)
        self._live.discard(owner)

    def expire(self) -> int:
        """End the leases that have run out; how many."""
        now = self._clock()
        if now < self._earliest:
            return 0
        over = [i for i, lease in self._leases.items() if now >= lease.deadline]
        for lease_id in over:
            self._end(lease_id)
        self.expired += len(over)
        self._earliest = min((lease.deadline for lease in self._leases.values()), default=math.inf)
        return len(over)

    def _set_deadline(self, lease: Lease) -> None:
        lease.deadline = math.inf if lease.owner in self._live else self._clock() + self._seconds
        self._earliest = min(self._earliest, lease.deadline)

    def _end(self, lease_id: int) -> None:
        for slots, which in self._leases.pop(lease_id).held:
            kernels.unpin(slots, which)


@dataclass(frozen=True, eq=False)
class Reserved:
    """Blocks of one group of one chain that a ticket writes into `slots`."""

    view: GroupIndex
    chain: Chain
    blocks: IntArray
    slots: IntArray


@dataclass(eq=False)
class PendingTicket:
    """Slots that `owner` is writing. overdue_at: when its keys are taken away (infinite: they are)."""

    owner: str
    overdue_at: float
    reserved: tuple[Reserved, ...]


class Tickets:
    """All tickets that have not ended."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self.detached = 0
        self._clock = clock
        self._seconds = seconds
        self._ids = itertools.count(1)
        self._tickets: dict[int, PendingTicket] = {}
        self._earliest = math.inf

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[PendingTicket]:
        return iter(self._tickets.values())

    def open(self, owner: str, reserved: tuple[Reserved, ...]) -> int:
        """A new ticket for slots that are ticketed already; its id."""
        ticket_id = next(self._ids)
        ticket = PendingTicket(owner, self._clock() + self._seconds, reserved)
        self._tickets[ticket_id] = ticket
        self._earliest = min(self._earliest, ticket.overdue_at)
        return ticket_id

    def take(self, ticket_id: int, owner: str) -> PendingTicket:
        """Remove a ticket to end it; TicketError if it is unknown or someone else's."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            raise TicketError(f"ticket {ticket_id} of owner {owner!r} is unknown: ended or never given")
        if ticket.owner != owner:
            raise TicketError(f"ticket {ticket_id} belongs to owner {ticket.owner!r}, not to {owner!r}")
        return self._tickets.pop(ticket_id)

    def take_owner(self, owner: str) -> list[PendingTicket]:
        """Remove all tickets of `owner` to end them."""
        ids = [i for i, ticket in self._tickets.items() if ticket.owner == owner]
        return [self._tickets.pop(i) for i in ids]

    def detach_overdue(self) -> int:
        """Take the keys from overdue tickets, so that they can be written again; how many tickets."""
        now = self._clock()
        if now < self._earliest:
            return 0
        count = 0
        for ticket in self._tickets.values():
            if now >= ticket.overdue_at:
                ticket.overdue_at = math.inf
                count += 1
                for part in ticket.reserved:
                    kernels.detach(part.view.slots, part.slots)
        self.detached += count
        self._earliest = min((t.overdue_at for t in self._tickets.values()), default=math.inf)
        return count
