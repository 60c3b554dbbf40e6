"""Pages of all groups in host RAM: arenas, index, leases, tickets, eviction."""

from kvquilt.store.chain import Chain
from kvquilt.store.changes import Change
from kvquilt.store.memory import check_memory
from kvquilt.store.pool import Arena
from kvquilt.store.records import (
    ArenaAudit,
    ArenaInfo,
    Audit,
    Found,
    Grant,
    GroupStats,
    PageRange,
    SlotPlanLike,
    StoreStats,
    Ticket,
    Want,
)
from kvquilt.store.store import Store
from kvquilt.store.warm import warm_up

__all__ = [
    "Arena",
    "ArenaAudit",
    "ArenaInfo",
    "Audit",
    "Chain",
    "Change",
    "Found",
    "Grant",
    "GroupStats",
    "PageRange",
    "SlotPlanLike",
    "Store",
    "StoreStats",
    "Ticket",
    "Want",
    "check_memory",
    "warm_up",
]
