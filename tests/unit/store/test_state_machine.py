"""The store against a plain-Python model of what it promises, with an audit after every step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvquilt.errors import LeaseError, TicketError
from kvquilt.hits import longest_hit, valid_at
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.store import Chain, Store, Want
from unit.store.store_support import Clock, Plan, digests

LEASE_SECONDS = 10.0
TICKET_SECONDS = 25.0
OWNERS = ("timed", "other", "live")
# Prompts that share beginnings, one hash per character.
TEXTS = ("aaaaaaaaaaaa", "aaaaaabbbbbb", "aabbbbbbbbbbbb", "cccccccccccccccc", "aaaa", "ccccccccdd")


def group(name: str, kind: str, tokens: int, **facts: object) -> CacheGroup:
    return CacheGroup(name, kind=kind, tokens_per_block=tokens, page_bytes=4096, **facts)  # type: ignore[arg-type]


LAYOUTS = {
    "full and window": CacheLayout([group("full", "full", 2), group("win", "sliding", 1, window=3)]),
    "many": CacheLayout(
        [
            group("win", "sliding", 2, window=4),
            group("full", "full", 2),
            group("state", "recurrent", 4),
            group("none", "scratch", 3),
            CacheGroup("empty", kind="full", tokens_per_block=2, page_bytes=0),
            group("chunk", "chunked", 1, chunk=4),
            group("full_small", "full", 1),
        ]
    ),
    "drafts": CacheLayout(
        [
            group("full", "full", 2),
            group("draft_full", "full", 1, draft=True),
            group("draft_win", "sliding", 1, window=2, draft=True),
            group("win", "sliding", 1, window=2, extra_tokens=1),
        ]
    ),
    "coarse dense": CacheLayout(
        [group("full", "full", 4), group("wide", "sliding", 2, window=3), group("w", "sliding", 1, window=2)]
    ),
    "windows only": CacheLayout([group("w3", "sliding", 1, window=3), group("w4", "sliding", 2, window=4)]),
}


@dataclass(eq=False)
class Page:
    group: int
    key: bytes
    slot: int
    block: int
    inside: list[bytes]  # hashes that close a unit inside the block
    state: str = "ticketed"
    pins: int = 0
    touched: int = 0


@dataclass
class Model:
    """Pages by (group, key); `order[arena]` from oldest to newest."""

    layout: CacheLayout
    arena_of: tuple[int, ...]
    totals: list[int]
    pages: dict[tuple[int, bytes], Page] = field(default_factory=dict)
    held: list[Page] = field(default_factory=list)  # every page that occupies a slot
    order: list[list[Page]] = field(default_factory=list)
    call: int = 0
    evicted: Counter[tuple[int, str]] = field(default_factory=Counter)

    def key(self, chain: list[bytes], index: int, block: int) -> tuple[int, bytes]:
        per_block = self.layout.hashes_per_block(self.layout.groups[index])
        return index, chain[(block + 1) * per_block - 1]

    def num_blocks(self, chain: list[bytes], index: int) -> int:
        return len(chain) // self.layout.hashes_per_block(self.layout.groups[index])

    def visible(self, chain: list[bytes], index: int, block: int) -> Page | None:
        if not 0 <= block < self.num_blocks(chain, index):
            return None
        page = self.pages.get(self.key(chain, index, block))
        return page if page is not None and page.state == "resident" else None

    def free(self, arena: int) -> int:
        return self.totals[arena] - sum(self.arena_of[p.group] == arena for p in self.held)

    def touch(self, page: Page) -> None:
        order = self.order[self.arena_of[page.group]]
        if page in order:
            order.remove(page)
        order.append(page)
        page.touched = self.call

    def touch_range(self, chain: list[bytes], index: int, lo: int, hi: int) -> None:
        for block in reversed(range(lo, hi)):
            page = self.visible(chain, index, block)
            if page is not None:
                self.touch(page)

    def touch_boundary(self, chain: list[bytes], tokens: int) -> None:
        for dense in (False, True):
            for index in self.kept(dense):
                g = self.layout.groups[index]
                lo, hi = needed_blocks(g, tokens)
                self.touch_range(chain, index, lo, hi + g.draft)

    def kept(self, dense: bool) -> list[int]:
        return [i for i, a in enumerate(self.arena_of) if a >= 0 and self.layout.groups[i].dense == dense]

    def drop(self, page: Page, reason: str) -> None:
        """Take a visible page out of sight."""
        self.evicted[page.group, reason] += 1
        del self.pages[page.group, page.key]
        self.order[self.arena_of[page.group]].remove(page)
        self.hide(page)

    def hide(self, page: Page) -> None:
        if page.pins or page.state == "ticketed":
            page.state = "gone"
        else:
            self.held.remove(page)

    def orphans(self, lost: Page) -> None:
        dense = self.layout.groups[lost.group]
        start = lost.block * dense.tokens_per_block
        for index in self.kept(dense=False):
            g = self.layout.groups[index]
            if dense.draft and not g.draft:
                continue
            for at, key in enumerate([*lost.inside, lost.key]):
                end = start + (at + 1) * self.layout.tokens_per_hash
                page = self.pages.get((index, key))
                if page is None or page.pins or page.state != "resident":
                    continue
                if not g.draft or end - g.tokens_per_block > start:
                    self.drop(page, "orphan")

    def make_room(self, chains: list[list[bytes]], index: int, need: int, protect: list[bool]) -> None:
        arena = self.arena_of[index]
        lacking = need - self.free(arena)
        if lacking <= 0:
            return
        if not protect[0]:
            protect[0] = True
            for dense in self.kept(dense=True):
                for chain in chains:
                    self.touch_range(chain, dense, 0, self.num_blocks(chain, dense))
        oldest = [p for p in self.order[arena] if not p.pins and p.touched < self.call][:lacking]
        for page in oldest:
            self.drop(page, "room")
        for dense in self.kept(dense=True):
            for page in oldest:
                if page.group == dense:
                    self.orphans(page)


class StoreMachine(RuleBasedStateMachine):
    layout: CacheLayout
    partition: str

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.clock = Clock()
        names = [g.name for g in self.layout.groups if g.cacheable and g.page_bytes]
        slots = {name: data.draw(st.integers(1, 10), label=f"slots of {name}") for name in names}
        self.recorded = data.draw(st.booleans(), label="record changes")
        self.mirror: set[tuple[int, bytes]] = set()
        self.store = Store(
            self.layout,
            Plan(slots, partition=self.partition),
            clock=self.clock,
            lease_seconds=LEASE_SECONDS,
            ticket_seconds=TICKET_SECONDS,
            prefault=False,
            record_changes=self.recorded,
        )
        totals = [arena.num_slots for arena in self.store.arenas]
        self.model = Model(self.layout, self.store.arena_of, totals, order=[[] for _ in totals])
        self.store.register_owner("live", live=True)
        self.live = {"live"}
        self.leases: dict[int, tuple[str, float, list[Page]]] = {}
        self.tickets: dict[int, tuple[str, float, list[tuple[int, list[bytes], list[Page]]]]] = {}
        self.texts = [digests(text) for text in TEXTS]
        self.chains = [Chain(self.layout, text) for text in self.texts]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    # What the model expects of time

    def end_lease(self, lease_id: int) -> None:
        for page in self.leases.pop(lease_id)[2]:
            page.pins -= 1
            if page.state == "gone" and not page.pins:
                self.model.held.remove(page)

    def expire_model(self) -> int:
        for ticket_id, (owner, overdue, parts) in self.tickets.items():
            if self.clock.now >= overdue:
                self.tickets[ticket_id] = (owner, math.inf, parts)
                self.forget(parts)
        over = [i for i, (_, deadline, _) in self.leases.items() if self.clock.now >= deadline]
        for lease_id in over:
            self.end_lease(lease_id)
        return len(over)

    def forget(self, parts: list[tuple[int, list[bytes], list[Page]]]) -> None:
        """The keys of a ticket's pages may be written by others."""
        for _, _, pages in parts:
            for page in pages:
                if page.state == "ticketed":
                    del self.model.pages[page.group, page.key]
                    page.state = "gone"

    # Rules

    @rule(
        owner=st.sampled_from(OWNERS),
        which=st.integers(0, len(TEXTS) - 1),
        tokens=st.integers(0, 18),
        local=st.sampled_from([0, 0, 0, 1, 2, 4, 8, 20]),
        drafts=st.booleans(),
    )
    def lookup(self, owner: str, which: int, tokens: int, local: int, drafts: bool) -> None:
        ignore = () if drafts else tuple(g.name for g in self.layout.groups if g.draft)
        found = self.store.lookup(owner, self.chains[which], tokens, local_tokens=local, ignore=ignore)
        hit = longest_hit(self.layout, self.presence(which), tokens, local_tokens=local, ignore=ignore)
        assert found.tokens == hit.tokens
        assert (found.limited_by is None) == (hit.tokens == self.layout.max_boundary(tokens))
        self.took(owner, which, found, local, ignore)

    @rule(
        owner=st.sampled_from(OWNERS),
        which=st.integers(0, len(TEXTS) - 1),
        tokens=st.integers(0, 18),
        local=st.sampled_from([0, 0, 2, 4]),
    )
    def lease_at(self, owner: str, which: int, tokens: int, local: int) -> None:
        found = self.store.lease_at(owner, self.chains[which], tokens, local_tokens=local)
        legal = tokens % self.layout.lattice_tokens == 0
        presence = self.presence(which)
        valid = legal and (
            tokens == 0
            or all(
                valid_at(g, presence.get(g.name, ()), np.array([tokens]), local)[0]
                for g in self.layout.cacheable_groups
            )
        )
        assert (found is not None) == valid
        if found is not None:
            assert found.tokens == tokens
            self.took(owner, which, found, local, ())

    def presence(self, which: int) -> dict[str, set[int]]:
        chain = self.texts[which]
        return {
            g.name: {b for b in range(self.model.num_blocks(chain, i)) if self.model.visible(chain, i, b)}
            for i, g in enumerate(self.layout.groups)
            if self.store.arena_of[i] >= 0
        }

    def took(self, owner: str, which: int, found: object, local: int, ignore: tuple[str, ...]) -> None:
        chain, tokens = self.texts[which], found.tokens  # type: ignore[attr-defined]
        self.model.call += 1
        expected: list[tuple[int, int, list[Page]]] = []
        for index, g in enumerate(self.layout.groups):
            if self.store.arena_of[index] < 0 or g.name in ignore:
                continue
            lo, hi = needed_blocks(g, tokens)
            first = max(lo, local // g.tokens_per_block)
            pages = [self.model.visible(chain, index, b) for b in range(first, hi)]
            assert None not in pages
            if pages:
                expected.append((index, first, pages))  # type: ignore[arg-type]
        got = [(r.group, r.first_block, r.slots.tolist()) for r in found.pages]  # type: ignore[attr-defined]
        assert got == [(index, first, [p.slot for p in pages]) for index, first, pages in expected]
        if tokens:
            self.touch_asked(chain, tokens, ignore)
        lease_id = found.lease_id  # type: ignore[attr-defined]
        assert (lease_id is not None) == bool(expected)
        if lease_id is not None:
            pages = [page for _, _, part in expected for page in part]
            for page in pages:
                page.pins += 1
            deadline = math.inf if owner in self.live else self.clock.now + LEASE_SECONDS
            self.leases[lease_id] = (owner, deadline, pages)

    def touch_asked(self, chain: list[bytes], tokens: int, ignore: tuple[str, ...]) -> None:
        for dense in (False, True):
            for index in self.model.kept(dense):
                g = self.layout.groups[index]
                if g.name not in ignore:
                    lo, hi = needed_blocks(g, tokens)
                    self.model.touch_range(chain, index, lo, hi + g.draft)

    @rule(owner=st.sampled_from(OWNERS), data=st.data())
    def reserve(self, owner: str, data: st.DataObject) -> None:
        kept = [i for i, arena in enumerate(self.store.arena_of) if arena >= 0]
        one = st.tuples(
            st.integers(0, len(TEXTS) - 1), st.sampled_from(kept), st.lists(st.integers(0, 15), max_size=8)
        )
        asked = []
        for which, index, blocks in data.draw(st.lists(one, max_size=4)):
            hashed = self.chains[which].num_blocks(index)
            asked.append((which, index, [b for b in blocks if b < hashed]))
        self.reserved(owner, asked)

    @rule(
        owner=st.sampled_from(OWNERS),
        which=st.integers(0, len(TEXTS) - 1),
        lo=st.integers(0, 8),
        size=st.integers(1, 16),
        commit=st.booleans(),
    )
    def save_stretch(self, owner: str, which: int, lo: int, size: int, commit: bool) -> None:
        """What an engine step does: the same stretch of tokens of every group."""
        asked = []
        for index, arena in enumerate(self.store.arena_of):
            if arena >= 0:
                tokens = self.layout.groups[index].tokens_per_block
                last = min(self.chains[which].num_blocks(index), (lo + size) // tokens)
                asked.append((which, index, list(range(lo // tokens, last))))
        ticket_id = self.reserved(owner, asked)
        if commit and ticket_id is not None:
            self.finish(ticket_id, failed=False)

    def reserved(self, owner: str, asked: list[tuple[int, int, list[int]]]) -> int | None:
        wants = [
            Want(self.chains[which], index, np.array(blocks, dtype=np.int64))
            for which, index, blocks in asked
        ]
        ticket = self.store.reserve(owner, wants)
        self.expire_model()
        self.model.call += 1
        granted = {
            grant.want: dict(zip(grant.blocks.tolist(), grant.slots.tolist(), strict=True))
            for grant in ticket.grants
        }
        skipped: dict[str, Counter[str]] = {"present": Counter(), "ticketed": Counter(), "full": Counter()}
        parts: dict[int, tuple[int, list[bytes], list[Page]]] = {}
        chains = [self.texts[w] for w in dict.fromkeys(which for which, _, _ in asked)]
        protect, refused = [False], []
        for i in sorted(range(len(asked)), key=lambda i: not self.layout.groups[asked[i][1]].dense):
            which, index, blocks = asked[i]
            pages = self.reserve_want(
                chains, protect, refused, which, index, blocks, granted.get(i, {}), skipped
            )
            if pages:
                parts[i] = (index, self.texts[which], pages)
        assert {i: [p.block for p in part[2]] for i, part in parts.items()} == {
            grant.want: grant.blocks.tolist() for grant in ticket.grants
        }
        assert ticket.skipped_present == skipped["present"]
        assert ticket.skipped_ticketed == skipped["ticketed"]
        assert ticket.skipped_full == skipped["full"]
        assert (ticket.ticket_id is None) == (not parts)
        if ticket.ticket_id is not None:
            overdue = self.clock.now + TICKET_SECONDS
            self.tickets[ticket.ticket_id] = (owner, overdue, [parts[i] for i in sorted(parts)])
        return ticket.ticket_id

    def reserve_want(
        self,
        chains: list[list[bytes]],
        protect: list[bool],
        refused: list[tuple[int, int, int]],
        which: int,
        index: int,
        blocks: list[int],
        slots: dict[int, int],
        skipped: dict[str, Counter[str]],
    ) -> list[Page]:
        model, chain, g = self.model, self.texts[which], self.layout.groups[index]
        distinct = sorted(set(blocks))
        if len(blocks) > len(distinct):
            skipped["ticketed"][g.name] += len(blocks) - len(distinct)
        usable = []
        for block in distinct:
            useless = False
            for other, dense_index, first in refused:
                dense = self.layout.groups[dense_index]
                if other == which and not g.dense and (g.draft or not dense.draft):
                    needed_to = (block if g.draft else block + 1) * g.tokens_per_block
                    useless |= needed_to > first * dense.tokens_per_block
            if useless:
                skipped["full"][g.name] += 1
            else:
                usable.append(block)
        need = sum(model.key(chain, index, b) not in model.pages for b in usable)
        model.make_room(chains, index, need, protect)
        out: list[Page] = []
        full: list[int] = []
        for block in usable:
            key = model.key(chain, index, block)
            old = model.pages.get(key)
            if old is not None:
                skipped["present" if old.state == "resident" else "ticketed"][g.name] += 1
            elif model.free(self.store.arena_of[index]) == 0:
                full.append(block)
                skipped["full"][g.name] += 1
            else:
                per_block = self.layout.hashes_per_block(g)
                inside = chain[block * per_block : (block + 1) * per_block - 1]
                page = Page(index, key[1], slots[block], block, inside)
                model.pages[key] = page
                assert all(
                    p.slot != page.slot
                    for p in model.held
                    if self.store.arena_of[p.group] == self.store.arena_of[index]
                )
                model.held.append(page)
                out.append(page)
        if full and g.dense:
            refused.append((which, index, full[0]))
        return out

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), failed=st.booleans(), thief=st.booleans())
    def commit(self, data: st.DataObject, failed: bool, thief: bool) -> None:
        ticket_id = data.draw(st.sampled_from(sorted(self.tickets)))
        if thief:
            with pytest.raises(TicketError):
                self.store.commit(ticket_id, "thief")
        self.finish(ticket_id, failed)
        with pytest.raises(TicketError):
            self.store.abort(ticket_id, "timed")

    def finish(self, ticket_id: int, failed: bool) -> None:
        owner, _, parts = self.tickets.pop(ticket_id)
        self.store.commit(ticket_id, owner, failed=failed)
        self.model.call += 1
        if failed:
            self.end_ticket(parts)
            return
        parts = sorted(parts, key=lambda part: self.layout.groups[part[0]].dense)
        for _, _, pages in parts:
            for page in pages:
                if page.state == "ticketed":
                    page.state = "resident"
                    self.model.touch(page)
                else:
                    self.model.held.remove(page)
        for index, chain, pages in parts:
            if self.layout.groups[index].dense:
                self.model.touch_range(chain, index, 0, pages[-1].block + 1)

    def end_ticket(self, parts: list[tuple[int, list[bytes], list[Page]]]) -> None:
        self.forget(parts)
        for _, _, pages in parts:
            for page in pages:
                self.model.held.remove(page)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), what=st.sampled_from(["pages", "renew", "release"]), thief=st.booleans())
    def use_lease(self, data: st.DataObject, what: str, thief: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        owner, deadline, pages = self.leases[lease_id]
        if thief:
            with pytest.raises(LeaseError, match="belongs to"):
                getattr(self.store, what)(lease_id, "thief")
        if self.clock.now >= deadline:
            with pytest.raises(LeaseError, match="run out"):
                getattr(self.store, what)(lease_id, owner)
            self.end_lease(lease_id)
        elif what == "pages":
            got = [slot for part in self.store.pages(lease_id, owner) for slot in part.slots.tolist()]
            assert got == [page.slot for page in pages]
        elif what == "renew":
            self.store.renew(lease_id, owner)
            deadline = math.inf if owner in self.live else self.clock.now + LEASE_SECONDS
            self.leases[lease_id] = (owner, deadline, pages)
        else:
            self.store.release(lease_id, owner)
            self.end_lease(lease_id)
            with pytest.raises(LeaseError, match="unknown"):
                self.store.release(lease_id, owner)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        assert self.store.expire() == self.expire_model()

    @rule(which=st.integers(0, len(TEXTS) - 1), tokens=st.integers(0, 16))
    def touch(self, which: int, tokens: int) -> None:
        self.store.touch(self.chains[which], tokens)
        self.model.call += 1
        boundary = tokens // self.layout.lattice_tokens * self.layout.lattice_tokens
        if boundary:
            self.model.touch_boundary(self.texts[which], boundary)

    @rule(which=st.integers(0, len(TEXTS) - 1), data=st.data())
    def withdraw(self, which: int, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, arena in enumerate(self.store.arena_of) if arena >= 0]))
        hashed = self.chains[which].num_blocks(index)
        if not hashed:
            return
        block = data.draw(st.integers(0, hashed - 1))
        page = self.model.visible(self.texts[which], index, block)
        count = self.store.withdraw(self.chains[which], index, np.array([block]))
        assert count == (page is not None)
        if page is not None:
            self.model.drop(page, "withdrawn")
            if self.layout.groups[index].dense:
                self.model.orphans(page)

    @rule()
    def reset(self) -> None:
        self.store.reset()
        for page in list(self.model.pages.values()):
            self.model.hide(page)
        self.model.pages.clear()
        for order in self.model.order:
            order.clear()

    @rule(owner=st.sampled_from(OWNERS))
    def release_owner(self, owner: str) -> None:
        self.store.release_owner(owner)
        self.live.discard(owner)
        for lease_id in [i for i, lease in self.leases.items() if lease[0] == owner]:
            self.end_lease(lease_id)
        for ticket_id in [i for i, ticket in self.tickets.items() if ticket[0] == owner]:
            self.end_ticket(self.tickets.pop(ticket_id)[2])

    @rule(live=st.booleans())
    def register(self, live: bool) -> None:
        self.store.register_owner("other", live=live)
        (self.live.add if live else self.live.discard)("other")
        for lease_id, (owner, _, pages) in self.leases.items():
            if owner == "other":
                self.leases[lease_id] = (owner, math.inf if live else self.clock.now + LEASE_SECONDS, pages)

    # What must hold after every rule

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "store"):
            return
        report = self.store.audit()
        assert (report.leases, report.tickets) == (len(self.leases), len(self.tickets))
        for index, arena in enumerate(report.arenas):
            held = [p for p in self.model.held if self.store.arena_of[p.group] == index]
            written = [p for _, _, parts in self.tickets.values() for _, _, ps in parts for p in ps]
            reserved = sum(self.store.arena_of[p.group] == index for p in written)
            assert arena.leased == sum(p.pins > 0 for p in held)
            if arena.unusable == 0:
                assert arena.free == self.model.free(index)
                assert (arena.used, arena.reserved) == (len(held) - reserved, reserved)
        stats = {g.name: g for g in self.store.stats().groups}
        for index, g in enumerate(self.layout.groups):
            if g.name in stats:
                resident = [
                    p for p in self.model.pages.values() if p.group == index and p.state == "resident"
                ]
                assert stats[g.name].pages == len(resident)
                for reason, count in stats[g.name].evictions_by_reason.items():
                    assert count == self.model.evicted[index, reason]

    @invariant()
    def changes_tell_the_visible_keys(self) -> None:
        """Whoever applies them holds exactly what can be found; no page comes or goes twice."""
        if not hasattr(self, "store"):
            return
        for change in self.store.take_changes():
            for at, key in enumerate(change.keys):
                name = (change.group, key.tobytes())
                assert (name in self.mirror) != change.stored
                (self.mirror.add if change.stored else self.mirror.discard)(name)
                if change.chain is not None and change.blocks is not None:
                    assert (change.chain.keys(change.group)[change.blocks[at]] == key).all()
        resident = {name for name, page in self.model.pages.items() if page.state == "resident"}
        assert self.mirror == (resident if self.recorded else set())

    @invariant()
    def same_pages(self) -> None:
        for which, chain in enumerate(getattr(self, "chains", ())):
            for index, arena in enumerate(self.store.arena_of):
                blocks = np.arange(chain.num_blocks(index))
                known = [
                    arena < 0 or self.model.key(self.texts[which], index, b) in self.model.pages
                    for b in blocks
                ]
                assert (~self.store.missing(chain, index, blocks)).tolist() == known


@pytest.mark.parametrize("partition", ["solved", "shared_rows"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_store_does_what_the_model_says(name: str, partition: str) -> None:
    machine = type("Machine", (StoreMachine,), {"layout": LAYOUTS[name], "partition": partition})
    # The profile's count is for examples of one call; an example here is a run of dozens of calls.
    settings_ = settings(
        max_examples=settings().max_examples // 8,
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings_)  # type: ignore[arg-type]
