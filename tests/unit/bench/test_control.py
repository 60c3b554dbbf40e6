"""The control zeroes one group and leaves the others to the real copier."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvquilt.bench.control import ZeroingCopier
from kvquilt.transfer import PageCopies


class Copier:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, Any, Any]] = []

    def load(self, job_id: int, copies: Any, zero: Any = None) -> None:
        self.loads.append((job_id, copies, zero))

    def pending(self) -> int:
        return 42


def copies(*rows: tuple[int, int, int]) -> PageCopies:
    return PageCopies(*np.asarray(rows, dtype=np.int64).reshape(-1, 3).T)


def rows(pages: PageCopies) -> list[tuple[int, ...]]:
    return list(zip(pages.group.tolist(), pages.block.tolist(), pages.slot.tolist(), strict=True))


def test_pages_of_the_group_are_zeroed_and_the_others_loaded() -> None:
    inner = Copier()
    copier = ZeroingCopier(inner, group=1)
    copier.load(7, copies((0, 5, 1), (1, 6, 2), (2, 7, 3), (1, 8, 4)))
    [(job_id, loaded, zero)] = inner.loads
    assert job_id == 7
    assert rows(loaded) == [(0, 5, 1), (2, 7, 3)]
    assert rows(zero) == [(1, 6, 2), (1, 8, 4)]
    assert copier.zeroed == 2


def test_pages_that_are_zeroed_anyway_stay_so() -> None:
    inner = Copier()
    ZeroingCopier(inner, group=0).load(1, copies((0, 5, 1)), copies((2, 9, 0)))
    assert rows(inner.loads[0][1]) == []
    assert rows(inner.loads[0][2]) == [(0, 5, 1), (2, 9, 0)]


def test_loads_without_the_group_and_all_other_calls_go_through() -> None:
    inner = Copier()
    copier = ZeroingCopier(inner, group=3)
    copier.load(1, copies((0, 5, 1)))
    assert rows(inner.loads[0][1]) == [(0, 5, 1)]
    assert inner.loads[0][2] is None
    assert copier.pending() == 42
