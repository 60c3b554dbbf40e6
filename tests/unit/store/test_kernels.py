"""The index under load, and where its machine code is kept."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from kvquilt.store import kernels, warm_up
from kvquilt.store.index import new_slots


def test_the_index_does_not_degrade_under_deletions() -> None:
    """Insert and delete many times the capacity, with keys that share homes; every probe stays short."""
    rng = np.random.default_rng(0)
    slots = new_slots(300, 0, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    kernels.add_usable(slots, 0, 300)
    hashes = rng.integers(0, 1 << 63, (2000, 4), dtype=np.uint64)
    hashes[:, :2] = hashes[rng.integers(0, 400, 2000), :2]  # equal first words: equal tag and home
    live: set[int] = set()
    for _ in range(400):
        wanted = rng.choice(2000, 20, replace=False)
        out = np.empty(20, dtype=np.int64)
        kernels.reserve(slots, 0, hashes, 1, wanted, 0, out)
        kernels.commit(slots, out[out >= 0])
        live |= set(wanted[(out >= 0) | (out == kernels.PRESENT)].tolist())
        gone = rng.choice(sorted(live), min(len(live), 19), replace=False)
        kernels.withdraw(slots, 0, hashes, 1, gone, out)
        live -= set(gone.tolist())
        found = np.empty(2000, dtype=np.int64)
        assert kernels.probe(slots, 0, hashes, 1, 0, 2000, found) == len(live)
        assert set(np.flatnonzero(found >= 0).tolist()) == live
        assert np.count_nonzero(slots.table) == len(live)
    assert kernels.check_index(slots, 300) == 0


def test_a_tag_alone_is_no_match() -> None:
    slots = new_slots(4, 0, np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64))
    kernels.add_usable(slots, 0, 4)
    hashes = np.ones((3, 4), dtype=np.uint64)
    hashes[1, 2] = hashes[2, 3] = 7  # differ from the first in words that the position ignores
    out = np.empty(1, dtype=np.int64)
    kernels.reserve(slots, 0, hashes, 1, np.zeros(1, dtype=np.int64), 0, out)
    kernels.commit(slots, out)
    found = np.empty(3, dtype=np.int64)
    assert kernels.probe(slots, 0, hashes, 1, 0, 3, found) == 1
    assert found.tolist() == [out[0], -1, -1]
    assert kernels.probe(slots, 1, hashes, 1, 0, 3, found) == 0


def test_without_a_writable_place_kernels_are_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(**options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert kernels.njit(lambda x: x + 1)(1) == 2


def test_warm_up_leaves_no_kernel_to_compile() -> None:
    warm_up()
    # Helpers have no machine code of their own where their caller's came from disk.
    called = {name: f for name, f in vars(kernels).items() if isinstance(f, numba.core.dispatcher.Dispatcher)}
    public = {name: f for name, f in called.items() if not name.startswith("_")}
    assert len(public) > 12
    assert [name for name, f in public.items() if not f.signatures] == []
