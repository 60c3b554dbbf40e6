"""Who gets a slot, and who goes for it: reservation, commit, eviction, withdrawal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheLayout
from kvquilt.store import kernels
from kvquilt.store.arenas import Arenas
from kvquilt.store.chain import Chain
from kvquilt.store.changes import ChangeLog
from kvquilt.store.index import GroupIndex, Orphaning, orphaning_rules
from kvquilt.store.leases import PendingTicket, Reserved
from kvquilt.store.records import Grant, Ticket, Want

__all__ = ["EVICTION_REASONS", "Admission"]

IntArray = NDArray[np.int64]

EVICTION_REASONS = ("room", "orphan", "withdrawn")


@dataclass(eq=False)
class _Call:
    """What one `reserve` call knows: touches since `floor` are its own."""

    wants: Sequence[Want]
    floor: int
    protected: bool = False
    refused: dict[int, list[tuple[GroupIndex, int]]] = field(default_factory=dict)


class Admission:
    """Slots in and out of use. Guarded by the store's lock.

    optional: groups that a hit may do without, all of them together: the others don't need them.
    usable: slots of each arena that have memory. committed, evicted[reason]: pages per group index.
    log: hears of every page that becomes visible or goes. on_evicted: of (arena, slots) that made
    room, or went with what did.
    """

    def __init__(
        self, layout: CacheLayout, built: Arenas, optional: frozenset[str], log: ChangeLog | None = None
    ) -> None:
        groups = len(layout.groups)
        self.usable = [0] * len(built.arenas)
        self.committed = np.zeros(groups, dtype=np.int64)
        self.evicted = {reason: np.zeros(groups, dtype=np.int64) for reason in EVICTION_REASONS}
        self.on_evicted: Callable[[int, IntArray], None] | None = None
        self._layout = layout
        self._log = log
        self._optional = optional
        self._views = built.views
        self._slots = built.slots
        self._clock = built.slots[0].clock if built.slots else np.zeros(1, dtype=np.int64)
        self._orphaning: dict[int, list[Orphaning]] = orphaning_rules(list(built.views.values()), optional)
        self._dense = [view for view in built.views.values() if view.group.dense]

    def admit_memory(self, usable: Sequence[int]) -> None:
        """Take slots into use that got their memory since."""
        for arena, last in enumerate(usable):
            if last > self.usable[arena]:
                kernels.add_usable(self._slots[arena], self.usable[arena], last)
                self.usable[arena] = last

    def checked_blocks(self, view: GroupIndex, chain: Chain, blocks: IntArray) -> IntArray:
        """`blocks` as int64; ValueError if the chain has no hash for one of them."""
        wanted = np.ascontiguousarray(blocks, dtype=np.int64)
        hashed = chain.num_blocks(view.index)
        if wanted.ndim != 1 or (wanted.size and (wanted.min() < 0 or wanted.max() >= hashed)):
            raise ValueError(
                f"cache group {view.group.name!r}: blocks {wanted.tolist()[:8]}... of a chain that has "
                f"hashes for {hashed} blocks"
            )
        return wanted

    def reserve(self, wants: Sequence[Want]) -> tuple[Ticket, tuple[Reserved, ...]]:
        """`Store.reserve` without owner and ticket id. All wants are checked before any is served."""
        ticket = Ticket(None)
        checked = [self._checked_want(want) for want in wants]
        call = _Call(wants, int(self._clock[0]))
        reserved: dict[int, Reserved] = {}
        # Dense groups first: what they refuse decides what the others may have.
        order = sorted(range(len(wants)), key=lambda i: not checked[i][0].group.dense)
        for i in order:
            view, blocks, repeated = checked[i]
            _count(ticket.skipped_ticketed, view, repeated)
            part = self._reserve_want(call, ticket, wants[i].chain, view, blocks)
            if part is not None:
                reserved[i] = part
        for i in sorted(reserved):
            ticket.grants.append(Grant(i, reserved[i].blocks, reserved[i].slots))
        return ticket, tuple(reserved[i] for i in sorted(reserved))

    def commit(self, ticket: PendingTicket, *, touch: int | None = None) -> tuple[Want, ...]:
        """Make a ticket's pages visible; which of them are.

        Checkpoint pages are linked in token order, so that among them those that later
        boundaries cannot reach go first; of a dense prefix the tail goes first, and what is
        left is still a prefix.
        """
        parts = sorted(ticket.reserved, key=lambda part: part.view.group.dense)
        visible = []
        for part in parts:
            kept = part.blocks[part.view.slots.state[part.slots] == kernels.TICKETED]
            if kept.size:
                visible.append(Want(part.chain, part.view.index, kept))
            if self._log is not None:
                self._log.committing(part)
            self.committed[part.view.index] += kernels.commit(part.view.slots, part.slots)
        for part in parts:
            if part.view.group.dense:
                part.view.touch(part.chain, 0, int(part.blocks[-1]) + 1 if touch is None else touch)
        return tuple(visible)

    def touch_prefix(self, ticket: PendingTicket, num_blocks: int) -> None:
        """Make the first blocks of a ticket's dense groups the newest, tail before head."""
        for part in ticket.reserved:
            if part.view.group.dense:
                part.view.touch(part.chain, 0, num_blocks)

    def withdraw(self, view: GroupIndex, chain: Chain, blocks: IntArray) -> int:
        """Make pages invisible, and what they orphan; how many of the blocks were visible."""
        out = np.empty(blocks.size, dtype=np.int64)
        count = kernels.withdraw(view.slots, view.index, chain.hashes, view.hashes_per_block, blocks, out)
        self.evicted["withdrawn"][view.index] += count
        if self._log is not None:
            self._log.removed(view.slots, out[:count])
        self._drop_orphans(view.index, out[:count])
        return count

    def _checked_want(self, want: Want) -> tuple[GroupIndex, IntArray, int]:
        """The want's index, its distinct blocks in order, and how many were repeated."""
        view = self._views.get(want.group)
        if view is None:
            raise ValueError(f"group {want.group} keeps no pages: there is nothing to save of it")
        blocks = self.checked_blocks(view, want.chain, want.blocks)
        if blocks.size < 2 or bool(np.all(blocks[1:] > blocks[:-1])):
            return view, blocks, 0
        distinct = np.unique(blocks)
        return view, distinct, int(blocks.size - distinct.size)

    def _reserve_want(
        self, call: _Call, ticket: Ticket, chain: Chain, view: GroupIndex, blocks: IntArray
    ) -> Reserved | None:
        wanted = self._usable_blocks(call, chain, view, blocks)
        _count(ticket.skipped_full, view, blocks.size - wanted.size)
        out = np.empty(wanted.size, dtype=np.int64)
        states = view.states(chain, wanted)
        self._make_room(call, view, int(np.count_nonzero(states == kernels.FREE)))
        granted = kernels.reserve(
            view.slots, view.index, chain.hashes, view.hashes_per_block, wanted, view.span_step, out
        )
        if granted < wanted.size:
            _count(ticket.skipped_present, view, int(np.count_nonzero(out == kernels.PRESENT)))
            _count(ticket.skipped_ticketed, view, int(np.count_nonzero(out == kernels.PENDING)))
            full = wanted[out == kernels.FULL]
            _count(ticket.skipped_full, view, full.size)
            if full.size and view.group.dense:
                call.refused.setdefault(id(chain), []).append((view, int(full[0])))
        if not granted:
            return None
        kept = out >= 0
        return Reserved(view, chain, wanted[kept], out[kept])

    def _usable_blocks(self, call: _Call, chain: Chain, view: GroupIndex, blocks: IntArray) -> IntArray:
        """Leave out blocks of a non-dense group that need a dense block which was just refused."""
        if view.group.dense:
            return blocks
        tokens = view.group.tokens_per_block
        for dense, first in call.refused.get(id(chain), ()):
            if dense.group.name in self._optional and view.group.name not in self._optional:
                continue
            limit = first * dense.group.tokens_per_block
            # A draft page may serve as the peek block of the boundary at its start.
            ends = (blocks + (0 if view.group.draft else 1)) * tokens
            blocks = blocks[ends <= limit]
        return blocks

    def _make_room(self, call: _Call, view: GroupIndex, need: int) -> None:
        """Evict from the view's arena until `need` slots are free, or nothing older is left."""
        lacking = need - int(view.slots.meta[kernels.NUM_FREE])
        if lacking <= 0:
            return
        if not call.protected:
            # What these requests stand on must not make room for them.
            call.protected = True
            for dense in self._dense:
                for chain in {id(want.chain): want.chain for want in call.wants}.values():
                    dense.touch(chain, 0, chain.num_blocks(dense.index))
        out = np.empty(lacking, dtype=np.int64)
        lost = out[: kernels.evict(view.slots, lacking, call.floor, out)]
        if self._log is not None:
            self._log.removed(view.slots, lost)
        if self.on_evicted is not None:
            self.on_evicted(view.arena, lost)
        groups = view.slots.group[lost]
        self.evicted["room"] += np.bincount(groups, minlength=self.committed.size)
        for group in np.unique(groups):
            if int(group) in self._orphaning:
                self._drop_orphans(int(group), lost[groups == group])

    def _drop_orphans(self, dense_index: int, lost: IntArray) -> None:
        for rule in self._orphaning.get(dense_index, ()):
            gone = rule.apply(lost)
            self.evicted["orphan"][rule.other.index] += gone.size
            if self._log is not None:
                self._log.removed(rule.other.slots, gone)
            if self.on_evicted is not None:
                self.on_evicted(rule.other.arena, gone)


def _count(counts: dict[str, int], view: GroupIndex, number: int) -> None:
    if number:
        counts[view.group.name] = counts.get(view.group.name, 0) + int(number)
