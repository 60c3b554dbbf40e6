"""`longest_hit` against a brute force that goes token by token through the table of kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from kvquilt.hits import longest_hit
from kvquilt.layout import CacheGroup, CacheLayout

CASES_PER_SEED = 4200
SEEDS = range(5)  # 21,000 layouts a run
BLOCKS = (1, 2, 3, 4, 6, 8)


def needed_tokens(group: CacheGroup, boundary: int) -> range:
    """Tokens whose KV is read again after resuming at `boundary`, straight from the definitions."""
    if group.kind == "full":
        return range(boundary)
    if group.kind == "sliding":
        assert group.window is not None
        # The next token attends to itself and window - 1 before it.
        return range(max(0, boundary + 1 - group.window - group.extra_tokens), boundary)
    if group.kind == "chunked":
        assert group.chunk is not None
        start = boundary
        while start % group.chunk:
            start -= 1
        return range(start, boundary)
    assert group.kind == "recurrent"
    return range(boundary - 1, boundary)  # the state after the last token


def serves(group: CacheGroup, present: set[int], boundary: int, local: int) -> bool:
    if not group.cacheable or group.page_bytes == 0:
        return True
    blocks = {token // group.tokens_per_block for token in needed_tokens(group, boundary)}
    if group.draft:
        assert boundary % group.tokens_per_block == 0
        blocks.add(boundary // group.tokens_per_block)
    return all(i in present or (i + 1) * group.tokens_per_block <= local for i in blocks)


def brute_force(
    layout: CacheLayout,
    presence: Mapping[str, set[int]],
    num_tokens: int,
    local: int,
    ignore: Iterable[str] = (),
) -> int:
    skip = set(ignore)
    for boundary in range(num_tokens - 1, 0, -1):
        if any(boundary % g.tokens_per_block for g in layout.groups if g.cacheable):
            continue
        if all(
            serves(g, presence.get(g.name, set()), boundary, local)
            for g in layout.groups
            if g.name not in skip
        ):
            return boundary
    return 0


def random_group(rng: np.random.Generator, name: str) -> CacheGroup:
    kind = str(
        rng.choice(["full", "sliding", "chunked", "recurrent", "scratch"], p=[0.3, 0.35, 0.13, 0.17, 0.05])
    )
    attention = kind in ("full", "sliding", "chunked")
    return CacheGroup(
        name,
        kind=kind,  # type: ignore[arg-type]
        tokens_per_block=int(rng.choice(BLOCKS)),
        page_bytes=0 if rng.random() < 0.04 else int(rng.integers(1, 5000)),
        window=int(rng.integers(1, 20)) if kind == "sliding" else None,
        chunk=int(rng.integers(1, 25)) if kind == "chunked" else None,
        extra_tokens=int(rng.integers(0, 5)) if kind == "sliding" and rng.random() < 0.3 else 0,
        draft=bool(attention and rng.random() < 0.2),
        cacheable=bool(rng.random() > 0.04),
    )


def random_layout(rng: np.random.Generator) -> CacheLayout:
    while True:
        groups = [random_group(rng, f"g{i}") for i in range(int(rng.integers(1, 5)))]
        blocks = [g.tokens_per_block for g in groups if g.cacheable]
        if blocks:
            gcd = math.gcd(*blocks)
            units = [u for u in range(1, gcd + 1) if gcd % u == 0]
            return CacheLayout(groups, None if rng.random() < 0.5 else int(rng.choice(units)))


def random_presence(rng: np.random.Generator, layout: CacheLayout, num_tokens: int) -> dict[str, set[int]]:
    """Mostly whole prefixes with some holes: purely random sets would nearly always miss."""
    presence = {}
    for group in layout.groups:
        if rng.random() < 0.03:
            continue
        count = num_tokens // group.tokens_per_block + 2
        stop = count if rng.random() < 0.5 else int(rng.integers(0, count + 1))
        holes = float(rng.choice([0.0, 0.03, 0.15, 0.5]))
        blocks = {i for i in range(stop) if rng.random() >= holes}
        if group.kind != "full" and rng.random() < 0.3:  # only a tail was kept
            blocks = {i for i in blocks if i >= stop - int(rng.integers(1, 6))}
        presence[group.name] = blocks
    return presence


def as_given(rng: np.random.Generator, blocks: set[int]) -> set[int] | list[int] | np.ndarray:
    """The forms that a caller may pass."""
    form = rng.integers(3)
    if form == 0:
        return blocks
    if form == 1:
        return [*blocks, -1, 10_000]  # never wanted, never a fault
    mask = np.zeros(max(blocks, default=-1) + 1 + int(rng.integers(0, 3)), dtype=np.bool_)
    mask[list(blocks)] = True
    return mask


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng([20_261, seed])
    hits = limited = 0
    for case in range(CASES_PER_SEED):
        layout = random_layout(rng)
        num_tokens = int(rng.integers(0, 61))  # every alignment to every block
        presence = random_presence(rng, layout, num_tokens)
        local = 0 if rng.random() < 0.6 else int(rng.integers(0, num_tokens + 1))
        expected = brute_force(layout, presence, num_tokens, local)
        given = {name: as_given(rng, blocks) for name, blocks in presence.items()}
        hit = longest_hit(layout, given, num_tokens, local_tokens=local)
        told = f"seed {seed}, case {case}: {layout}, {presence}, N={num_tokens}, local={local}"
        assert hit.tokens == expected, told
        hits += expected > 0
        if case % 5 == 0:
            check_limit(layout, presence, num_tokens, local, hit.tokens, hit.limited_by, told)
            limited += hit.limited_by is not None
    assert hits > CASES_PER_SEED // 10, "too few hits to prove anything"
    assert limited > CASES_PER_SEED // 50


def check_limit(
    layout: CacheLayout,
    presence: Mapping[str, set[int]],
    num_tokens: int,
    local: int,
    tokens: int,
    limited_by: str | None,
    told: str,
) -> None:
    """No limit at the longest allowed boundary; else the group whose absence lengthens it most."""
    step = math.lcm(*(g.tokens_per_block for g in layout.groups if g.cacheable))
    longest = max(0, num_tokens - 1) // step * step
    if tokens == longest:
        assert limited_by is None, told
        return
    names = [g.name for g in layout.groups if g.cacheable]
    without = {n: brute_force(layout, presence, num_tokens, local, [n]) for n in names}
    assert limited_by in names, told
    if max(without.values()) > tokens:
        assert without[limited_by] == max(without.values()), told
    else:
        others = {n: brute_force(layout, presence, num_tokens, local, set(names) - {n}) for n in names}
        assert others[limited_by] == min(others.values()), told


@pytest.mark.parametrize("seed", range(2))
def test_ignored_groups_take_no_part(seed: int) -> None:
    rng = np.random.default_rng([77, seed])
    for _ in range(500):
        layout = random_layout(rng)
        num_tokens = int(rng.integers(1, 61))
        presence = random_presence(rng, layout, num_tokens)
        skip = [g.name for g in layout.groups if g.draft]
        hit = longest_hit(layout, presence, num_tokens, ignore=skip)
        assert hit.tokens == brute_force(layout, presence, num_tokens, 0, skip)
        assert hit.limited_by not in skip
