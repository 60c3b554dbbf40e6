"""vLLM's own hit finder and ours, over the same groups and the same blocks.

They agree wherever both are defined; where they differ by design, a test below says how and why.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvquilt.hits import longest_hit
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.testing.sim_shapes import GroupShape

NUM_TOKENS = 384
CASES = 2_000


class Finder:
    """The engine's coordinator over a pool in which blocks are present as told."""

    def __init__(self, shapes: list[GroupShape]) -> None:
        self.shapes = shapes
        sizes = [shape.tokens_per_block for shape in shapes]
        self.unit, self.lattice = math.gcd(*sizes), math.lcm(*sizes)
        self.hashes = [n.to_bytes(4, "big") * 8 for n in range(NUM_TOKENS // self.unit)]
        groups = [
            KVCacheGroupSpec(shape.layer_names(i), shape.spec(i), is_eagle_group=shape.draft)
            for i, shape in enumerate(shapes)
        ]
        num_blocks = 2 + sum(NUM_TOKENS // size for size in sizes)
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.coordinator = HybridKVCacheCoordinator(
            config,
            max_model_len=NUM_TOKENS,
            max_in_flight_tokens=NUM_TOKENS,
            use_eagle=any(shape.draft for shape in shapes),
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.lattice,
            hash_block_size=self.unit,
            # Hits inside a block, with copies on write, are the engine's alone.
            allow_partial_hash_hits=False,
        )
        self.layout = CacheLayout([group_of(i, shape) for i, shape in enumerate(shapes)], self.unit)

    def engine(self, present: list[set[int]], num_tokens: int) -> int:
        """Tokens that the engine would hit in a prompt of `num_tokens`."""
        pool: BlockPool = self.coordinator.block_pool
        added = []
        free = iter(pool.blocks[1:])
        for index, blocks in enumerate(present):
            per_block = self.shapes[index].tokens_per_block // self.unit
            for block in blocks:
                key = make_block_hash_with_group_id(self.hashes[(block + 1) * per_block - 1], index)
                pool.cached_block_hash_to_block.insert(key, next(free))
                added.append(key)
        hashes = self.hashes[: num_tokens // self.unit]
        hit: int = self.coordinator.find_longest_cache_hit(hashes, num_tokens - 1)[1]
        for key in added:
            block = pool.cached_block_hash_to_block.get_one_block(key)
            pool.cached_block_hash_to_block.pop(key, block.block_id)
        return hit

    def ours(self, present: list[set[int]], num_tokens: int) -> int:
        """The same by our rule; a block that has no hash yet is not present."""
        presence = {}
        for group, blocks in zip(self.layout.groups, present, strict=True):
            presence[group.name] = {b for b in blocks if (b + 1) * group.tokens_per_block <= num_tokens}
        return longest_hit(self.layout, presence, num_tokens).tokens


def group_of(index: int, shape: GroupShape) -> CacheGroup:
    more: dict[str, Any] = {"window": shape.window, "chunk": shape.chunk, "extra_tokens": shape.extra_tokens}
    return CacheGroup(
        str(index),
        kind=shape.kind,  # type: ignore[arg-type]
        tokens_per_block=shape.tokens_per_block,
        page_bytes=8,
        draft=shape.draft,
        **more,
    )


def random_blocks(draw: random.Random, finder: Finder) -> list[set[int]]:
    """Prefixes, windows, holes: what caches come to hold."""
    present = []
    for shape in finder.shapes:
        count = NUM_TOKENS // shape.tokens_per_block
        keep = draw.choice([0.3, 0.8, 0.95, 1.0])
        end = draw.randrange(count + 1)
        present.append({b for b in range(count) if draw.random() < keep and (b < end or draw.random() < 0.3)})
    return present


FULL = GroupShape("full", 16)
AGREEING: dict[str, list[GroupShape]] = {
    "full, window": [FULL, GroupShape("sliding", 16, window=40)],
    "two windows": [FULL, GroupShape("sliding", 16, window=33), GroupShape("sliding", 32, window=90)],
    "three windows, no full": [
        GroupShape("sliding", 16, window=20),
        GroupShape("sliding", 32, window=64),
        GroupShape("sliding", 48, window=100),
    ],
    "two full": [FULL, GroupShape("full", 48)],
    "states": [GroupShape("full", 32), GroupShape("recurrent", 32, state_bytes=64)],
    "states and a window": [
        GroupShape("full", 32),
        GroupShape("recurrent", 64, state_bytes=64),
        GroupShape("sliding", 16, window=40),
    ],
    "states larger than blocks": [FULL, GroupShape("recurrent", 64, state_bytes=64)],
    "chunks": [FULL, GroupShape("chunked", 16, chunk=64)],
    "peek in a full group": [FULL, GroupShape("full", 16, draft=True, bytes_per_token=16)],
    "peek in a window": [FULL, GroupShape("sliding", 16, window=40, draft=True)],
    "chunks of two lengths": [
        FULL,
        GroupShape("chunked", 16, chunk=64),
        GroupShape("chunked", 16, chunk=96),
    ],
    "chunks, states, a window": [
        FULL,
        GroupShape("chunked", 16, chunk=64),
        GroupShape("recurrent", 16, state_bytes=64),
        GroupShape("sliding", 16, window=40),
    ],
    "peek in larger blocks": [FULL, GroupShape("sliding", 64, window=100, draft=True)],
    "peek in smaller blocks": [GroupShape("full", 64), GroupShape("sliding", 16, window=40, draft=True)],
    "peek, states": [
        GroupShape("full", 32),
        GroupShape("recurrent", 32, state_bytes=64),
        GroupShape("full", 32, draft=True, bytes_per_token=16),
    ],
    "peek, two windows": [
        FULL,
        GroupShape("sliding", 16, window=64),
        GroupShape("sliding", 32, window=40, draft=True),
    ],
    "sizes that do not divide": [
        GroupShape("full", 32),
        GroupShape("sliding", 48, window=64),
        GroupShape("recurrent", 64, state_bytes=64),
    ],
    "equal windows": [FULL, *[GroupShape("sliding", 32, window=64, num_layers=n) for n in (1, 2)]],
}


def answers(shapes: list[GroupShape], cases: int, seed: int = 1) -> list[tuple[int, int]]:
    """(the engine's, ours) for random blocks."""
    draw = random.Random(seed)
    finder = Finder(shapes)
    out = []
    for _ in range(cases):
        present = random_blocks(draw, finder)
        num_tokens = draw.randrange(1, NUM_TOKENS + 1)
        out.append((finder.engine(present, num_tokens), finder.ours(present, num_tokens)))
    return out


@pytest.mark.parametrize("name", AGREEING)
def test_the_engine_finds_what_we_find(name: str) -> None:
    found = answers(AGREEING[name], -(-CASES // len(AGREEING)))
    assert [pair for pair in found if pair[0] != pair[1]] == []
    assert any(ours for _, ours in found)


# ---- where they differ ----


def test_retained_tokens_are_restored_by_us_and_not_asked_for_by_the_engine() -> None:
    """`extra_tokens` before the window: the engine keeps their blocks in its tables, but its own hits
    do without them. A load fills every block that the engine's table expects, so ours needs them."""
    finder = Finder([FULL, GroupShape("sliding", 16, window=16, extra_tokens=16)])
    everything = set(range(6))
    assert (finder.engine([everything, {5}], 97), finder.ours([everything, {5}], 97)) == (96, 0)
    assert (finder.engine([everything, {4, 5}], 97), finder.ours([everything, {4, 5}], 97)) == (96, 96)
    found = answers(finder.shapes, 200)
    assert all(engine >= ours for engine, ours in found)


def test_a_window_of_one_token_needs_nothing_and_the_engine_asks_for_a_block() -> None:
    """The new token counts in the window: with W=1 nothing before it is read."""
    group = Finder([FULL, GroupShape("sliding", 16, window=1)])
    assert needed_blocks(group.layout.groups[1], 96) == (6, 6)
    assert (group.engine([set(range(6)), set()], 97), group.ours([set(range(6)), set()], 97)) == (0, 96)
    assert all(engine <= ours for engine, ours in answers(group.shapes, 200))


def test_groups_of_equal_spec_share_the_draft_flag_in_the_engine() -> None:
    """The engine looks equal groups up together, and then all of them peek. For the target's own
    layers that costs a block; it is never wrong, and neither is doing without."""
    finder = Finder([FULL, GroupShape("full", 16, draft=True)])
    present = [{0, 1}, {0, 1, 2}]
    assert (finder.engine(present, 65), finder.ours(present, 65)) == (16, 32)
    assert all(engine <= ours for engine, ours in answers(finder.shapes, 200))


def test_the_engine_may_give_a_peek_block_up_twice_where_all_groups_peek() -> None:
    """Each group drops a block when it is asked, so a later group starts from a shorter length and
    drops from there. All boundaries that we find hold by the rule itself."""
    shapes = [
        GroupShape("full", 16, draft=True),
        GroupShape("sliding", 32, window=64, draft=True),
        GroupShape("sliding", 16, window=40, draft=True),
    ]
    found = answers(shapes, 400)
    assert all(engine <= ours for engine, ours in found)
    assert any(engine < ours for engine, ours in found)
