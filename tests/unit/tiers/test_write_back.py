"""What goes down to a slower tier, and when."""

from __future__ import annotations

from unit.tiers.ladder_support import Ladder, full, page_bytes_of, sliding


def held(one: Ladder) -> int:
    return len(one.tier.held)


def test_through_offers_every_page_and_keeps_it_until_it_is_written() -> None:
    one = Ladder([full(), sliding()], {"full": 4, "win": 4})
    chain = one.chain(1, 4 * 16)
    one.save(chain, (0, range(4)), (1, range(2, 4)))
    assert held(one) == 6
    key = chain.keys(0)[3].tobytes()
    assert one.tier.held[0, key] == page_bytes_of(chain, 0, 3)
    other = one.chain(2, 4 * 16)
    one.save(other, (0, range(4)))
    assert held(one) == 6, "pages that are being written made room"
    one.written()
    one.save(other, (0, range(4)))
    assert held(one) == 10
    one.end()


def test_evicted_writes_only_what_is_about_to_leave() -> None:
    one = Ladder([full()], {"full": 16}, when="evicted")
    chains = [one.chain(i, 4 * 16) for i in range(8)]
    for i, chain in enumerate(chains):
        one.save(chain, (0, range(4)))
        one.written()
        if i < 3:
            assert held(one) == 0, "nothing is near its eviction yet"
    assert held(one) > 0
    # Newest pages are in RAM alone; what was written holds the right bytes.
    assert not one.tier.present(chains[-1], 0, 0, 4).any()
    assert one.tier.present(chains[0], 0, 0, 4).any()
    for i, there in enumerate(one.tier.present(chains[0], 0, 0, 4)):
        if there:
            assert one.tier.held[0, chains[0].keys(0)[i].tobytes()] == page_bytes_of(chains[0], 0, i)
    assert one.write_back.left_unwritten > 0, "four at a time leave, two are near the end"
    one.end()


def test_pages_that_may_not_outlive_the_process_stay_in_ram() -> None:
    for when in ("through", "evicted"):
        one = Ladder([full()], {"full": 4}, when=when)
        chain = one.chain(1, 4 * 16)
        chain.durable = False
        one.save(chain, (0, range(4)))
        other = one.chain(2, 4 * 16)
        other.durable = False
        one.save(other, (0, range(2)))
        assert held(one) == 0
        assert one.write_back.not_durable == 6
        one.end()


def test_a_slot_that_holds_another_page_is_written_again() -> None:
    one = Ladder([full()], {"full": 8}, when="evicted")
    for i in range(12):
        one.save(one.chain(i, 16), (0, [0]))
        one.written()
    assert held(one) >= 4
    assert one.write_back.left_unwritten == 0
    one.end()


def test_windows_that_leave_with_their_prefix_are_written_before_it_goes() -> None:
    """Their own pool never fills, so nothing in it is near its end."""
    one = Ladder([full(), sliding()], {"full": 32, "win": 64}, when="evicted")
    chains = [one.chain(i, 4 * 16) for i in range(12)]
    for chain in chains:
        one.save(chain, (1, range(2, 4)), (0, range(4)))
        one.written()
    assert one.store.free_slots(1) > 32
    assert one.write_back.left_unwritten == 0
    for chain in chains[:4]:
        assert not one.store.visible(chain, 1, 2, 4).any(), "gone from RAM with their prefix"
        assert one.tier.present(chain, 0, 0, 4).all()
        assert one.tier.present(chain, 1, 2, 4).all()
    assert not one.tier.present(chains[-1], 1, 2, 4).any(), "nothing but what is about to leave"
    one.end()


def test_what_the_queue_has_no_room_for_is_offered_again() -> None:
    one = Ladder([full()], {"full": 32}, when="evicted")
    one.tier.room = 2 * 4096
    for i in range(7):
        one.save(one.chain(i, 4 * 16), (0, range(4)))
        one.written()
    assert held(one) == 2, "four are near their end, two fit at a time"
    one.tier.room = 1 << 30
    one.write_back.look_ahead()
    assert held(one) == 4
    one.end()


def test_a_tier_that_is_off_is_offered_nothing_and_all_of_it_later() -> None:
    one = Ladder([full()], {"full": 8}, when="evicted")
    one.tier.on = False
    for i in range(2):
        one.save(one.chain(i, 4 * 16), (0, range(4)))
    assert held(one) == 0
    one.tier.on = True
    one.write_back.look_ahead()
    assert held(one) == 1
    one.end()


def test_pages_that_are_written_already_are_not_held_by_later_writes() -> None:
    one = Ladder([full()], {"full": 16}, when="evicted")
    for i in range(4):
        one.save(one.chain(i, 4 * 16), (0, range(4)))
    one.written()
    one.save(one.chain(9, 16), (0, [0]))  # its write is not over
    leased = one.store.stats().leased_slots
    assert leased <= 2
    one.end()
