"""What a run must reach, by hand and by a model that counts block by block."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.bench.config import BenchConfig, make_config
from kvquilt.bench.expect import default_ram_bytes, expect, holds, kept_pages, working_set
from kvquilt.errors import ConfigError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.sizing import SlotPlan, plan_slots

FULL = CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=8192)
WINDOW = CacheGroup("win", kind="sliding", tokens_per_block=64, window=64, page_bytes=4096)
LAYOUT = CacheLayout([WINDOW, FULL])


def plan(layout: CacheLayout, config: BenchConfig, budget: int) -> SlotPlan:
    options = config.parsed(budget)
    return plan_slots(layout, budget, options.planned_checkpoint_interval, partition=options.group_partition)


def expectation(layout: CacheLayout, budget: int | None = None, **values: Any) -> Any:
    config = make_config(**values)
    budget = default_ram_bytes(layout, config) if budget is None else budget
    return expect(layout, config, plan(layout, config, budget), config.parsed(budget))


def test_the_defaults_hit_every_whole_lattice_block() -> None:
    found = expectation(LAYOUT)
    # 2,000 tokens: 31 lattice blocks of 64; 1,333 shared tokens: 20.
    assert found.best_warm == found.warm == 200 * 1984
    assert found.best_branch == found.branch == 200 * 1280
    assert found.holds_warm
    assert found.holds_branch


def test_one_token_is_always_left_to_compute() -> None:
    assert expectation(LAYOUT, requests=1, prompt_tokens=128).best_warm == 64
    assert expectation(LAYOUT, requests=1, prompt_tokens=129).best_warm == 128


def test_prompt_end_hits_as_much_warm_and_nothing_in_the_middle() -> None:
    found = expectation(LAYOUT, retention="prompt_end")
    assert found.warm == found.best_warm == 200 * 1984
    assert found.branch == 0
    assert found.best_branch == 200 * 1280
    only_full = expectation(CacheLayout([FULL]), retention="prompt_end")
    assert only_full.branch == only_full.best_branch > 0


def test_prompts_too_short_for_any_hit_are_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens=64"):
        expectation(LAYOUT, requests=1, prompt_tokens=64, budget=1 << 30)


def test_kept_pages_by_hand() -> None:
    config = make_config(requests=1, prompt_tokens=200, output_tokens=70)
    dense = kept_pages(LAYOUT, config, config.parsed(1 << 30))
    # 269 tokens are written: 8 whole blocks of 32, 4 of 64.
    assert {name: mask.sum() for name, mask in dense.items()} == {"full": 8, "win": 4}
    config = make_config(requests=1, prompt_tokens=200, output_tokens=70, retention="prompt_end")
    sparse = kept_pages(LAYOUT, config, config.parsed(1 << 30))
    # Boundaries 192 and 128 of the prompt, 256 at the end of generation; each needs one block.
    assert sparse["win"].tolist() == [False, True, True, True]
    assert sparse["full"].all()


def test_branches_add_only_what_they_do_not_share() -> None:
    config = make_config(requests=10, prompt_tokens=192, output_tokens=1)
    alone = working_set(LAYOUT, config, config.parsed(1 << 30), branches=False)
    both = working_set(LAYOUT, config, config.parsed(1 << 30), branches=True)
    # 192 tokens are written: 6 and 3 blocks; 128 are shared: 4 and 2 blocks.
    assert alone == {"full": 60, "win": 30}
    assert both == {"full": 80, "win": 40}


@pytest.mark.parametrize("retention", ["dense", "prompt_end"])
@pytest.mark.parametrize("partition", ["solved", "shared_rows"])
def test_the_default_budget_is_the_least_that_holds_the_working_set(retention: str, partition: str) -> None:
    config = make_config(requests=7, prompt_tokens=300, retention=retention, group_partition=partition)
    budget = default_ram_bytes(LAYOUT, config)
    pages = working_set(LAYOUT, config, config.parsed(budget), branches=True)
    assert holds(plan(LAYOUT, config, budget), pages)
    assert not holds(plan(LAYOUT, config, budget - 1), pages)


def test_half_of_the_working_set_promises_no_hits() -> None:
    config = make_config(requests=50)
    found = expectation(LAYOUT, requests=50, budget=default_ram_bytes(LAYOUT, config) // 2)
    assert not found.holds_warm
    assert not found.holds_branch


STATE = CacheGroup("state", kind="recurrent", tokens_per_block=128, page_bytes=4096)
HYBRID = CacheLayout([STATE, CacheGroup("full", kind="full", tokens_per_block=128, page_bytes=8192)])


def test_states_are_kept_at_prompt_ends_and_at_forks_only() -> None:
    found = expectation(HYBRID, requests=3, prompt_tokens=780, output_tokens=4)
    # 780 tokens: 6 blocks; 520 shared: 4.
    assert found.warm == found.best_warm == 3 * 768
    assert (found.branch, found.best_branch, found.second_branch) == (0, 3 * 512, 3 * 512)
    assert found.pages == {"state": 3 * 2, "full": 3 * (6 + 4)}
    config = make_config(requests=3, prompt_tokens=780, output_tokens=4)
    pages = working_set(HYBRID, config, config.parsed(1 << 30), branches=True)
    # A state for each prompt, each branch, each second branch, and one at the fork.
    assert pages == {"state": 3 * 4, "full": 3 * (6 + 2 + 2)}


def test_a_second_branch_is_for_states_only() -> None:
    assert expectation(LAYOUT, requests=3).second_branch is None


def test_pages_to_compare_are_those_of_the_hits_that_the_memory_holds() -> None:
    found = expectation(LAYOUT, requests=10)
    # Boundaries 1,984 and 1,280: all blocks of the full group, and the last of the window.
    assert found.pages == {"full": 10 * (62 + 40), "win": 10 * 2}
    config = make_config(requests=10)
    half = expectation(LAYOUT, requests=10, budget=default_ram_bytes(LAYOUT, config) // 2)
    assert half.pages == {"full": 0, "win": 0}
