"""Layouts, plans and chains for the store's tests."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

import numpy as np

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain, Store, Ticket, Want


@dataclass
class Plan:
    """What the store reads of a slot plan."""

    slots: dict[str, int]
    slot_bytes: dict[str, int] = field(default_factory=dict)
    partition: str = "solved"
    num_ranks: int = 1

    def __post_init__(self) -> None:
        for name in self.slots:
            self.slot_bytes.setdefault(name, 4096)


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def digests(text: str) -> list[bytes]:
    """Chained 32-byte hashes: one per character, each naming the whole prefix up to it."""
    out, state = [], b"seed"
    for character in text:
        state = hashlib.sha256(state + character.encode()).digest()
        out.append(state)
    return out


def chain_of(layout: CacheLayout, text: str) -> Chain:
    return Chain(layout, digests(text))


def make_store(layout: CacheLayout, slots: int | dict[str, int], **options: object) -> Store:
    """A store with all slots usable. slots: per group, or one number for every group."""
    partition = str(options.pop("partition", "solved"))
    if isinstance(slots, int):
        slots = {g.name: slots for g in layout.groups if g.cacheable and g.page_bytes}
    options.setdefault("prefault", False)
    return Store(layout, Plan(dict(slots), partition=partition), **options)  # type: ignore[arg-type]


def want(chain: Chain, group: int, blocks: object) -> Want:
    return Want(chain, group, np.asarray(list(blocks), dtype=np.int64))  # type: ignore[call-overload]


def save(store: Store, chain: Chain, blocks: dict[int, object], owner: str = "writer") -> Ticket:
    """Reserve and commit these blocks per group index."""
    ticket = store.reserve(owner, [want(chain, group, wanted) for group, wanted in blocks.items()])
    if ticket.ticket_id is not None:
        store.commit(ticket.ticket_id, owner)
    return ticket


def save_all(store: Store, chain: Chain) -> Ticket:
    """Save every whole block of every group that keeps pages."""
    kept = [i for i, arena in enumerate(store.arena_of) if arena >= 0]
    return save(store, chain, {i: range(chain.num_blocks(i)) for i in kept})


def present(store: Store, chain: Chain, group: int) -> list[int]:
    """Blocks that are neither missing nor being written, as `missing` tells."""
    blocks = np.arange(chain.num_blocks(group))
    return np.flatnonzero(~store.missing(chain, group, blocks)).tolist()


def ranges(found: object) -> dict[int, list[int]]:
    """Group index -> blocks of a look-up's answer."""
    return {
        part.group: list(range(part.first_block, part.first_block + part.slots.size))
        for part in found.pages  # type: ignore[attr-defined]
    }


def write_page(store: Store, group: int, slot: int, content: bytes) -> None:
    arena = store.arenas[store.arena_of[group]]
    os.pwrite(arena.fd, content.ljust(arena.slot_stride, b"\0"), int(slot) * arena.slot_stride)


def read_page(store: Store, group: int, slot: int, length: int) -> bytes:
    arena = store.arenas[store.arena_of[group]]
    return os.pread(arena.fd, length, int(slot) * arena.slot_stride)


def full32_window16(window: int = 32) -> CacheLayout:
    """A full group of 32-token blocks and a sliding one of 16; hash unit 16."""
    return CacheLayout(
        [
            CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=4096),
            CacheGroup("win", kind="sliding", tokens_per_block=16, window=window, page_bytes=4096),
        ]
    )
