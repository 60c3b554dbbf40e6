"""Offers of pages become batches for the threads: slots reserved or leased first, with a generation."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheLayout
from kvquilt.store import Want, span_steps
from kvquilt.tiers.base import Pages
from kvquilt.tiers.batches import Ending, ReadBatch, Together, WriteBatch
from kvquilt.tiers.counts import Counts
from kvquilt.tiers.format import BLOCK_BYTES
from kvquilt.tiers.health import Health
from kvquilt.tiers.opening import OWNER, Opened
from kvquilt.tiers.slab import Slab
from kvquilt.tiers.slot_pages import SlotPages
from kvquilt.tiers.workers import Batch, Workers

__all__ = ["Queues"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_LEAST_BATCH_BYTES, _BATCH_BYTES = 1 << 20, 8 << 20  # what one thread moves under one ticket or lease


class Queues:
    """Queues pages to be written and read.

    turn: held while slots are taken from the index together with the generation that they are used under;
    never while the medium works. calls: as many of them move pages at once. queue_bytes: bytes of slots
    that may wait to be written.
    """

    def __init__(
        self,
        layout: CacheLayout,
        workers: Workers,
        *,
        health: Health,
        counts: Counts,
        turn: threading.Lock,
        calls: int,
        queue_bytes: int,
    ) -> None:
        self._layout = layout
        self._workers = workers
        self._health = health
        self._counts = counts
        self._turn = turn
        self._calls = calls
        self._queue_bytes = queue_bytes
        self._steps = span_steps(layout)

    def room_bytes(self, opened: Opened) -> int:
        """Bytes of pages of any group that `write` would not refuse now for a full queue."""
        # The queue counts whole slots, headers included.
        room = max(0, self._queue_bytes - self._workers.num_bytes("write"))
        facts = [slab.facts for slab in opened.slabs]
        return min((room * (f.slot_bytes - f.header_bytes) // f.slot_bytes for f in facts), default=0)

    def write(self, opened: Opened, pages: Pages, ending: Ending) -> int:
        """Reserve slots for pages and queue them; how many. Raises KVQuiltError where the index does."""
        slab = opened.slab_of(pages.group)
        missing = opened.index.missing(pages.chain, pages.group, pages.blocks)
        wanted = np.flatnonzero(missing)
        room = max(0, self._queue_bytes - self._workers.num_bytes("write")) // slab.slot_stride
        if wanted.size > room:
            self._counts.drop(pages.group, "queue", wanted.size - room)
            wanted = wanted[:room]
        if not wanted.size:
            return 0
        blocks = pages.blocks[wanted]
        with self._turn:
            ticket = opened.index.reserve(OWNER, [Want(pages.chain, pages.group, blocks)])
            generation = opened.generation
        self._counts.drop(pages.group, "full", sum(ticket.skipped_full.values()))
        if ticket.ticket_id is None:
            return 0
        tickets = [ticket.ticket_id]
        try:
            per_batch = self._pages_per_batch(slab, blocks.size)
            tickets = opened.index.split(ticket.ticket_id, OWNER, per_batch)
            grant = ticket.grants[0]
            # The grant is in order and names each block once; what was offered need not be.
            order = np.argsort(blocks, kind="stable")
            places = wanted[order[np.searchsorted(blocks, grant.blocks, sorter=order)]]
            out = self._slot_pages(slab, pages, places, grant.slots)
            last = int(grant.blocks[-1])
            # As the index will have it when all are written: the tail of a dense prefix before its head.
            dense = self._layout.groups[pages.group].dense
            stamps = opened.index.now + (last - grant.blocks if dense else np.zeros_like(grant.blocks))
        except BaseException:
            for ticket_id in tickets:
                opened.index.abort(ticket_id, OWNER)
            raise
        together = Together(len(tickets), last + 1)
        for i, ticket_id in enumerate(tickets):
            part = np.arange(i * per_batch, min((i + 1) * per_batch, len(out)))
            batch = WriteBatch(
                opened,
                self._health,
                self._counts,
                generation,
                ticket_id,
                pages.group,
                out.take(part),
                stamps[part],
                ending,
                together,
            )
            ending.hold()
            self._workers.submit(
                Batch("write", part.size, part.size * slab.slot_stride, batch.run, batch.drop)
            )
        return len(out)

    def read(self, opened: Opened, pages: Pages, result: BoolArray, ending: Ending) -> None:
        """Lease what is there of some pages and queue it; `result` says in the end which are proven. Raises
        KVQuiltError where the index does, ValueError for memory that cannot be filled."""
        if pages.memory.readonly:
            raise ValueError("pages cannot be loaded into memory that is read-only")
        slab = opened.slab_of(pages.group)
        per_batch = self._pages_per_batch(slab, pages.blocks.size)
        for start in range(0, pages.blocks.size, per_batch):
            wanted = pages.blocks[start : start + per_batch]
            with self._turn:
                lease_id, blocks, slots = opened.index.lease_blocks(OWNER, pages.chain, pages.group, wanted)
                generation = opened.generation
            if lease_id is None:
                continue
            try:
                places = start + np.flatnonzero(np.isin(wanted, blocks))
                into = self._slot_pages(slab, pages, places, slots)
            except BaseException:
                opened.index.release(lease_id, OWNER)
                raise
            batch = ReadBatch(
                opened,
                self._health,
                self._counts,
                generation,
                lease_id,
                pages,
                places,
                blocks,
                into,
                result,
                ending,
            )
            ending.hold()
            self._workers.submit(
                Batch("read", slots.size, slots.size * slab.slot_stride, batch.run, batch.drop)
            )

    def _pages_per_batch(self, slab: Slab, pages: int) -> int:
        """Few batches cost little; but all calls in flight shall have a part."""
        share = -(-pages // self._calls)
        least, most = (max(1, size // slab.slot_stride) for size in (_LEAST_BATCH_BYTES, _BATCH_BYTES))
        return min(max(share, least), most)

    def _slot_pages(self, slab: Slab, pages: Pages, places: IntArray, slots: IntArray) -> SlotPages:
        """Those pages of an offer. Raises ValueError if they do not lie inside its memory, or not as direct
        I/O needs them."""
        blocks, offsets = pages.blocks[places], pages.offsets[places]
        memory = np.frombuffer(pages.memory, dtype=np.uint8)
        payload_bytes = slab.facts.slot_bytes - slab.facts.header_bytes
        if places.size and not 0 <= offsets.min() <= offsets.max() <= memory.size - payload_bytes:
            raise ValueError(f"pages of {payload_bytes} bytes lie outside of the memory given for them")
        if ((memory.ctypes.data + offsets) % BLOCK_BYTES).any():
            raise ValueError(f"pages to save or load have to be aligned to {BLOCK_BYTES} bytes")
        return SlotPages(
            slots,
            np.full(slots.size, pages.group, dtype=np.int64),
            pages.chain.keys(pages.group)[blocks],
            pages.chain.spans(pages.group, self._steps.get(pages.group, 0), blocks),
            memory,
            offsets,
        )
