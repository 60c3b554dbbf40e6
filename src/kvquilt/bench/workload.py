"""The prompts: random tokens, and branches that keep the first two thirds of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import ConfigError

__all__ = ["PRACTICE_PROMPTS", "Prompt", "Workload", "make_workload", "shared_tokens"]

PRACTICE_PROMPTS = 2
"""Prompts that warm an engine up."""
# Ids below are padding, end and begin in most vocabularies.
_FIRST_TOKEN = 3
_PROMPTS, _BRANCHES, _PRACTICE, _SECOND = range(4)
Prompt = tuple[int, ...]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """prompts: no two share a block. branches: branch i equals prompt i in its first
    `shared_tokens` tokens and differs in the next one. second_branches: so do these, from prompts
    and branches alike. practice: prompts of the same length that warm an engine up."""

    prompts: tuple[Prompt, ...]
    branches: tuple[Prompt, ...]
    second_branches: tuple[Prompt, ...]
    practice: tuple[Prompt, ...]
    shared_tokens: int


def shared_tokens(prompt_tokens: int) -> int:
    """Tokens that a branch keeps: the first two thirds, rounded down."""
    return prompt_tokens * 2 // 3


def make_workload(
    *, requests: int, prompt_tokens: int, vocab_size: int, seed: int = 0, practice: int = PRACTICE_PROMPTS
) -> Workload:
    """Prompts of `prompt_tokens` random ids each; the same arguments give the same prompts.

    Raises ConfigError for a vocabulary in which no two tokens differ.

    >>> work = make_workload(requests=2, prompt_tokens=9, vocab_size=100)
    >>> work.shared_tokens, work.prompts[1][:6] == work.branches[1][:6], work.prompts[1] == work.branches[1]
    (6, True, False)
    """
    if vocab_size < _FIRST_TOKEN + 3:
        raise ConfigError(f"vocab_size={vocab_size}: too small for prompts that differ")
    kept = shared_tokens(prompt_tokens)
    prompts = _draw(requests, prompt_tokens, vocab_size, (seed, _PROMPTS))
    branches = _draw(requests, prompt_tokens, vocab_size, (seed, _BRANCHES))
    branches[:, :kept] = prompts[:, :kept]
    same = branches[:, kept] == prompts[:, kept]
    span = vocab_size - _FIRST_TOKEN
    branches[same, kept] = (prompts[same, kept] - _FIRST_TOKEN + 1) % span + _FIRST_TOKEN
    second = _draw(requests, prompt_tokens, vocab_size, (seed, _SECOND))
    second[:, :kept] = prompts[:, :kept]
    one_on = (prompts[:, kept] - _FIRST_TOKEN + 1) % span + _FIRST_TOKEN
    two_on = (prompts[:, kept] - _FIRST_TOKEN + 2) % span + _FIRST_TOKEN
    second[:, kept] = np.where(branches[:, kept] == one_on, two_on, one_on)
    warming = _draw(practice, prompt_tokens, vocab_size, (seed, _PRACTICE))
    return Workload(_rows(prompts), _rows(branches), _rows(second), _rows(warming), kept)


def _rows(table: Tokens) -> tuple[Prompt, ...]:
    return tuple(map(tuple, table.tolist()))


def _draw(count: int, tokens: int, vocab_size: int, seed: tuple[int, int]) -> Tokens:
    generator = np.random.default_rng(seed)
    return generator.integers(_FIRST_TOKEN, vocab_size, size=(count, tokens), dtype=np.int64)
