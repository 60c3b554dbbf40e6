"""Values that pass between the store and its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import StoreCorruptError
from kvquilt.store.chain import Chain

if TYPE_CHECKING:
    from kvquilt.store.pool import SlotSpace

__all__ = [
    "ArenaAudit",
    "ArenaInfo",
    "Audit",
    "Found",
    "Gathered",
    "Grant",
    "GroupStats",
    "KnownPages",
    "PageRange",
    "SlotPlanLike",
    "StoreStats",
    "Ticket",
    "Want",
]

IntArray = NDArray[np.int64]


class SlotPlanLike(Protocol):
    """What the store reads of a `kvquilt.sizing.SlotPlan`."""

    @property
    def slots(self) -> Mapping[str, int]:
        """Slots per group name."""

    @property
    def slot_bytes(self) -> Mapping[str, int]:
        """Stride of a group's slots: the pages of all local ranks, rounded up to 4 KiB."""

    @property
    def partition(self) -> str:
        """ "solved" or "shared_rows"."""

    @property
    def num_ranks(self) -> int:
        """Local ranks whose pages lie in one slot."""


@dataclass(frozen=True, eq=False, slots=True)
class PageRange:
    """Pages of consecutive blocks of one group: block first_block + i lies in slots[i]."""

    group: int
    first_block: int
    slots: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Found:
    """Answer of a look-up.

    tokens: the boundary, the engine's own tokens included. limited_by: the group that kept it
    from being longer, None if the prompt did. lease_id: None if there is nothing to load.
    pages: what to load, of every group that needs something, in group order.
    dense_tokens: the boundary that the dense groups alone could serve; 0 where one was given.
    """

    tokens: int
    limited_by: str | None
    lease_id: int | None
    pages: tuple[PageRange, ...]
    dense_tokens: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Want:
    """Blocks of one group of one request that are about to be saved."""

    chain: Chain
    group: int
    blocks: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class KnownPages:
    """Pages of one arena by slot, with what names them: keys (n, 4), spans (n, s, 4), group (n,)."""

    slots: IntArray
    keys: NDArray[np.uint64]
    spans: NDArray[np.uint64]
    group: NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """What of a boundary is there, leased, and what lacks.

    missing: (group, blocks) that nobody has or is writing; awaited: the same, being written.
    """

    lease_id: int | None
    missing: tuple[tuple[int, IntArray], ...]
    awaited: tuple[tuple[int, IntArray], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Grant:
    """Slots for some of the blocks of wants[want]: blocks[i] goes to slots[i]."""

    want: int
    blocks: IntArray
    slots: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Ticket:
    """What `reserve` granted, and what it skipped and why, in blocks by group name."""

    ticket_id: int | None
    grants: list[Grant] = field(default_factory=list)
    skipped_present: dict[str, int] = field(default_factory=dict)
    skipped_ticketed: dict[str, int] = field(default_factory=dict)
    skipped_full: dict[str, int] = field(default_factory=dict)


class ArenaInfo(msgspec.Struct, frozen=True):
    """Facts of an arena that another process needs beside its file descriptor."""

    index: int
    name: str
    num_slots: int
    slot_stride: int
    size_bytes: int

    @classmethod
    def of(cls, arena: SlotSpace) -> ArenaInfo:
        """The facts of an arena."""
        size = arena.num_slots * arena.slot_stride
        return cls(arena.index, arena.name, arena.num_slots, arena.slot_stride, size)


class GroupStats(msgspec.Struct, frozen=True):
    """One group's use of the store.

    bytes_used: slots times stride. idle_slots: free slots of its arena (under "shared_rows" the
    rows free for any group); never_used_slots: those of them that never held a page.
    """

    name: str
    slots: int
    usable_slots: int
    pages: int
    bytes_used: int
    idle_slots: int
    never_used_slots: int
    committed_pages: int
    evictions: int
    evictions_by_reason: dict[str, int]


class StoreStats(msgspec.Struct, frozen=True):
    """Counters since the start (evictions, committed pages, failures) and levels (the rest)."""

    groups: list[GroupStats]
    leases: int
    leased_slots: int
    tickets: int
    ticketed_slots: int
    expired_leases: int
    detached_tickets: int
    prefault_failures: int


class ArenaAudit(msgspec.Struct, frozen=True):
    """Slots of one arena by state; free + used + reserved + unusable == total.

    used: visible pages, and withdrawn ones that a lease still reads. reserved: under a ticket.
    """

    name: str
    total: int
    free: int
    used: int
    reserved: int
    unusable: int
    leased: int


class Audit(msgspec.Struct, frozen=True):
    """What `Store.audit` counted; it raises instead if anything does not add up."""

    arenas: list[ArenaAudit]
    leases: int
    tickets: int

    def check_idle(self) -> None:
        """Raises StoreCorruptError if somebody holds a lease or a ticket."""
        if self.leases or self.tickets:
            raise StoreCorruptError(f"{self.leases} leases and {self.tickets} tickets were never ended")
