"""`plan_slots` against a scan over all numbers of tokens, with the formula written out again."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from kvquilt.errors import SizingError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.sizing import SlotPlan, plan_slots

ALIGNMENT = 64  # small, so that rounding matters in small budgets


def density(group: CacheGroup, lattice: int, interval: int | None) -> Fraction:
    every = Fraction(1, group.tokens_per_block)
    if group.kind == "chunked" and worst_chunk(group, lattice) + int(group.draft) == 0:
        return Fraction(0)
    if interval is None or group.kind == "full":
        return every
    if group.kind == "recurrent":
        return min(every, Fraction(1, interval))
    if group.kind == "sliding":
        assert group.window is not None
        need = math.ceil((group.window - 1 + group.extra_tokens) / group.tokens_per_block)
        return min(every, Fraction(need + int(group.draft) + 1, interval))
    assert group.kind == "chunked"
    need = worst_chunk(group, lattice) + int(group.draft)
    return min(every, Fraction(need, interval))


def worst_chunk(group: CacheGroup, lattice: int) -> int:
    """Most blocks of the current chunk at any boundary; 0 if all boundaries are chunk starts."""
    assert group.chunk is not None
    worst = 0
    for end in range(lattice, math.lcm(group.chunk, lattice) + 1, lattice):
        tokens = range(end // group.chunk * group.chunk, end)
        worst = max(worst, len({t // group.tokens_per_block for t in tokens}))
    return worst


def least(group: CacheGroup, lattice: int, interval: int | None) -> int:
    """Blocks that one boundary needs."""
    if group.kind == "full":
        return lattice // group.tokens_per_block + int(group.draft)
    if group.kind == "recurrent":
        return 1
    if group.kind == "sliding":
        assert group.window is not None
        need = math.ceil((group.window - 1 + group.extra_tokens) / group.tokens_per_block)
        return need + int(group.draft)
    return max(1, worst_chunk(group, lattice) + int(group.draft))


def random_layout(rng: np.random.Generator) -> CacheLayout:
    groups = [CacheGroup("full", kind="full", tokens_per_block=int(rng.choice([2, 4, 6])), page_bytes=100)]
    for i in range(int(rng.integers(0, 4))):
        kind = str(rng.choice(["full", "sliding", "chunked", "recurrent", "scratch"]))
        groups.append(
            CacheGroup(
                f"g{i}",
                kind=kind,  # type: ignore[arg-type]
                tokens_per_block=int(rng.choice([1, 2, 3, 4])),
                page_bytes=int(rng.choice([0, 1, 64, 65, 100, 300])),
                window=int(rng.integers(1, 12)) if kind == "sliding" else None,
                chunk=int(rng.integers(1, 12)) if kind == "chunked" else None,
                extra_tokens=int(rng.integers(0, 4)) if kind == "sliding" else 0,
                draft=bool(kind in ("full", "sliding") and rng.random() < 0.3),
            )
        )
    return CacheLayout(groups)


class Case:
    """One random question, and its answer by the formula."""

    def __init__(self, rng: np.random.Generator, partition: str) -> None:
        self.layout = random_layout(rng)
        self.partition = partition
        self.ranks = int(rng.integers(1, 4))
        self.interval = None if rng.random() < 0.3 else int(rng.integers(1, 30))
        self.budget = int(rng.integers(1, 20_000))
        self.sizes = {
            g.name: math.ceil(g.page_bytes * self.ranks / ALIGNMENT) * ALIGNMENT if g.cacheable else 0
            for g in self.layout.groups
        }
        if partition == "shared_rows":
            row = max(self.sizes.values())
            self.sizes = {name: row if size else 0 for name, size in self.sizes.items()}

    def slots(self, tokens: int) -> dict[str, int]:
        out = {}
        for g in self.layout.groups:
            grown = (
                math.ceil(tokens * density(g, self.layout.lattice_tokens, self.interval))
                if self.sizes[g.name]
                else 0
            )
            floor = least(g, self.layout.lattice_tokens, self.interval) if self.sizes[g.name] else 0
            out[g.name] = max(floor, grown)
        return out

    def cost(self, tokens: int) -> int:
        return sum(n * self.sizes[name] for name, n in self.slots(tokens).items())

    def plan(self) -> SlotPlan:
        return plan_slots(
            self.layout,
            self.budget,
            self.interval,
            num_ranks=self.ranks,
            partition=self.partition,  # type: ignore[arg-type]
            slot_alignment=ALIGNMENT,
        )


@pytest.mark.parametrize("partition", ["solved", "shared_rows"])
def test_equals_scan(partition: str) -> None:
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(600):
        case = Case(rng, partition)
        if case.cost(0) > case.budget:
            refused += 1
            with pytest.raises(SizingError, match=rf"least budget that works is {case.cost(0)} bytes"):
                case.plan()
            case.budget = case.cost(0)  # and that budget works
        tokens = 0
        while case.cost(tokens + 1) <= case.budget:
            tokens += 1
        got = case.plan()
        expected = (tokens, case.slots(tokens), case.sizes, case.cost(tokens))
        assert (got.tokens, got.slots, got.slot_bytes, got.bytes_used) == expected
        left = case.budget - got.bytes_used
        assert 0 <= left < sum(case.sizes.values()), "what is left over could have covered more tokens"
    assert 0 < refused < 300
