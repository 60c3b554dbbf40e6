"""Look-up, leases and tickets, by the number of the invariant that each test shows."""

from __future__ import annotations

import numpy as np
import pytest

from kvquilt.errors import LeaseError, TicketError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain, Store
from kvquilt.store.index import GroupIndex
from kvquilt.store.leases import Leases
from unit.store.store_support import (
    Clock,
    chain_of,
    digests,
    full32_window16,
    make_store,
    present,
    ranges,
    save,
    save_all,
    want,
)

PROMPT = "abcdefgh"  # 8 hashes of 16 tokens: four dense blocks of 32


@pytest.fixture
def store():
    with make_store(full32_window16(), {"full": 8, "win": 16}, clock=Clock(), lease_seconds=10.0) as made:
        yield made
        made.audit()


def leased(store: Store) -> list[int]:
    return [arena.leased for arena in store.audit().arenas]


def test_09_equal_hashes_in_two_groups_are_two_keys(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {1: [1, 3, 5, 7]})  # the sliding keys that equal the dense ones
    assert present(store, chain, 1) == [1, 3, 5, 7]
    assert present(store, chain, 0) == []


@pytest.mark.parametrize("partition", ["solved", "shared_rows"])
def test_09_also_where_groups_share_rows(partition: str) -> None:
    with make_store(full32_window16(), 8, partition=partition) as store:
        chain = chain_of(store.layout, PROMPT)
        save_all(store, chain)
        found = store.lookup("r", chain, 129)
        assert ranges(found) == {0: [0, 1, 2, 3], 1: [6, 7]}
        slots = [(store.arena_of[p.group], slot) for p in found.pages for slot in p.slots.tolist()]
        assert len(set(slots)) == 6


def test_10_asking_twice_gives_the_same_answer_and_each_lease_ends_alone(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    one, two = store.lookup("r", chain, 129), store.lookup("r", chain, 129)
    assert (one.tokens, ranges(one)) == (two.tokens, ranges(two))
    store.release(one.lease_id, "r")
    assert leased(store) == [4, 2]
    store.release(two.lease_id, "r")
    assert leased(store) == [0, 0]


def test_11_a_changed_local_length_is_a_new_question(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    old = store.lookup("r", chain, 129)
    store.release(old.lease_id, "r")
    new = store.lookup("r", chain, 129, local_tokens=64)
    assert ranges(new) == {0: [2, 3], 1: [6, 7]}
    store.release(new.lease_id, "r")


def test_13_only_what_the_engine_lacks_of_a_window_is_loaded() -> None:
    with make_store(full32_window16(window=96), 16) as store:
        chain = chain_of(store.layout, "abcdef")
        save_all(store, chain)
        found = store.lookup("r", chain, 97, local_tokens=64)
        assert found.tokens == 96
        assert ranges(found) == {0: [2], 1: [4, 5]}
        assert leased(store) == [1, 2]


def test_14_a_saved_suffix_with_nothing_before_it_gives_the_full_hit(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {0: range(4), 1: [6, 7]})
    assert store.lookup("r", chain, 129).tokens == 128


def test_15_a_hole_in_the_window_shortens_the_hit_to_where_the_window_is_whole(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {0: range(4), 1: [4, 5, 6, 7]})
    assert ranges(store.lookup("r", chain, 129)) == {0: [0, 1, 2, 3], 1: [6, 7]}
    store.release_owner("r")
    store.withdraw(chain, 1, np.array([7]))
    found = store.lookup("r", chain, 129)
    assert (found.tokens, found.limited_by) == (96, "win")
    assert ranges(found) == {0: [0, 1, 2], 1: [4, 5]}


def test_15_groups_meet_at_the_longest_common_boundary_not_at_the_shortest_of_their_bests() -> None:
    groups = [
        CacheGroup("full", kind="full", tokens_per_block=1, page_bytes=1),
        CacheGroup("w3", kind="sliding", window=3, tokens_per_block=1, page_bytes=1),
        CacheGroup("w4", kind="sliding", window=4, tokens_per_block=1, page_bytes=1),
    ]
    with make_store(CacheLayout(groups), 8) as store:
        chain = chain_of(store.layout, "ABCDEF")
        save(store, chain, {0: range(5), 1: [3, 4], 2: [1, 2, 3]})
        assert store.lookup("r", chain, 7).tokens == 0
    one_block = [
        CacheGroup("a", kind="recurrent", tokens_per_block=1, page_bytes=1),
        CacheGroup("b", kind="recurrent", tokens_per_block=1, page_bytes=1),
    ]
    with make_store(CacheLayout(one_block), 8) as store:
        chain = chain_of(store.layout, "ABCDEF")
        save(store, chain, {0: [3, 1], 1: [2, 1]})  # states after {4, 2} and {3, 2} tokens
        assert store.lookup("r", chain, 7).tokens == 2


@pytest.mark.parametrize(
    ("num_tokens", "tokens"), [(129, 128), (128, 96), (97, 96), (33, 32), (32, 0), (1, 0), (0, 0)]
)
def test_16_one_token_is_left_to_compute(store: Store, num_tokens: int, tokens: int) -> None:
    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    found = store.lookup("r", chain, num_tokens)
    assert (found.tokens, found.limited_by) == (tokens, None)


def test_16_a_clamped_boundary_is_asked_for_by_itself(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {0: range(4), 1: [2, 3, 6, 7]})
    assert store.lease_at("r", chain, 100) is None  # no boundary
    assert store.lease_at("r", chain, 96) is None  # its window is not there
    found = store.lease_at("r", chain, 64)
    assert found is not None
    assert ranges(found) == {0: [0, 1], 1: [2, 3]}


def test_17_slots_come_in_block_order_and_the_peek_block_is_required_but_not_leased() -> None:
    groups = [
        CacheGroup("full", kind="full", tokens_per_block=2, page_bytes=1),
        CacheGroup("draft", kind="sliding", tokens_per_block=1, window=2, page_bytes=1, draft=True),
    ]
    with make_store(CacheLayout(groups), 12) as store:
        chain = chain_of(store.layout, "abcdef")
        ticket = save(store, chain, {0: [0, 1], 1: [4, 3]})
        found = store.lookup("r", chain, 7)
        assert ranges(found) == {0: [0, 1], 1: [3]}
        assert leased(store) == [2, 1]
        by_block = dict(zip(ticket.grants[1].blocks.tolist(), ticket.grants[1].slots.tolist(), strict=True))
        assert found.pages[1].slots.tolist() == [by_block[3]]
        store.release_owner("r")
        store.withdraw(chain, 1, np.array([4]))
        shorter = store.lookup("r", chain, 7)
        assert (shorter.tokens, shorter.limited_by) == (0, "draft")
        assert store.lookup("r", chain, 7, ignore=["draft"]).tokens == 4


def test_19_a_page_that_one_rank_failed_to_write_serves_nobody(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {0: range(4), 1: range(6)})
    ticket = store.reserve("w", [want(chain, 1, [6, 7])])
    store.commit(ticket.ticket_id, "w", failed=True)
    assert store.lookup("r", chain, 129).tokens == 96


@pytest.mark.parametrize("failing", ["touch", "take"])
def test_20_a_look_up_that_fails_in_its_last_step_has_taken_nothing(
    store: Store, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    with monkeypatch.context() as patch:
        patch.setattr(GroupIndex if failing == "touch" else Leases, failing, fail)
        with pytest.raises(MemoryError):
            store.lookup("r", chain, 129)
    assert leased(store) == [0, 0]
    assert store.lookup("r", chain, 129).tokens == 128


def test_24_leased_and_ticketed_slots_are_neither_freed_nor_hidden(store: Store) -> None:
    chain, other = chain_of(store.layout, PROMPT), chain_of(store.layout, "q" * 32)
    save(store, chain, {0: range(4), 1: [6, 7]})
    lease = store.lookup("r", chain, 129)
    pending = store.reserve("w", [want(chain_of(store.layout, "p" * 4), 0, [0, 1])])
    ticket = save_all(store, other)
    assert ticket.skipped_full["full"] == 16 - 2  # 8 slots: 4 leased, 2 being written
    assert store.lookup("r", chain, 129).tokens == 128
    held = {
        slot for part in store.pages(lease.lease_id, "r") for slot in part.slots.tolist() if part.group == 0
    }
    given = {slot for grant in ticket.grants if grant.want == 0 for slot in grant.slots.tolist()}
    assert held.isdisjoint(given)
    store.commit(pending.ticket_id, "w")
    assert present(store, chain_of(store.layout, "pppp"), 0) == [0, 1]


def test_35_a_page_is_visible_only_after_commit_and_an_aborted_one_is_free_again(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    ticket = store.reserve("w", [want(chain, 0, range(4)), want(chain, 1, [6, 7])])
    assert store.lookup("r", chain, 129).tokens == 0
    assert [arena.reserved for arena in store.audit().arenas] == [4, 2]
    store.abort(ticket.ticket_id, "w")
    assert [arena.free for arena in store.audit().arenas] == [8, 16]
    save(store, chain, {0: range(4), 1: [6, 7]})
    assert store.lookup("r", chain, 129).tokens == 128


def test_36_a_second_writer_of_a_present_or_ticketed_key_gets_nothing(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {0: [0, 1]})
    first = store.reserve("w", [want(chain, 0, [2])])
    second = store.reserve("v", [want(chain, 0, [0, 1, 2, 2]), want(chain_of(store.layout, PROMPT), 0, [0])])
    assert (second.ticket_id, second.grants) == (None, [])
    assert (second.skipped_present, second.skipped_ticketed) == ({"full": 3}, {"full": 2})
    store.commit(first.ticket_id, "w")
    assert store.stats().groups[0].committed_pages == 3


def test_36_the_same_block_twice_in_one_call_is_reserved_once(store: Store) -> None:
    one, two = chain_of(store.layout, "aabb"), chain_of(store.layout, "aacc")
    ticket = store.reserve("w", [want(one, 0, [0, 1]), want(two, 0, [0, 1])])
    assert [(g.want, g.blocks.tolist()) for g in ticket.grants] == [(0, [0, 1]), (1, [1])]
    assert ticket.skipped_ticketed == {"full": 1}
    store.abort(ticket.ticket_id, "w")


def test_37_tickets_end_once_and_by_their_owner(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    ticket = store.reserve("w", [want(chain, 0, [0])])
    for owner, ticket_id in (("v", ticket.ticket_id), ("w", 99)):
        with pytest.raises(TicketError):
            store.commit(ticket_id, owner)
        with pytest.raises(TicketError):
            store.abort(ticket_id, owner)
    store.commit(ticket.ticket_id, "w")
    with pytest.raises(TicketError, match="ended"):
        store.abort(ticket.ticket_id, "w")
    assert present(store, chain, 0) == [0]


def test_37_a_split_ticket_ends_in_parts(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    whole = store.reserve("w", [want(chain, 0, range(4))])
    assert whole.ticket_id is not None
    with pytest.raises(TicketError):
        store.split(whole.ticket_id, "another", 3)
    head, tail = store.split(whole.ticket_id, "w", 3)
    with pytest.raises(TicketError):
        store.commit(whole.ticket_id, "w")
    store.commit(head, "w", touch=0)
    assert store.visible(chain, 0, 0, 4).tolist() == [True, True, True, False]
    store.abort(tail, "w")
    assert present(store, chain, 0) == [0, 1, 2]
    assert store.audit().arenas[0].free == 5


@pytest.mark.parametrize("failed", [False, True])
def test_37_the_last_part_makes_the_whole_prefix_the_newest_tail_before_head(
    store: Store, failed: bool
) -> None:
    chain = chain_of(store.layout, PROMPT)
    whole = store.reserve("w", [want(chain, 0, range(4))])
    assert whole.ticket_id is not None
    *heads, tail = store.split(whole.ticket_id, "w", 1)
    for part in heads:
        store.commit(part, "w", touch=0)
    store.commit(tail, "w", failed=failed, touch=4)
    other = chain_of(store.layout, "ABCDEFGHIJKLMN")
    save(store, other, {0: range(7 if failed else 6)})  # eight slots: two of ours make room
    assert present(store, chain, 0) == ([0] if failed else [0, 1])


@pytest.mark.parametrize("use", ["pages", "renew", "release"])
def test_38_expired_foreign_and_released_leases_are_loud_errors_that_change_nothing(
    store: Store, use: str
) -> None:
    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    clock = store._leases._clock
    lease = store.lookup("r", chain, 129).lease_id
    with pytest.raises(LeaseError, match="belongs to owner 'r'"):
        getattr(store, use)(lease, "thief")
    assert leased(store) == [4, 2]
    store.release(lease, "r")
    with pytest.raises(LeaseError, match="unknown"):
        getattr(store, use)(lease, "r")
    assert leased(store) == [0, 0]
    lease = store.lookup("r", chain, 129).lease_id
    clock.now += 10.0  # type: ignore[attr-defined]
    with pytest.raises(LeaseError, match="run out"):
        getattr(store, use)(lease, "r")
    assert leased(store) == [0, 0]
    assert store.stats().expired_leases == 1


def test_38_expiry_frees_renewal_postpones_it_and_a_live_owner_has_none(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    clock = store._leases._clock
    store.register_owner("live", live=True)
    kept = store.lookup("live", chain, 129).lease_id
    old, renewed = store.lookup("r", chain, 129).lease_id, store.lookup("r", chain, 129).lease_id
    clock.now += 9.0  # type: ignore[attr-defined]
    store.renew(renewed, "r")
    clock.now += 1.0  # type: ignore[attr-defined]
    assert store.expire() == 1
    assert store.pages(renewed, "r")
    clock.now += 1e9  # type: ignore[attr-defined]
    assert store.expire() == 1
    assert ranges(store.lookup("live", chain, 129)) == {0: [0, 1, 2, 3], 1: [6, 7]}
    assert len(store.pages(kept, "live")) == 2
    with pytest.raises(LeaseError):
        store.pages(old, "r")


def test_39_removing_an_owner_returns_all_it_held(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save(store, chain, {0: range(4), 1: [6, 7]})
    for owner in ("gone", "stays"):
        store.lookup(owner, chain, 129)
        store.lookup(owner, chain, 129)
    store.reserve("gone", [want(chain, 1, [0, 1])])
    store.release_owner("gone")
    store.release_owner("gone")
    report = store.audit()
    assert (report.leases, report.tickets) == (2, 0)
    store.release_owner("stays")
    assert leased(store) == [0, 0]


def test_40_a_refused_reservation_has_taken_nothing(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    with pytest.raises(ValueError, match=r"'full'.*4 blocks"):
        store.reserve("w", [want(chain, 1, [0, 1]), want(chain, 0, [4])])
    with pytest.raises(ValueError, match="keeps no pages"):
        store.reserve("w", [want(chain, 0, [0]), want(chain, 7, [0])])
    with pytest.raises(ValueError, match="'win'"):
        store.missing(chain, 1, np.array([-1]))
    report = store.audit()
    assert (report.tickets, [arena.free for arena in report.arenas]) == (0, [8, 16])
    save_all(store, chain)


def test_reset_forgets_pages_keeps_leased_bytes_and_lets_tickets_land_unseen(store: Store) -> None:
    chain = chain_of(store.layout, PROMPT)
    save_all(store, chain)
    lease = store.lookup("r", chain, 129)
    before = [part.slots.tolist() for part in lease.pages]
    pending = store.reserve("w", [want(chain_of(store.layout, "zz"), 0, [0])])
    store.reset()
    assert store.lookup("r", chain, 129).tokens == 0
    assert [part.slots.tolist() for part in store.pages(lease.lease_id, "r")] == before
    again = save_all(store, chain)
    taken = {slot for grant in again.grants if grant.want == 0 for slot in grant.slots.tolist()}
    assert taken.isdisjoint(before[0])
    store.commit(pending.ticket_id, "w")
    assert present(store, chain_of(store.layout, "zz"), 0) == []
    store.release(lease.lease_id, "r")
    assert store.audit().arenas[0].free == 8 - len(taken)


def test_a_chain_that_grows_is_found_further(store: Store) -> None:
    hashes = digests(PROMPT)
    chain = Chain(store.layout, hashes[:4])
    save_all(store, chain)
    assert store.lookup("r", chain, 129).tokens == 64
    chain.extend(hashes[4:])
    save_all(store, chain)
    assert store.lookup("r", chain, 129).tokens == 128
