"""What a drafter with small pages costs under both partitions, counted in a running store.

Shape of a reported case: the drafter's blocks are half as long as the target's, its page is 2/15 of
the row that all groups would share, and states are kept far apart.
"""

from __future__ import annotations

import pytest

from harness.connector_support import Quilt, full, tokens
from kvquilt.testing.sim_shapes import GroupShape

TARGET_BLOCK = 1664
DRAFT_BLOCK = TARGET_BLOCK // 2
ROW_BYTES = 15 * 4 * TARGET_BLOCK * 2
GROUPS = [
    full(TARGET_BLOCK, bytes_per_token=ROW_BYTES // TARGET_BLOCK),
    *[GroupShape("recurrent", TARGET_BLOCK, state_bytes=ROW_BYTES) for _ in range(3)],
    # The drafter's page is 2/15 of the row, for half as many tokens.
    full(DRAFT_BLOCK, bytes_per_token=ROW_BYTES * 2 // 15 // DRAFT_BLOCK),
]
PROMPT = 8 * TARGET_BLOCK
BUDGET = 24 << 20


def bytes_per_token(partition: str) -> float:
    """Bytes of the slots in use per token that can be resumed, with the store as full as it gets."""
    with Quilt(
        GROUPS,
        ram_bytes=BUDGET,
        group_partition=partition,
        num_blocks=200,
        max_num_batched_tokens=TARGET_BLOCK,
        max_model_len=2 * PROMPT,
        checkpoint_interval=PROMPT,
    ) as q:
        q.start()
        plan = q.side.plan
        assert plan.bytes_used <= BUDGET
        covered = 0
        for seed in range(plan.tokens // PROMPT):
            prompt = tokens(seed, PROMPT + 1)
            q.serve(prompt)
            q.forget()
            covered += q.serve(prompt).external_hit
            q.forget()
        assert covered >= plan.tokens // PROMPT * PROMPT
        stats = q.store.stats()
        assert all(group.pages for group in stats.groups)
        resident = sum(group.pages * plan.slot_bytes[group.name] for group in stats.groups)
        q.check_end()
        return resident / covered


def test_a_drafter_with_half_size_blocks_costs_half_as_much_with_slots_of_its_own() -> None:
    assert bytes_per_token("shared_rows") / bytes_per_token("solved") >= 1.8


def test_a_drafter_gets_twice_the_targets_slots() -> None:
    with Quilt(GROUPS, ram_bytes=BUDGET, num_blocks=200, max_model_len=2 * PROMPT) as q:
        slots = q.side.plan.slots
        assert slots["full.1"] == pytest.approx(2 * slots["full.0"], abs=1)
