"""What every tier must do: tests for each sentence of `kvquilt.tiers.Tier`, to be subclassed.

    import pytest
    from kvquilt.testing.tier_contract import TierContract

    class TestMyTier(TierContract):
        @pytest.fixture
        def make_tier(self, tmp_path):
            return lambda source, num_bytes: MyTier(source.layout, num_bytes, num_ranks=source.num_ranks)

Put `pytest.register_assert_rewrite("kvquilt.testing.tier_contract")` into conftest.py, so that a failed
test shows its values.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.testing.tier_pages import PageSource
from kvquilt.tiers.base import GroupTierStats, Tier, TierStats

__all__ = ["MakeTier", "Reopen", "TierContract", "Tiers"]

MakeTier = Callable[[PageSource, int], Tier]
"""(source, bytes) -> a new, empty tier for the source's layout, ranks and partition."""
Reopen = Callable[[Tier], Tier]
"""Close a tier and open it again, with what it kept."""

_BYTES = 4 << 20
_FEW_BYTES = 1 << 20
_SECONDS = 60.0  # a limit for what should take milliseconds
_NUM_THREADS = 4
_CALLS_PER_THREAD = 60


def _full(name: str = "full", tokens: int = 32, page_bytes: int = 8192, **more: Any) -> CacheGroup:
    return CacheGroup(name, kind="full", tokens_per_block=tokens, page_bytes=page_bytes, **more)


def _window(page_bytes: int = 5000) -> CacheGroup:
    return CacheGroup("win", kind="sliding", tokens_per_block=16, window=32, page_bytes=page_bytes)


_STATE = CacheGroup("state", kind="recurrent", tokens_per_block=64, page_bytes=12_000)
_SCRATCH = CacheGroup("scratch", kind="scratch", tokens_per_block=16, page_bytes=4096)
SOURCES: dict[str, Callable[[], PageSource]] = {
    "full": lambda: PageSource(CacheLayout([_full(tokens=16, page_bytes=4096)])),
    "full and sliding": lambda: PageSource(CacheLayout([_full(), _window()])),
    "sliding first": lambda: PageSource(CacheLayout([_window(), _full()])),
    "states": lambda: PageSource(CacheLayout([_full(tokens=16), _STATE])),
    "drafter": lambda: PageSource(CacheLayout([_full(), _window(), _full("draft", 32, 3000, draft=True)])),
    "shared rows": lambda: PageSource(CacheLayout([_full(), _window()]), partition="shared_rows"),
    "three ranks": lambda: PageSource(CacheLayout([_full(), _window()]), num_ranks=3),
    "replicated": lambda: PageSource(CacheLayout([_full(replicated=True), _window()]), num_ranks=2),
    "no bytes": lambda: PageSource(CacheLayout([_SCRATCH, _full(), _full("empty", 32, 0)])),
}


class Tiers:
    """The tiers of one test, which are checked and closed at its end."""

    def __init__(self, make: MakeTier, reopen: Reopen | None) -> None:
        self._make = make
        self._reopen = reopen
        self._open: list[Tier] = []
        self.sources: list[PageSource] = []

    def make(self, source: PageSource, num_bytes: int = _BYTES) -> Tier:
        """A new tier."""
        tier = self._make(source, num_bytes)
        self._open.append(tier)
        self.sources.append(source)
        return tier

    def reopen(self, tier: Tier) -> Tier:
        """Close and open again. Skips the test for a tier that keeps nothing."""
        if self._reopen is None:
            pytest.skip("the tier keeps nothing when it is closed")
        self.settle(tier)
        self._open.remove(tier)
        again = self._reopen(tier)
        self._open.append(again)
        return again

    def settle(self, tier: Tier) -> TierStats:
        """Wait until the tier is idle, check that it leaks nothing, and return its counts."""
        assert tier.wait_idle(_SECONDS)
        audit = getattr(tier, "audit", None)
        if audit is not None:
            audit()
        stats = tier.stats()
        assert (stats.queued_reads, stats.queued_writes) == (0, 0)
        return stats

    def close(self) -> None:
        """Check and close all tiers; every `done` must have been called once."""
        for tier in self._open:
            self.settle(tier)
            tier.close()
        for source in self.sources:
            assert [ended.calls for ended in source.ends if ended.calls != 1] == []


class TierContract:
    """Tests of a tier. A subclass, named Test..., overrides `make_tier`, and `reopen` if it keeps pages.

    The tier is asked for few bytes (1 to 4 MiB); it may take somewhat more, or keep fewer pages.
    """

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        """To be overridden."""
        raise NotImplementedError("a subclass of TierContract gives the fixture make_tier")

    @pytest.fixture
    def reopen(self) -> Reopen | None:
        """To be overridden by tiers whose pages outlive them."""
        return None

    @pytest.fixture
    def tiers(self, make_tier: MakeTier, reopen: Reopen | None) -> Iterator[Tiers]:
        """Makes tiers; they are checked and closed at the end."""
        made = Tiers(make_tier, reopen)
        yield made
        made.close()

    @pytest.fixture
    def source(self) -> PageSource:
        """A full and a sliding group."""
        return SOURCES["full and sliding"]()

    @pytest.fixture
    def tier(self, tiers: Tiers, source: PageSource) -> Tier:
        """An empty tier for `source`."""
        return tiers.make(source)

    # What is kept

    @pytest.mark.parametrize("layout", SOURCES)
    def test_what_was_saved_comes_back_byte_for_byte(self, tiers: Tiers, layout: str) -> None:
        source = SOURCES[layout]()
        tier = tiers.make(source)
        chain = source.chain("a", 320)
        assert source.save(tier, chain) == sum(chain.num_blocks(group) for group in source.stored) > 0
        for group in source.stored:
            assert tier.present(chain, group, 0, chain.num_blocks(group)).all()
            assert source.load(tier, chain, group).all()

    @pytest.mark.parametrize("layout", SOURCES)
    def test_all_groups_of_a_chain_are_loaded_in_one_call(self, tiers: Tiers, layout: str) -> None:
        source = SOURCES[layout]()
        tier = tiers.make(source)
        chain = source.chain("a", 256)
        source.save(tier, chain)
        wanted, ended = [source.blank(chain, group) for group in source.stored], source.ended()
        tier.load(wanted, ended)
        results = ended.wait()
        assert [len(good) for good in results] == [part.blocks.size for part in wanted]
        assert all(good.all() for good in results)
        assert all(source.right(part).all() for part in wanted)

    def test_blocks_may_come_in_any_order_and_twice(self, tier: Tier, source: PageSource) -> None:
        chain, ended = source.chain("a", 192), source.ended()
        assert tier.save([source.pages(chain, 1, [7, 2, 9, 2, 0])], ended) == 4
        ended.wait()
        assert np.flatnonzero(tier.present(chain, 1, 0, 12)).tolist() == [0, 2, 7, 9]
        good = source.load(tier, chain, 1, [9, 0, 5, 7, 2])
        assert good.tolist() == [True, True, False, True, True]
        source.load(tier, chain, 1, [7, 7, 0])

    def test_parts_of_several_chains_in_one_call(self, tier: Tier, source: PageSource) -> None:
        a, b = source.chain("a", 128), source.chain("b", 128)
        saved = source.ended()
        tier.save([source.pages(b, 1, [3]), source.pages(a, 0, [1, 2]), source.pages(a, 1, [3])], saved)
        saved.wait()
        wanted = [source.blank(a, 1, [3, 4]), source.blank(b, 1, [3]), source.blank(a, 0, [2])]
        loaded = source.ended()
        tier.load(wanted, loaded)
        results = loaded.wait()
        assert [good.tolist() for good in results] == [[True, False], [True], [True]]
        assert [source.right(part).tolist() for part in wanted] == [[True, False], [True], [True]]

    def test_a_page_is_named_by_its_whole_prefix_and_its_group(self, tier: Tier, source: PageSource) -> None:
        a = source.chain("a", 128)
        b = source.chain("b", 256, after=source.chain("a", 64))
        source.save(tier, a)
        assert tier.present(b, 0, 0, 8).tolist() == [True] * 2 + [False] * 6
        assert tier.present(b, 1, 0, 16).tolist() == [True] * 4 + [False] * 12
        only = source.chain("c", 32)
        source.save(tier, only, [1])  # its last hash also closes a block of group 0
        assert tier.present(only, 1, 0, 2).all()
        assert not tier.present(only, 0, 0, 1).any()
        assert not source.load(tier, only, 0).any()

    def test_memory_is_free_as_soon_as_that_is_told(self, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        pages, ended = source.pages(chain, 0), source.ended()
        ended.then = lambda: _fill(pages.memory, 0xEE)
        tier.save([pages], ended)
        ended.wait()
        assert source.load(tier, chain, 0).all()
        target, loaded = source.blank(chain, 0), source.ended()
        loaded.then = lambda: _fill(target.memory, 0xDD)
        tier.load([target], loaded)
        assert loaded.wait()[0].all()
        assert tier.wait_idle(_SECONDS)
        assert bytes(target.memory) == b"\xdd" * len(target.memory)

    # What is not there

    def test_unknown_pages_are_misses(self, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        assert not tier.present(chain, 0, 0, 10).any()
        assert not source.load(tier, chain, 0).any()
        ended = source.ended()
        tier.save([source.pages(chain, 0, [1, 3])], ended)
        ended.wait()
        assert source.load(tier, chain, 0, [0, 1, 2, 3, 4]).tolist() == [False, True, False, True, False]

    def test_present_answers_for_each_block_asked_for(self, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 160)
        source.save(tier, chain)
        assert tier.present(chain, 0, 0, 8).tolist() == [True] * 5 + [False] * 3  # past the end: no page
        assert tier.present(chain, 1, 3, 5).tolist() == [True] * 2
        assert tier.present(chain, 1, 4, 4).tolist() == []
        assert tier.present(chain, 1, 5, 4).tolist() == []
        assert tier.present(chain, 0, 0, 2).dtype == np.bool_

    def test_calls_about_nothing_end_too(self, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 64)
        saves, loads = source.ended(), source.ended()
        assert tier.save([], saves) == 0
        tier.load([], loads)
        assert list(loads.wait()) == []
        saves.wait()
        saves, loads = source.ended(), source.ended()
        assert tier.save([source.pages(chain, 0, [])], saves) == 0
        tier.load([source.blank(chain, 0, []), source.blank(chain, 1, [1])], loads)
        assert [good.tolist() for good in loads.wait()] == [[], [False]]
        saves.wait()
        assert tier.withdraw(chain, 0, np.zeros(0, dtype=np.int64)) == 0

    def test_groups_without_pages_have_none(self, tiers: Tiers) -> None:
        source = SOURCES["no bytes"]()
        tier = tiers.make(source)
        chain = source.chain("a", 64)
        for group in (0, 2):
            saved, loaded = source.ended(), source.ended()
            assert tier.save([source.blank(chain, group, range(2))], saved) == 0
            saved.wait()
            assert not tier.present(chain, group, 0, 2).any()
            tier.load([source.blank(chain, group, range(2))], loaded)
            assert not loaded.wait()[0].any()
            assert tier.withdraw(chain, group, np.arange(2)) == 0
        assert [group.name for group in tiers.settle(tier).groups] == ["full"]

    # Duplicates

    def test_what_is_there_is_not_kept_again(self, tiers: Tiers, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        source.save(tier, chain)
        before = tiers.settle(tier)
        assert source.save(tier, chain) == 0
        other, ended = source.blank(chain, 0), source.ended()
        assert tier.save([other], ended) == 0
        ended.wait()
        assert source.load(tier, chain, 0).all()
        after = tiers.settle(tier)
        assert [(g.writes, g.pages) for g in after.groups] == [(g.writes, g.pages) for g in before.groups]

    def test_b63_the_same_pages_from_two_sides_at_once(
        self, tiers: Tiers, tier: Tier, source: PageSource
    ) -> None:
        """Two writers store k1..k8 together; k4 exists; k5 is withdrawn meanwhile."""
        chain = source.chain("k", 256)
        first = source.ended()
        tier.save([source.pages(chain, 0, [3])], first)
        first.wait()
        accepted = []

        def write() -> None:
            ended = source.ended()
            accepted.append(tier.save([source.pages(chain, 0)], ended))
            ended.wait()

        writers = [threading.Thread(target=write) for _ in range(2)]
        for writer in writers:
            writer.start()
        withdrawn = tier.withdraw(chain, 0, np.asarray([4]))
        for writer in writers:
            writer.join()
        stats = _group(tiers.settle(tier), "full")
        present = tier.present(chain, 0, 0, 8)
        assert np.delete(present, 4).all()
        assert (source.load(tier, chain, 0) == present).all()
        assert sum(accepted) + 1 == stats.writes == 8 + withdrawn - (not present[4])

    # Forgetting

    def test_withdrawn_pages_are_gone_for_good(self, tiers: Tiers, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        source.save(tier, chain)
        assert tier.withdraw(chain, 1, np.asarray([19, 5, 17])) == 3
        assert tier.withdraw(chain, 1, np.asarray([5, 6])) == 1
        left = [block not in (5, 6, 17, 19) for block in range(20)]
        assert tier.present(chain, 1, 0, 20).tolist() == left
        assert source.load(tier, chain, 1).tolist() == left
        assert source.load(tier, chain, 0).all()
        tiers.settle(tier)
        assert source.save(tier, chain) == 4
        assert source.load(tier, chain, 1).all()

    def test_withdrawn_pages_do_not_come_back(self, tiers: Tiers, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        source.save(tier, chain)
        assert tier.withdraw(chain, 1, np.asarray([5, 17])) == 2
        tier = tiers.reopen(tier)
        assert source.load(tier, chain, 1).tolist() == [block not in (5, 17) for block in range(20)]
        assert source.load(tier, chain, 0).all()

    def test_reset_forgets_everything(self, tiers: Tiers, tier: Tier, source: PageSource) -> None:
        chain, other = source.chain("a", 320), source.chain("b", 320)
        source.save(tier, chain)
        assert tier.reset() is True
        assert not any(tier.present(chain, group, 0, 20).any() for group in source.stored)
        assert not source.load(tier, chain, 0).any()
        assert [group.pages for group in tiers.settle(tier).groups] == [0, 0]
        source.save(tier, other)
        assert source.load(tier, other, 1).all()
        assert source.save(tier, chain) > 0
        assert source.load(tier, chain, 1).all()

    def test_a_reset_also_forgets_what_is_being_written(
        self, tiers: Tiers, tier: Tier, source: PageSource
    ) -> None:
        chains = [source.chain(f"c{i}", 160) for i in range(8)]
        for chain in chains:
            tier.save(source.all_pages(chain), source.ended())
        assert tier.reset()
        tiers.settle(tier)
        assert not any(tier.present(chain, 1, 0, 10).any() for chain in chains)
        assert source.save(tier, chains[0]) == 15

    def test_after_a_reset_nothing_old_comes_back(self, tiers: Tiers, tier: Tier, source: PageSource) -> None:
        old, new = source.chain("old", 320), source.chain("new", 320)
        source.save(tier, old)
        assert tier.reset()
        source.save(tier, new, [1])
        tier = tiers.reopen(tier)
        assert not any(tier.present(old, group, 0, 20).any() for group in source.stored)
        assert not source.load(tier, old, 0).any()
        assert source.load(tier, new, 1).all()

    # Room

    def test_it_is_bounded_and_the_newest_stay(self, tiers: Tiers) -> None:
        source = SOURCES["full and sliding"]()
        tier = tiers.make(source, _FEW_BYTES)
        slots = [group.slots for group in tiers.settle(tier).groups]
        assert min(slots) >= 10
        chains = [source.chain(f"c{i}", 160) for i in range(3 * max(slots) // 10)]
        for chain in chains:
            source.save(tier, chain)
        stats = tiers.settle(tier)
        assert all(group.pages <= group.slots for group in stats.groups)
        assert [group.slots for group in stats.groups] == slots
        assert all(group.evictions > 0 for group in stats.groups)
        assert all(source.load(tier, chains[-1], group).all() for group in source.stored)
        assert not tier.present(chains[0], 0, 0, 5).any()

    def test_a_touched_chain_outlives_an_older_one(self, tiers: Tiers) -> None:
        source = SOURCES["full"]()
        tier = tiers.make(source, _FEW_BYTES)
        quarter = tiers.settle(tier).groups[0].slots // 4
        chains = [source.chain(f"c{i}", 16 * quarter) for i in range(5)]
        for chain in chains[:4]:
            source.save(tier, chain)
        tier.touch(chains[0], 16 * quarter)
        tier.touch(source.chain("unknown", 64), 64)
        tier.touch(chains[1], 15)  # less than any boundary
        source.save(tier, chains[4])
        there = [tier.present(chain, 0, 0, quarter).sum() for chain in chains]
        assert there[0] == there[2] == there[3] == there[4] == quarter > there[1]
        assert all(source.load(tier, chain, 0).sum() == n for chain, n in zip(chains, there, strict=True))

    def test_of_a_prefix_the_tail_goes_first(self, tiers: Tiers) -> None:
        source = SOURCES["full"]()
        tier = tiers.make(source, _FEW_BYTES)
        slots = tiers.settle(tier).groups[0].slots
        long, short = source.chain("long", 16 * slots), source.chain("short", 16 * 7)
        source.save(tier, long)
        tier.touch(long, 16 * slots)
        source.save(tier, short)
        assert tier.present(long, 0, 0, slots).tolist() == [True] * (slots - 7) + [False] * 7
        assert source.load(tier, short, 0).all()

    def test_a_chain_longer_than_the_tier_keeps_its_head(self, tiers: Tiers) -> None:
        source = SOURCES["full"]()
        tier = tiers.make(source, _FEW_BYTES)
        slots = tiers.settle(tier).groups[0].slots
        chain = source.chain("long", 16 * (slots + 9))
        assert source.save(tier, chain) == slots
        assert source.load(tier, chain, 0).tolist() == [True] * slots + [False] * 9
        assert _group(tiers.settle(tier), "full").dropped == {"full": 9}

    # Counting

    def test_what_there_is_room_for_is_not_refused(
        self, tiers: Tiers, tier: Tier, source: PageSource
    ) -> None:
        """Nor is a queue that is full called empty: what is told fits, and a tier that is closed has none."""
        chain = source.chain("a", 160)
        pages = source.all_pages(chain)
        needed = sum(part.blocks.size * source.content_bytes(part.group) for part in pages)
        assert tier.room_bytes() >= needed
        assert source.save(tier, chain) == sum(part.blocks.size for part in pages)
        assert all(not group.dropped for group in tiers.settle(tier).groups)
        tier.close()
        assert tier.room_bytes() == 0

    @pytest.mark.parametrize("layout", ["full and sliding", "three ranks", "shared rows"])
    def test_stats_add_up(self, tiers: Tiers, layout: str) -> None:
        source = SOURCES[layout]()
        tier = tiers.make(source)
        empty = tiers.settle(tier)
        assert (empty.name, empty.state, empty.why) == (tier.name, "on", "")
        assert all((g.pages, g.reads, g.writes, g.bad, g.evictions) == (0, 0, 0, 0, 0) for g in empty.groups)
        chain, unknown = source.chain("a", 160), source.chain("b", 160)
        source.save(tier, chain)
        for group in source.stored:
            source.load(tier, chain, group)
            source.load(tier, chain, group, [1, 2])
            source.load(tier, unknown, group)
        for index, stats in zip(source.stored, tiers.settle(tier).groups, strict=True):
            size, blocks = source.content_bytes(index), chain.num_blocks(index)
            assert stats.name == source.layout.groups[index].name
            assert (stats.pages, stats.writes, stats.written_bytes) == (blocks, blocks, blocks * size)
            assert (stats.reads, stats.read_bytes) == (blocks + 2, (blocks + 2) * size)
            assert stats.bytes_used >= blocks * size
            assert stats.slots >= stats.pages
            assert (sum(stats.dropped.values()), stats.bad, stats.evictions) == (0, 0, 0)

    # The end

    def test_pages_outlive_the_tier(self, tiers: Tiers, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        source.save(tier, chain)
        for _ in range(2):
            tier = tiers.reopen(tier)
            assert all(source.load(tier, chain, group).all() for group in source.stored)
            assert source.save(tier, chain) == 0

    def test_after_close_everything_is_a_miss(self, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 320)
        source.save(tier, chain)
        tier.close()
        tier.close()
        assert not tier.present(chain, 0, 0, 10).any()
        assert source.save(tier, source.chain("b", 64)) == 0
        assert not source.load(tier, chain, 0).any()
        tier.touch(chain, 320)
        assert tier.withdraw(chain, 0, np.arange(3)) == 0
        assert tier.reset() in (True, False)
        assert tier.stats().name == tier.name
        assert tier.wait_idle(_SECONDS)

    def test_close_ends_what_is_under_way(self, tier: Tier, source: PageSource) -> None:
        chains = [source.chain(f"c{i}", 160) for i in range(12)]
        source.save(tier, chains[0])
        targets = []
        for chain in chains:
            tier.save(source.all_pages(chain), source.ended())
            targets.append((source.blank(chains[0], 1), source.ended()))
            tier.load([targets[-1][0]], targets[-1][1])
        tier.close()
        assert [ended.calls for ended in source.ends if ended.calls != 1] == []
        for pages, ended in targets:
            assert not (ended.results[0] & ~source.right(pages)).any()

    def test_close_while_others_call(self, tier: Tier, source: PageSource) -> None:
        chain = source.chain("a", 160)
        source.save(tier, chain)
        begun = threading.Barrier(3)

        def call(number: int) -> None:
            begun.wait()
            for i in range(20):
                source.save(tier, source.chain(f"{number} {i}", 64))
                source.load(tier, chain, 1)

        with _threads([lambda: call(0), lambda: call(1)]):
            begun.wait()
            tier.close()

    # Several threads

    @pytest.mark.parametrize("layout", ["full and sliding", "shared rows"])
    @pytest.mark.parametrize("resets", [False, True])
    def test_threads_do_not_hurt_each_other(self, tiers: Tiers, layout: str, resets: bool) -> None:
        """Saves, loads, touches and withdrawals of pages that don't fit all at once, by several threads."""
        source = SOURCES[layout]()
        tier = tiers.make(source, _FEW_BYTES)
        stem = source.chain("stem", 96)
        chains = [source.chain(f"c{i}", 320, after=stem if i % 2 else None) for i in range(16)]
        with _threads([_worker(tier, source, chains, seed, resets) for seed in range(_NUM_THREADS)]):
            pass
        stats = tiers.settle(tier)
        for index, group in zip(source.stored, stats.groups, strict=True):
            there = set()
            for chain in chains:
                present = tier.present(chain, index, 0, chain.num_blocks(index))
                there |= {key.tobytes() for key in chain.keys(index)[present]}
                assert (source.load(tier, chain, index) == present).all()
            assert len(there) == group.pages <= group.slots
            assert group.bad == 0


def _worker(tier: Tier, source: PageSource, chains: list[Any], seed: int, resets: bool) -> Callable[[], None]:
    draw = random.Random(seed)

    def work() -> None:
        for _ in range(_CALLS_PER_THREAD):
            chain, group = draw.choice(chains), draw.choice(source.stored)
            some = draw.sample(range(chain.num_blocks(group)), 5)
            call = draw.random()
            if call < 0.35:
                tier.save([source.pages(chain, group, sorted(some))], source.ended())
            elif call < 0.45:
                source.save(tier, chain)
            elif call < 0.85:
                source.load(tier, chain, group, some)
            elif call < 0.9:
                tier.touch(chain, 320)
            elif call < 0.95:
                tier.withdraw(chain, group, np.asarray(some))
            elif resets:
                assert tier.reset()
            else:
                tier.stats()

    return work


class _threads:
    """Runs calls in threads of their own until the end of the block; what they raise is raised there."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(call,)) for call in calls]

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            self._errors.append(error)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *exc: object) -> None:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def _fill(memory: memoryview, byte: int) -> None:
    memory[:] = bytes([byte]) * len(memory)


def _group(stats: TierStats, name: str) -> GroupTierStats:
    return next(group for group in stats.groups if group.name == name)
