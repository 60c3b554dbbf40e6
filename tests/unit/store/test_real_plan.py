"""The store takes the plans that `plan_slots` makes, in both partitions."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.sizing import plan_slots
from kvquilt.store import Store
from unit.store.store_support import chain_of, full32_window16, save_all


@pytest.mark.parametrize("partition", ["solved", "shared_rows"])
def test_a_solved_plan_holds_the_tokens_it_promises(partition: Any) -> None:
    layout = full32_window16()
    plan = plan_slots(layout, budget_bytes=1 << 20, partition=partition)
    with Store(layout, plan, prefault=False) as store:
        assert sum(arena.size_bytes for arena in store.arenas) == plan.bytes_used
        blocks = plan.tokens // layout.lattice_tokens * layout.lattice_tokens // 16
        chain = chain_of(layout, "x" * blocks)
        assert save_all(store, chain).skipped_full == {}
        assert store.lookup("r", chain, blocks * 16 + 1).tokens == blocks * 16
        store.audit()
