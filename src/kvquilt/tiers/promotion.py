"""Brings back what a longer hit needs from the tier below, while the engine asks again.

Only the pages of the chosen boundary come: the dense prefix, the last windows, one state, never a
window's history. They go into reserved slots of host RAM and become visible there; the hit itself is
found by the next ordinary look-up. So nothing about a hit rests on what the tier promised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import KVQuiltError
from kvquilt.hits import Hit, longest_hit, num_probed_blocks
from kvquilt.layout import CacheLayout, needed_blocks
from kvquilt.store import Chain, Gathered, Store, Ticket, Want
from kvquilt.tiers.base import Pages, Tier
from kvquilt.tiers.memory import RamMemory

__all__ = ["Promoter", "Promotion"]

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
_NO_ROOM_TRIES = 4
_SKIPPED_ASKS = 8  # between two looks of a request that waits for others


@dataclass(eq=False)
class Promotion:
    """What is being brought for one request.

    until: when its time is over. skip: asks that are answered without another look. room: the longest
    boundary that host RAM was found to have room for. tickets: reserved slots that are being filled.
    awaits: other promotions' tickets that bring what it needs. optional: as of `ask`. leases: what was
    there already. pinned_bytes: of tickets and leases. short: it had to be cut since host RAM has no room.
    waited: for room, once. in_line: others pin so much that it has to wait for its turn.
    """

    until: float
    skip: int = 0
    room: int | None = None
    tries: int = 0
    tickets: set[int] = field(default_factory=set)
    awaits: set[int] = field(default_factory=set)
    optional: Collection[str] = ()
    leases: list[int] = field(default_factory=list)
    pinned_bytes: int = 0
    short: bool = False
    waited: bool = False
    in_line: bool = False
    over: bool = False


@dataclass(frozen=True, eq=False)
class _Coming:
    """A load that has not ended. firsts: group and key of the first block of each group."""

    promotion: Promotion
    num_bytes: int
    firsts: frozenset[tuple[int, bytes]]


class Promoter:
    """Promotions of all requests. Used on one thread; loads end on the tier's threads.

    timeout_seconds: after it a request takes what host RAM has. Together promotions pin at most half of
    host RAM, or one of them whatever it needs; others wait for their turn. room_taken: called when
    slots of host RAM have been reserved, on the same thread: others will have to make room next.
    room_soon: is something about to give slots of host RAM back? Then who finds no room waits once.
    """

    def __init__(
        self,
        store: Store,
        tier: Tier,
        layout: CacheLayout,
        memory: RamMemory,
        *,
        timeout_seconds: float,
        clock: Callable[[], float],
        room_taken: Callable[[], None] = lambda: None,
        room_soon: Callable[[], bool] = lambda: False,
    ) -> None:
        self._room_taken = room_taken
        self._room_soon = room_soon
        self._store = store
        self._tier = tier
        self._layout = layout
        self._memory = memory
        self._timeout = timeout_seconds
        self._clock = clock
        self._owner = "promotion"
        self._promotions: dict[str, Promotion] = {}
        self._coming: dict[int, _Coming] = {}  # by ticket; the tier's threads take out what has ended
        self._ended = threading.Event()
        self._most_pinned = store.size_bytes // 2
        self.counts = {"started": 0, "no_room": 0, "timed_out": 0}
        store.register_owner(self._owner, live=True)

    def under_way(self) -> bool:
        """Does any request wait?"""
        return any(not promotion.over for promotion in self._promotions.values())

    def wait_briefly(self, seconds: float) -> None:
        """Wait until a load ends, at most that long: for an engine that has nothing else to do."""
        self._ended.wait(seconds)
        self._ended.clear()

    def waiting(self, request_id: str) -> bool:
        """Are pages on their way that this request waits for? Cheap: the engine asks all the time."""
        promotion = self._promotions.get(request_id)
        if promotion is None or promotion.over:
            return False
        if promotion.awaits and not any(ticket in self._coming for ticket in promotion.awaits):
            promotion.awaits, promotion.skip = set(), 0
        if not (promotion.tickets or promotion.skip):
            return False
        if self._clock() < promotion.until:
            promotion.skip = max(0, promotion.skip - 1)
            return True
        self._give_up(promotion)
        return False

    def ask(
        self,
        request_id: str,
        chain: Chain,
        num_tokens: int,
        *,
        local_tokens: int,
        ram_tokens: int,
        optional: Collection[str] = (),
    ) -> bool:
        """Host RAM alone serves `ram_tokens` of the request: is more coming? Then ask again.

        optional: groups that the hit may do without.
        """
        promotion = self._promotions.setdefault(request_id, Promotion(self._clock() + self._timeout))
        promotion.optional = optional
        if promotion.over:
            return False
        if promotion.tickets:
            return True
        if self._clock() >= promotion.until:
            self._give_up(promotion)
            return False
        while promotion.tries < _NO_ROOM_TRIES:
            limit = num_tokens if promotion.room is None else min(num_tokens, promotion.room + 1)
            hit, ignore = self._best(chain, limit, local_tokens, optional, ram_tokens)
            if hit.tokens <= max(ram_tokens, local_tokens):
                break
            if self._start(promotion, chain, hit.tokens, local_tokens, ignore):
                promotion.skip = 0 if promotion.tickets else _SKIPPED_ASKS
                return not promotion.over
            if not promotion.short:
                break
            promotion.tries += 1
        self._drop(promotion)
        return False

    def best(self, chain: Chain, num_tokens: int, local_tokens: int = 0) -> int:
        """The longest boundary that host RAM and the tier could serve together."""
        return self._best(chain, num_tokens, local_tokens, ())[0].tokens

    def cut_short(self, request_id: str) -> bool:
        """Was the request's hit cut because host RAM had no room for more?"""
        promotion = self._promotions.get(request_id)
        return promotion is not None and promotion.short

    def forget(self, request_id: str) -> None:
        """The request has been answered, or has ended. What is on its way arrives all the same."""
        promotion = self._promotions.pop(request_id, None)
        if promotion is not None:
            self._drop(promotion)

    def close(self) -> None:
        """Give back all leases."""
        for request_id in list(self._promotions):
            self.forget(request_id)

    def _best(
        self,
        chain: Chain,
        num_tokens: int,
        local_tokens: int,
        optional: Collection[str],
        more_than: int = 0,
    ) -> tuple[Hit, Collection[str]]:
        presence = self._presence(chain, num_tokens, local_tokens, optional, more_than)
        if presence is None:
            return Hit(0, None), ()
        best = longest_hit(self._layout, presence, num_tokens, local_tokens=local_tokens)
        if optional and best.limited_by is not None:
            without = longest_hit(
                self._layout, presence, num_tokens, local_tokens=local_tokens, ignore=optional
            )
            if without.tokens > best.tokens:
                return without, optional
        return best, ()

    def _presence(
        self, chain: Chain, num_tokens: int, local_tokens: int, optional: Collection[str], more_than: int
    ) -> dict[str, BoolArray] | None:
        """Blocks of each group that are in RAM, in the tier, or being written; None if a dense group that is
        not optional shows that no boundary beyond `more_than` can be had."""
        longest = self._layout.max_boundary(num_tokens)
        presence = {}
        order = sorted(range(len(self._layout.groups)), key=lambda i: not self._layout.groups[i].dense)
        for index in order:
            group = self._layout.groups[index]
            if self._store.arena_of[index] < 0:
                continue
            last = min(num_probed_blocks(group, longest), chain.num_blocks(index))
            first = min(local_tokens // group.tokens_per_block, last)
            there = np.ones(last, dtype=np.bool_)
            blocks = np.arange(first, last, dtype=np.int64)
            there[first:] = ~self._store.missing(chain, index, blocks)
            there[first:] |= self._tier.present(chain, index, first, last)
            presence[group.name] = there
            if group.dense and not group.draft and group.name not in optional:
                holes = np.flatnonzero(~there)
                reach = (int(holes[0]) if holes.size else last) * group.tokens_per_block
                if reach <= more_than:
                    return None
        return presence

    def _start(
        self, promotion: Promotion, chain: Chain, tokens: int, local_tokens: int, ignore: Collection[str]
    ) -> bool:
        """Reserve slots for what lacks, and load it; False if there is no room for all of it."""
        self._release(promotion)
        promotion.in_line = False
        gathered = self._store.gather(self._owner, chain, tokens, local_tokens=local_tokens, ignore=ignore)
        if gathered.lease_id is not None:
            promotion.leases.append(gathered.lease_id)
        if not gathered.missing:
            promotion.awaits = self._awaited(chain, gathered)
            if promotion.awaits and not self._is_coming(chain, gathered):
                self._drop(promotion)
            return True  # it is being written, or has become visible just now
        promotion.pinned_bytes = self._needed_bytes(tokens, local_tokens, ignore)
        others = sum(p.pinned_bytes for p in self._promotions.values() if p is not promotion)
        # What nobody waits for any more keeps its slots until it has landed.
        others += sum(coming.num_bytes for coming in list(self._coming.values()) if coming.promotion.over)
        too_many = others + promotion.pinned_bytes > self._most_pinned or self._is_overtaking(promotion)
        promotion.in_line = bool(others) and too_many
        if promotion.in_line:
            self._release(promotion)  # its turn comes when the others have what they need
            return True
        ticket = self._store.reserve(
            self._owner, [Want(chain, group, blocks) for group, blocks in gathered.missing]
        )
        if ticket.skipped_full:
            if ticket.ticket_id is not None:
                self._store.abort(ticket.ticket_id, self._owner)
            if not promotion.waited and self._room_soon():
                promotion.waited = True
                self._release(promotion)
                return True
            self._make_do(promotion, ticket, gathered, tokens)
            return False
        if ticket.ticket_id is not None:
            self._load(promotion, chain, ticket, gathered)
            self._room_taken()
        return True

    def _is_overtaking(self, promotion: Promotion) -> bool:
        """Has one that asked earlier not had its turn? A large one would never have it among small ones."""
        now = self._clock()
        for other in self._promotions.values():
            if other is promotion:
                break
            if other.in_line and not other.over and now < other.until:
                return True
        return False

    def _awaited(self, chain: Chain, gathered: Gathered) -> set[int]:
        """Tickets of other promotions that bring what this one needs, as far as both begin alike."""
        firsts = {(group, chain.keys(group)[blocks[0]].tobytes()) for group, blocks in gathered.awaited}
        return {ticket for ticket, coming in list(self._coming.items()) if coming.firsts & firsts}

    def _is_coming(self, chain: Chain, gathered: Gathered) -> bool:
        """Has the tier any of what others bring? A tier that has been switched off has nothing, and what
        still hangs in it is not worth another request's time."""
        return any(
            self._tier.present(chain, group, int(blocks[0]), int(blocks[-1]) + 1).any()
            for group, blocks in gathered.awaited
        )

    def _needed_bytes(self, tokens: int, local_tokens: int, ignore: Collection[str]) -> int:
        """Bytes of the slots that a boundary needs beyond what the engine holds."""
        total = 0
        for index, group in enumerate(self._layout.groups):
            arena = self._store.arena_of[index]
            if arena >= 0 and group.name not in ignore:
                lo, hi = needed_blocks(group, tokens)
                blocks = hi - max(lo, local_tokens // group.tokens_per_block)
                total += max(0, int(blocks)) * self._store.arenas[arena].slot_stride
        return total

    def _make_do(self, promotion: Promotion, ticket: Ticket, gathered: Gathered, tokens: int) -> None:
        """RAM had no room for all: aim at a shorter boundary."""
        granted = {gathered.missing[grant.want][0]: grant.blocks for grant in ticket.grants}
        room = tokens - self._layout.lattice_tokens
        refused = {
            group: np.setdiff1d(blocks, granted.get(group, blocks[:0]), assume_unique=True)
            for group, blocks in gathered.missing
        }
        dense = [group for group in refused if self._layout.groups[group].dense and refused[group].size]
        for group in dense:
            room = min(room, int(refused[group][0]) * self._layout.groups[group].tokens_per_block)
        if not dense:
            room = min(room, tokens - self._tokens_to_give_up(refused))
        promotion.room = max(0, room)
        self.counts["no_room"] += not promotion.short
        promotion.short = True

    def _tokens_to_give_up(self, refused: dict[int, IntArray]) -> int:
        """By how many tokens the dense groups have to be shorter, so that what was refused finds room in the
        arenas that they share."""
        step, most = self._layout.lattice_tokens, 0
        for arena in set(self._store.arena_of):
            inside = [i for i, own in enumerate(self._store.arena_of) if own == arena >= 0]
            lacking = sum(refused[i].size for i in inside if i in refused)
            groups = [self._layout.groups[i] for i in inside]
            freed = sum(step // group.tokens_per_block for group in groups if group.dense)
            if freed:
                most = max(most, -(-lacking // freed) * step)
        return most

    def _load(self, promotion: Promotion, chain: Chain, ticket: Ticket, gathered: Gathered) -> None:
        ticket_id = ticket.ticket_id
        assert ticket_id is not None
        promotion.tickets.add(ticket_id)
        self.counts["started"] += 1
        pages = [
            self._memory.pages(chain, gathered.missing[grant.want][0], grant.blocks, grant.slots)
            for grant in ticket.grants
        ]
        strides = [self._store.arenas[self._store.arena_of[part.group]].slot_stride for part in pages]
        self._coming[ticket_id] = _Coming(
            promotion,
            sum(part.blocks.size * stride for part, stride in zip(pages, strides, strict=True)),
            frozenset((part.group, chain.keys(part.group)[part.blocks[0]].tobytes()) for part in pages),
        )

        def ended(results: Sequence[BoolArray]) -> None:
            try:
                with contextlib.suppress(KVQuiltError):
                    self._land(ticket_id, pages, results, promotion.optional)
            finally:
                self._coming.pop(ticket_id, None)
                promotion.tickets.discard(ticket_id)
                self._ended.set()

        self._tier.load(pages, ended)

    def _land(
        self,
        ticket_id: int,
        pages: Sequence[Pages],
        results: Sequence[BoolArray],
        optional: Collection[str],
    ) -> None:
        """Make what has arrived visible; what has not must never be.

        If the dense prefix, as far as a hit needs it, has a hole now, windows and states beyond it are
        dropped too: the tier has dropped its own, and would not get them again as long as host RAM has them.
        """
        groups = [self._layout.groups[part.group] for part in pages]
        dense = [group.dense for group in groups]
        hole = any(
            group.dense and group.name not in optional and not good.all()
            for group, good in zip(groups, results, strict=True)
        )
        usable = [good & (is_dense or not hole) for is_dense, good in zip(dense, results, strict=True)]
        bad = [
            (part.group, part.blocks[~good])
            for part, good in zip(pages, usable, strict=True)
            if not good.all()
        ]
        if len(bad) == len(pages) and not any(good.any() for good in usable):
            self._store.abort(ticket_id, self._owner)
        else:
            self._store.commit(ticket_id, self._owner, without=bad)

    def _give_up(self, promotion: Promotion) -> None:
        """Its time is over: what is on its way arrives, but nobody waits for it."""
        if not promotion.over:
            self.counts["timed_out"] += 1
        self._drop(promotion)

    def _drop(self, promotion: Promotion) -> None:
        promotion.over = True
        self._release(promotion)

    def _release(self, promotion: Promotion) -> None:
        leases, promotion.leases = promotion.leases, []
        promotion.pinned_bytes = 0
        for lease_id in leases:
            with contextlib.suppress(KVQuiltError):
                self._store.release(lease_id, self._owner)
