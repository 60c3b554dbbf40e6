"""Pages of all groups in host RAM: arenas, index, leases, tickets, eviction."""

from kvquilt.store.arenas import arena_span_keys
from kvquilt.store.chain import KEY_BYTES, Chain
from kvquilt.store.changes import Change
from kvquilt.store.index import span_steps
from kvquilt.store.mapping import map_memory
from kvquilt.store.memory import check_memory
from kvquilt.store.pool import SLOT_ALIGNMENT, Arena, SlotSpace, populate_all
from kvquilt.store.records import (
    ArenaAudit,
    ArenaInfo,
    Audit,
    Found,
    Gathered,
    Grant,
    GroupStats,
    KnownPages,
    PageRange,
    SlotPlanLike,
    StoreStats,
    Ticket,
    Want,
)
from kvquilt.store.store import Store
from kvquilt.store.warm import warm_up

__all__ = [
    "KEY_BYTES",
    "SLOT_ALIGNMENT",
    "Arena",
    "ArenaAudit",
    "ArenaInfo",
    "Audit",
    "Chain",
    "Change",
    "Found",
    "Gathered",
    "Grant",
    "GroupStats",
    "KnownPages",
    "PageRange",
    "SlotPlanLike",
    "SlotSpace",
    "Store",
    "StoreStats",
    "Ticket",
    "Want",
    "arena_span_keys",
    "check_memory",
    "map_memory",
    "populate_all",
    "span_steps",
    "warm_up",
]
