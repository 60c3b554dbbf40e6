"""What comes back from a slower tier: the pages of one boundary, once, within their time and their room."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from unit.tiers.ladder_support import Ladder, full, sliding, state

TOKENS = 8 * 16


@pytest.fixture
def ladder() -> Iterator[Callable[..., Ladder]]:
    made: list[Ladder] = []

    def make(*args: object, **more: object) -> Ladder:
        made.append(Ladder(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.end()


Make = Callable[..., Ladder]


def test_a_hit_that_only_the_tier_holds_is_brought(ladder: Make) -> None:
    one = ladder([full(), sliding()], {"full": 10, "win": 10})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    one.tier.put(chain, 1, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    assert one.ask("a", chain, TOKENS + 1) is None  # still on its way
    one.tier.land()
    assert one.ask("a", chain, TOKENS + 1) == TOKENS
    one.check_bytes(chain, TOKENS)


def test_only_the_last_window_comes_and_not_its_history(ladder: Make) -> None:
    one = ladder([full(), sliding(window=33)], {"full": 10, "win": 10})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    one.tier.put(chain, 1, range(8))
    assert one.hit("a", chain, TOKENS + 1) == TOKENS
    assert sorted(block for group, block in one.tier.loaded if group == 1) == [6, 7]
    assert sorted(block for group, block in one.tier.loaded if group == 0) == list(range(8))


def test_one_state_comes(ladder: Make) -> None:
    one = ladder([full(), state()], {"full": 10, "state": 4})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    one.tier.put(chain, 1, [2, 5])
    assert one.hit("a", chain, TOKENS + 1) == 6 * 16
    assert [block for group, block in one.tier.loaded if group == 1] == [5]


def test_b17_what_the_engine_holds_is_not_brought(ladder: Make) -> None:
    """Eight pages, five of them held by the engine: the other three come; with none held, all eight."""
    for held, expected in ((5, [5, 6, 7]), (0, list(range(8)))):
        one = ladder([full()], {"full": 10})
        chain = one.chain(1, TOKENS)
        one.tier.put(chain, 0, range(8))
        assert one.hit("a", chain, TOKENS + 1, local=held * 16) == TOKENS
        assert sorted(block for _, block in one.tier.loaded) == expected


def test_ram_and_tier_serve_one_hit_together(ladder: Make) -> None:
    one = ladder([full(), sliding()], {"full": 10, "win": 10})
    chain = one.chain(1, TOKENS)
    one.save(chain, (0, range(5)))
    one.tier.held.clear()
    one.tier.put(chain, 0, range(5, 8))
    one.tier.put(chain, 1, range(6, 8))
    assert one.hit("a", chain, TOKENS + 1) == TOKENS
    assert sorted(block for group, block in one.tier.loaded if group == 0) == [5, 6, 7]
    one.check_bytes(chain, TOKENS)


def test_requests_for_the_same_pages_share_one_read(ladder: Make) -> None:
    one = ladder([full()], {"full": 20})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    assert one.ask("b", chain, TOKENS + 1) is None
    one.tier.land()
    for name in ("a", "b"):
        assert one.hit(name, chain, TOKENS + 1) == TOKENS
    assert len(one.tier.loaded) == 8


def test_a_bad_page_shortens_the_hit_and_no_more(ladder: Make) -> None:
    one = ladder([full(), sliding()], {"full": 10, "win": 10})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    one.tier.put(chain, 1, range(8))
    one.tier.lost = {(0, 6)}
    assert one.hit("a", chain, TOKENS + 1) == 6 * 16
    one.check_bytes(chain, 6 * 16)
    one.tier.lost = {(1, 4)}  # and of the window at that boundary's predecessor
    other = one.chain(2, TOKENS)
    one.tier.put(other, 0, range(5))
    one.tier.put(other, 1, range(8))
    assert one.hit("b", other, TOKENS + 1) == 4 * 16


def test_b90_a_hit_that_ram_has_no_room_for_is_cut_and_said_to_be(ladder: Make) -> None:
    """A hit of 100 pages, room in host RAM for 30: the 30 are used, and the reason is room."""
    one = ladder([full()], {"full": 30})
    chain = one.chain(1, 100 * 16)
    one.tier.put(chain, 0, range(100))
    assert one.ask("a", chain, 100 * 16 + 1) is None
    assert one.promoter.cut_short("a")
    assert one.promoter.counts["no_room"] == 1
    assert one.hit("a", chain, 100 * 16 + 1) == 30 * 16
    one.check_bytes(chain, 30 * 16)


@pytest.mark.parametrize("in_time", [True, False])
def test_room_that_is_about_to_come_is_waited_for_once(ladder: Make, in_time: bool) -> None:
    """All of RAM is being written just now."""
    one = ladder([full()], {"full": 4})
    one.save(one.chain(7, 4 * 16), (0, range(4)))
    chain = one.chain(1, 4 * 16)
    one.tier.put(chain, 0, range(4))
    assert one.ask("a", chain, 4 * 16 + 1) is None
    assert not one.promoter.cut_short("a")
    if in_time:
        one.written()
    assert one.hit("a", chain, 4 * 16 + 1) == (4 * 16 if in_time else 0)
    assert one.promoter.counts["no_room"] == (0 if in_time else 1)
    one.written()


def test_b53_every_prompt_is_answered_when_ram_is_far_smaller_than_the_disk(ladder: Make) -> None:
    """Twelve prompts, five pages of RAM, ten on disk; the first is asked for again."""
    one = ladder([full()], {"full": 5})
    chains = [one.chain(i, 2 * 16) for i in range(12)]
    for i, chain in enumerate(chains):
        assert one.hit(f"cold {i}", chain, 2 * 16 + 1) == 0
        one.save(chain, (0, range(2)))
        one.written()
    for group, key in list(one.tier.held)[:-10]:
        del one.tier.held[group, key]
    assert one.hit("again", chains[0], 2 * 16 + 1) == 0
    assert one.hit("kept", chains[-5], 2 * 16 + 1) == 2 * 16
    one.check_bytes(chains[-5], 2 * 16)


def test_a_tier_that_never_answers_costs_its_time_out_once(ladder: Make) -> None:
    one = ladder([full()], {"full": 10}, timeout=5.0)
    chain = one.chain(1, TOKENS)
    one.save(chain, (0, range(2)))
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    one.now = 4.9
    assert one.ask("a", chain, TOKENS + 1) is None
    one.now = 5.1
    assert one.ask("a", chain, TOKENS + 1) == 2 * 16
    assert one.promoter.counts["timed_out"] == 1
    assert one.ask("a", chain, TOKENS + 1) == 2 * 16


def test_what_lands_late_is_there_for_the_next(ladder: Make) -> None:
    one = ladder([full()], {"full": 10}, timeout=5.0)
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    one.promoter.forget("a")  # aborted
    one.tier.land()
    assert one.ask("b", chain, TOKENS + 1) == TOKENS
    assert len(one.tier.loaded) == 8


def test_promotions_together_pin_at_most_half_of_ram(ladder: Make) -> None:
    one = ladder([full()], {"full": 16})
    chains = [one.chain(i, 6 * 16) for i in range(3)]
    for chain in chains:
        one.tier.put(chain, 0, range(6))
    for i, chain in enumerate(chains):
        assert one.ask(str(i), chain, 6 * 16 + 1) is None
    assert sum(part.blocks.size for pages, _ in one.tier.waiting for part in pages) == 6
    for i, chain in enumerate(chains):
        assert one.hit(str(i), chain, 6 * 16 + 1) == 6 * 16
        one.promoter.forget(str(i))


def test_a_reset_while_pages_are_on_their_way_leaves_nothing(ladder: Make) -> None:
    one = ladder([full()], {"full": 10})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    one.store.reset()
    one.tier.reset()
    one.tier.land()
    assert one.hit("a", chain, TOKENS + 1) == 0


def test_drafters_pages_are_done_without_where_that_is_longer(ladder: Make) -> None:
    groups = [full(), full(name="draft", draft=True)]
    one = ladder(groups, {"full": 20, "draft": 20})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    one.tier.put(chain, 1, range(3))
    one.ask("a", chain, TOKENS + 1, optional=["draft"])
    one.tier.land()
    found = one.store.lookup("x", chain, TOKENS + 1, ignore=["draft"])
    assert found.tokens == TOKENS
    assert found.lease_id is not None
    one.store.release(found.lease_id, "x")
    assert one.hit("b", chain, TOKENS + 1) == 2 * 16  # required: up to the drafter's peek block


def test_a_prompt_that_nobody_knows_costs_no_read(ladder: Make) -> None:
    one = ladder([full(), sliding()], {"full": 10, "win": 10})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(1, 8))
    one.tier.put(chain, 1, range(8))
    assert one.ask("a", chain, TOKENS + 1) == 0
    assert one.tier.waiting == []


def test_b68_nothing_is_visible_before_its_bytes_are_there(ladder: Make) -> None:
    """Three pages, of which the second is not to be had: one page counts, and every slot is given back."""
    one = ladder([full()], {"full": 10})
    chain = one.chain(1, 3 * 16)
    one.tier.put(chain, 0, range(3))
    one.tier.lost = {(0, 1)}
    assert one.ask("a", chain, 3 * 16 + 1) is None
    assert not one.store.visible(chain, 0, 0, 3).any(), "on its way, and visible"
    one.tier.land()
    assert one.store.visible(chain, 0, 0, 3).tolist()[:2] == [True, False]
    assert one.hit("a", chain, 3 * 16 + 1) == 16
    one.check_bytes(chain, 16)
    one.promoter.forget("a")
    assert one.store.stats().ticketed_slots == 0


def test_a_draft_models_pages_are_done_without_where_none_is_there(ladder: Make) -> None:
    """Its groups are dense and have no flag: they must not end the search before the others are asked."""
    one = ladder([full(), full(name="draft model")], {"full": 20, "draft model": 20})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1, optional=["draft model"]) is None
    one.tier.land()
    assert one.store.visible(chain, 0, 0, 8).all()
    assert one.hit("b", chain, TOKENS + 1) == 0  # required


@pytest.mark.parametrize("how", ["aborted", "timed out"])
def test_what_nobody_waits_for_any_more_counts_as_pinned_until_it_lands(ladder: Make, how: str) -> None:
    one = ladder([full()], {"full": 32}, timeout=1.0)
    chains = [one.chain(i, 6 * 16) for i in range(6)]
    for i, chain in enumerate(chains):
        one.tier.put(chain, 0, range(6))
        one.ask(str(i), chain, 6 * 16 + 1)
        if how == "aborted":
            one.promoter.forget(str(i))
        else:
            one.now += 1.1
            assert one.ask(str(i), chain, 6 * 16 + 1) == 0
    assert one.store.stats().ticketed_slots == 2 * 6, "no more than half of RAM"
    one.tier.land()
    assert one.hit("last", chains[-1], 6 * 16 + 1) == 6 * 16


def test_nobody_waits_for_what_hangs_in_a_tier_that_is_off(ladder: Make) -> None:
    one = ladder([full()], {"full": 32}, timeout=5.0)
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    assert one.ask("b", chain, TOKENS + 1) is None, "it shares the read"
    one.tier.on = False
    assert one.ask("c", chain, TOKENS + 1) == 0
    assert one.ask("c", chain, TOKENS + 1) == 0


def test_who_shares_a_read_is_served_as_soon_as_it_lands(ladder: Make) -> None:
    one = ladder([full()], {"full": 20})
    chain = one.chain(1, TOKENS)
    one.tier.put(chain, 0, range(8))
    assert one.ask("a", chain, TOKENS + 1) is None
    assert one.ask("b", chain, TOKENS + 1) is None
    assert one.ask("b", chain, TOKENS + 1) is None
    one.tier.land()
    assert one.ask("b", chain, TOKENS + 1) == TOKENS


def test_a_drafters_bad_page_costs_no_second_read_of_windows(ladder: Make) -> None:
    one = ladder([full(), sliding(window=33), full(name="draft")], {"full": 20, "win": 20, "draft": 20})
    chain = one.chain(1, TOKENS)
    for group in range(3):
        one.tier.put(chain, group, range(8))
    one.tier.lost = {(2, 3)}
    assert one.ask("a", chain, TOKENS + 1, optional=["draft"]) is None
    one.tier.land()
    assert one.store.visible(chain, 1, 6, 8).all()
    found = one.store.lookup("x", chain, TOKENS + 1, ignore=["draft"])
    assert found.tokens == TOKENS
    assert found.lease_id is not None
    one.store.release(found.lease_id, "x")


def test_a_large_one_has_its_turn_among_small_ones(ladder: Make) -> None:
    """It needs more than half of RAM, so it can begin only when no other is under way."""
    one = ladder([full()], {"full": 32})
    large, small = one.chain(0, 20 * 16), [one.chain(i, 6 * 16) for i in range(1, 20)]
    one.tier.put(large, 0, range(20))
    for chain in small:
        one.tier.put(chain, 0, range(6))
    running = ["small 0"]
    assert one.ask("small 0", small[0], 6 * 16 + 1) is None
    assert one.ask("large", large, 20 * 16 + 1) is None
    answer = None
    for i, chain in enumerate(small[1:], 1):
        running.append(f"small {i}")
        assert one.ask(f"small {i}", chain, 6 * 16 + 1) is None
        later, one.tier.waiting = one.tier.waiting[1:], one.tier.waiting[:1]
        one.tier.land()
        one.tier.waiting = later
        for name in list(running):
            if one.ask(name, small[int(name.split()[1])], 6 * 16 + 1) is not None:
                one.promoter.forget(name)
                running.remove(name)
        answer = one.ask("large", large, 20 * 16 + 1)
        if answer is not None:
            break
    assert answer == 20 * 16
    one.promoter.forget("large")
    assert one.hit("small 1", small[1], 6 * 16 + 1) == 6 * 16
