"""The prompts share what they should and nothing else."""

from __future__ import annotations

import pytest

from kvquilt.bench.workload import Workload, make_workload
from kvquilt.errors import ConfigError


@pytest.fixture(scope="module")
def work() -> Workload:
    return make_workload(requests=20, prompt_tokens=100, vocab_size=50, seed=3)


def test_prompts_have_the_length_and_the_vocabulary_asked_for(work: Workload) -> None:
    for prompt in (*work.prompts, *work.branches, *work.practice):
        assert len(prompt) == 100
        assert min(prompt) >= 3
        assert max(prompt) < 50


def test_branches_keep_two_thirds_and_differ_in_the_next_token(work: Workload) -> None:
    assert work.shared_tokens == 66
    for prompt, branch in zip(work.prompts, work.branches, strict=True):
        assert prompt[:66] == branch[:66]
        assert prompt[66] != branch[66]


def test_branches_differ_even_where_there_is_hardly_a_choice() -> None:
    work = make_workload(requests=50, prompt_tokens=30, vocab_size=6)
    assert all(p[20] != b[20] and 3 <= b[20] < 6 for p, b in zip(work.prompts, work.branches, strict=True))


def test_no_two_prompts_share_a_block(work: Workload) -> None:
    every = [*work.prompts, *work.practice]
    assert len({prompt[:16] for prompt in every}) == len(every)


def test_equal_arguments_give_equal_prompts_and_another_seed_others(work: Workload) -> None:
    assert make_workload(requests=20, prompt_tokens=100, vocab_size=50, seed=3) == work
    assert make_workload(requests=20, prompt_tokens=100, vocab_size=50, seed=4).prompts != work.prompts


def test_a_vocabulary_without_a_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size=5"):
        make_workload(requests=1, prompt_tokens=10, vocab_size=5)
