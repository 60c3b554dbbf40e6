"""Failures of other systems, by their number in the collection, that the store must not repeat."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvquilt.errors import StoreCorruptError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Store
from unit.store.store_support import (
    Clock,
    chain_of,
    full32_window16,
    make_store,
    present,
    ranges,
    read_page,
    save,
    save_all,
    want,
    write_page,
)


def full_and_window33() -> CacheLayout:
    return CacheLayout(
        [
            CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=4096),
            CacheGroup("win", kind="sliding", tokens_per_block=16, window=33, page_bytes=4096),
        ]
    )


@pytest.mark.parametrize(
    ("evicted", "tokens"), [([0, 1, 2, 3], 96), ([0, 1, 5], 80), ([4, 5], 64), ([5, 4, 3, 2], 32)]
)
def test_b37_which_window_blocks_go_decides_the_hit(evicted: list[int], tokens: int) -> None:
    with make_store(full_and_window33(), 6) as store:
        chain = chain_of(store.layout, "abcdef")
        save_all(store, chain)
        store.withdraw(chain, 1, np.array(evicted))
        assert store.lookup("r", chain, 97).tokens == tokens


@pytest.mark.parametrize("touched", [False, True])
def test_b37_blocks_that_the_latest_boundary_cannot_reach_go_first(touched: bool) -> None:
    with make_store(full_and_window33(), {"full": 12, "win": 6}) as store:
        chain, other = chain_of(store.layout, "abcdef"), chain_of(store.layout, "uvwxyz")
        for step in range(3):  # as an engine saves it, in steps
            save(store, chain, {0: [2 * step, 2 * step + 1], 1: [2 * step, 2 * step + 1]})
        if touched:
            store.touch(chain, 96)
        for count in range(1, 5):
            save(store, other, {0: [count - 1], 1: [count - 1]})
            assert present(store, chain, 1) == list(range(count, 6))
            assert store.lease_at("r", chain, 96) is not None
            store.release_owner("r")


def test_b40_nothing_is_held_when_the_engine_has_as_much_itself() -> None:
    with make_store(full32_window16(), 16) as store:
        chain = chain_of(store.layout, "abcdefgh")
        save_all(store, chain)
        for local in (128, 144):
            found = store.lookup("r", chain, 129, local_tokens=local)
            assert (found.tokens, found.lease_id, found.pages) == (128, None, ())
        assert [arena.leased for arena in store.audit().arenas] == [0, 0]


def test_b41_an_abort_between_look_up_and_allocation_returns_everything_at_once() -> None:
    with make_store(full32_window16(), 8) as store:
        chain = chain_of(store.layout, "abcdefgh")
        save_all(store, chain)
        found = store.lookup("r", chain, 129)
        store.release(found.lease_id, "r")
        fetch = store.reserve("promote", [want(chain_of(store.layout, "z" * 8), 0, range(4))])
        store.abort(fetch.ticket_id, "promote")
        report = store.audit()
        assert [(arena.leased, arena.reserved) for arena in report.arenas] == [(0, 0), (0, 0)]
        assert (report.leases, report.tickets) == (0, 0)


def test_b44_releasing_one_lease_leaves_the_others_pages_alone() -> None:
    groups = [
        CacheGroup("full", kind="full", tokens_per_block=2, page_bytes=1),
        CacheGroup("win", kind="sliding", tokens_per_block=2, window=5, page_bytes=1),
    ]
    with make_store(CacheLayout(groups, tokens_per_hash=2), 4) as store:
        chain = chain_of(store.layout, "ABCD")
        save_all(store, chain)
        one, two = store.lookup("r1", chain, 9), store.lookup("r2", chain, 5)
        assert (ranges(one), ranges(two)) == ({0: [0, 1, 2, 3], 1: [2, 3]}, {0: [0, 1], 1: [0, 1]})
        store.release(one.lease_id, "r1")
        pins = {part.group: part.slots.tolist() for part in store.pages(two.lease_id, "r2")}
        for group in (0, 1):
            counts = store._built.slots[group].pins
            assert np.flatnonzero(counts).tolist() == sorted(pins[group])
            assert counts.max() == 1


def test_b45_what_a_look_up_found_is_still_there_at_allocation() -> None:
    layout = CacheLayout([CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=64)])
    with make_store(layout, 20) as store:
        chain, other = chain_of(layout, "a" * 20), chain_of(layout, "b" * 18)
        save_all(store, chain)
        found = store.lookup("r", chain, 321)
        refused = save_all(store, other)
        assert (found.tokens, refused.ticket_id, refused.skipped_full) == (320, None, {"full": 18})
        assert store.lease_at("r", chain, 320) is not None
        store.release_owner("r")
        assert save_all(store, other).ticket_id is not None
        assert store.lookup("r", chain, 321).tokens == 32


def test_b48_a_write_that_never_ends_holds_up_nobody_and_its_key_can_be_written_again() -> None:
    clock = Clock()
    layout = CacheLayout([CacheGroup("full", kind="full", tokens_per_block=1, page_bytes=64)])
    with make_store(layout, 8, clock=clock, ticket_seconds=30.0) as store:
        chain = chain_of(layout, "12345")
        save(store, chain, {0: [0, 1, 3, 4]})
        stuck = store.reserve("stuck", [want(chain, 0, [2])])
        assert store.lookup("r", chain, 6).tokens == 2
        assert store.reserve("w", [want(chain, 0, [2])]).skipped_ticketed == {"full": 1}
        clock.now = 30.0
        again = save(store, chain, {0: [2]})
        assert (
            again.grants[0].slots.tolist() != stuck.grants[0].slots.tolist()
        )  # it may still be writing there
        assert store.lookup("r", chain, 6).tokens == 5
        assert store.stats().detached_tickets == 1
        store.commit(stuck.ticket_id, "stuck")
        store.release_owner("r")
        assert store.audit().arenas[0].free == 3


def test_b63_two_writers_of_the_same_pages_and_a_cancelled_one() -> None:
    layout = CacheLayout([CacheGroup("full", kind="full", tokens_per_block=1, page_bytes=64)])
    with make_store(layout, 16) as store:
        chain = chain_of(layout, "12345678")
        save_pages(store, chain, [3])
        tickets = {w: store.reserve(w, [want(chain, 0, range(8))]) for w in ("one", "two")}
        assert tickets["one"].skipped_present == {"full": 1}
        assert tickets["two"].ticket_id is None
        for grant in tickets["one"].grants:
            for block, slot in zip(grant.blocks, grant.slots, strict=True):
                write_page(store, 0, slot, b"page %d" % block)
        store.commit(tickets["one"].ticket_id, "one")
        assert contents(store, chain, 9) == [b"page %d" % block for block in range(8)]
        store.withdraw(chain, 0, np.array([4]))
        late = store.reserve("two", [want(chain, 0, [4])])
        store.abort(late.ticket_id, "two")
        assert present(store, chain, 0) == [0, 1, 2, 3, 5, 6, 7]
        assert contents(store, chain, 9) == [b"page %d" % block for block in range(4)]


def test_b83_no_slot_of_a_sweep_is_given_away_while_it_is_copied() -> None:
    layout = CacheLayout([CacheGroup("full", kind="full", tokens_per_block=1, page_bytes=64)])
    with make_store(layout, 4) as store:
        chains = [chain_of(layout, letter * 2) for letter in "abc"]
        tickets = [store.reserve("sweep", [want(chain, 0, range(2))]) for chain in chains]
        assert (tickets[2].ticket_id, tickets[2].skipped_full) == (None, {"full": 2})
        for ticket, name in ((tickets[1], b"b"), (tickets[0], b"a")):  # copies end last first
            for block, slot in enumerate(ticket.grants[0].slots):
                write_page(store, 0, slot, b"%s%d" % (name, block))
            store.commit(ticket.ticket_id, "sweep")
        assert contents(store, chains[0], 3) == [b"a0", b"a1"]
        assert contents(store, chains[1], 3) == [b"b0", b"b1"]


def save_pages(store: Store, chain: object, blocks: list[int]) -> None:
    ticket = store.reserve("seed", [want(chain, 0, blocks)])  # type: ignore[arg-type]
    for block, slot in zip(blocks, ticket.grants[0].slots, strict=True):
        write_page(store, 0, slot, b"page %d" % block)
    store.commit(ticket.ticket_id, "seed")  # type: ignore[arg-type]


def contents(store: Store, chain: object, num_tokens: int) -> list[bytes]:
    """What a look-up's pages hold."""
    found = store.lookup("reader", chain, num_tokens)  # type: ignore[arg-type]
    pages = [
        read_page(store, part.group, slot, 64).rstrip(b"\0") for part in found.pages for slot in part.slots
    ]
    store.release_owner("reader")
    return pages


# Eviction order


def test_of_a_prefix_the_tail_goes_first_whoever_used_it_last() -> None:
    layout = CacheLayout([CacheGroup("full", kind="full", tokens_per_block=1, page_bytes=64)])
    with make_store(layout, 6) as store:
        base, branch = chain_of(layout, "aaa"), chain_of(layout, "aaabbb")
        save(store, base, {0: range(3)})
        save(store, branch, {0: [3, 4, 5]})  # its prefix was there: used, not written
        for i, letter in enumerate("uvwxy"):
            save(store, chain_of(layout, letter), {0: [0]})
            assert present(store, branch, 0) == list(range(5 - i))


def test_the_oldest_prompt_goes_before_a_newer_one() -> None:
    layout = full32_window16()
    with make_store(layout, {"full": 4, "win": 8}) as store:
        old, new, third = (chain_of(layout, letter * 4) for letter in "abc")
        save_all(store, old)
        save_all(store, new)
        assert store.lookup("r", old, 65).tokens == 64  # used again: now it is the newer
        store.release_owner("r")
        save_all(store, third)
        assert store.lookup("r", old, 65).tokens == 64
        assert store.lookup("r", new, 65).tokens == 0


def test_a_dense_page_that_goes_takes_the_checkpoint_that_needs_it() -> None:
    layout = full32_window16()
    with make_store(layout, {"full": 4, "win": 64}) as store:
        chain = chain_of(layout, "abcdefgh")
        save_all(store, chain)
        save(store, chain_of(layout, "zz"), {0: [0]})
        assert present(store, chain, 0) == [0, 1, 2]
        assert present(store, chain, 1) == [0, 1, 2, 3, 4, 5]
        stats = {g.name: g.evictions_by_reason for g in store.stats().groups}
        assert stats == {
            "full": {"room": 1, "orphan": 0, "withdrawn": 0},
            "win": {"room": 0, "orphan": 2, "withdrawn": 0},
        }


def test_a_leased_checkpoint_outlives_its_dense_page_until_it_is_released_and_replaced() -> None:
    layout = full32_window16()
    with make_store(layout, {"full": 4, "win": 64}) as store:
        chain = chain_of(layout, "abcdefgh")
        save_all(store, chain)
        lease = store.lookup("r", chain, 129, local_tokens=112)  # holds dense 3 and window 7
        assert ranges(lease) == {0: [3], 1: [7]}
        store.withdraw(chain, 0, np.array([3]))
        assert present(store, chain, 1) == [0, 1, 2, 3, 4, 5, 7]
        assert [part.slots.size for part in store.pages(lease.lease_id, "r")] == [1, 1]
        store.audit()


def test_a_lost_draft_page_costs_the_target_groups_nothing() -> None:
    groups = [
        CacheGroup("full", kind="full", tokens_per_block=2, page_bytes=1),
        CacheGroup("win", kind="sliding", tokens_per_block=1, window=2, page_bytes=1),
        CacheGroup("draft", kind="full", tokens_per_block=2, page_bytes=1, draft=True),
        CacheGroup("draft_win", kind="sliding", tokens_per_block=1, window=2, page_bytes=1, draft=True),
    ]
    with make_store(CacheLayout(groups), 16) as store:
        chain = chain_of(store.layout, "abcdef")
        save_all(store, chain)
        store.withdraw(chain, 2, np.array([1]))
        assert present(store, chain, 1) == [0, 1, 2, 3, 4, 5]
        # Page 2 is the peek block of the boundary at 2 tokens, which the drafts can still serve.
        assert present(store, chain, 3) == [0, 1, 2, 4, 5]
        assert store.lookup("r", chain, 7, ignore=["draft", "draft_win"]).tokens == 6


def test_a_prompt_longer_than_the_store_keeps_its_head_and_what_it_can_use() -> None:
    layout = full32_window16()
    with make_store(layout, {"full": 4, "win": 6}) as store:
        save_all(store, chain_of(layout, "old!"))
        chain = chain_of(layout, "".join(itertools.islice(itertools.cycle("abcdefg"), 20)))
        for step in range(5):
            blocks = {0: [2 * step, 2 * step + 1], 1: range(4 * step, 4 * step + 4)}
            ticket = save(store, chain, blocks)
        assert ticket.ticket_id is None
        assert ticket.skipped_full == {"full": 2, "win": 4}
        assert present(store, chain, 0) == [0, 1, 2, 3]
        assert store.lookup("r", chain, 321).tokens == 128


def test_audit_can_fail() -> None:
    with make_store(full32_window16(), 8) as store:
        chain = chain_of(store.layout, "abcdefgh")
        save_all(store, chain)
        slots = store._built.slots[1]
        for field, index, name in (
            (slots.pins, 0, "leases and count"),
            (slots.state, 0, "index entries"),
            (slots.meta, 0, "free"),
            (slots.keys, (0, 0), "not found by their key"),
            (slots.stamp, int(slots.meta[1]), "recency"),
            (slots.pages, 1, "page count"),
        ):
            kept = field[index]
            field[index] = kept + (1 << 30 if field is slots.stamp else 1)
            with pytest.raises(StoreCorruptError, match=name):
                store.audit()
            field[index] = kept
            store.audit()
