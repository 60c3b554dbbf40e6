"""Recurrent states: saved from the blocks that the engine hands over, never from a table position.

In the engine's "align" mode a block table of a recurrent group is no list of past states: inner
states are dropped, and blocks move. What holds the state after exactly so many tokens is known
only in the step that leaves it there, from the engine's hand-off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvquilt.config import Options
from kvquilt.layout import CacheLayout
from kvquilt.vllm.candidates import Candidate
from kvquilt.vllm.metrics import Meter
from kvquilt.vllm.pins import PinBook
from kvquilt.vllm.requests import RequestState

__all__ = ["HandedOver", "StateFilter"]

HandedOver = Sequence[tuple[int, int, int]]
"""(group, engine block, boundary): the block holds the state after exactly `boundary` tokens."""


class StateFilter:
    """Which of the states that the engine hands over are real, and worth saving.

    groups: indices of the recurrent groups concerned.
    """

    def __init__(self, layout: CacheLayout, groups: frozenset[int], options: Options, meter: Meter) -> None:
        self.groups = groups
        self._layout = layout
        self._options = options
        self._meter = meter

    def candidates(self, state: RequestState, handed_over: HandedOver, pins: PinBook) -> list[Candidate]:
        """The states to save. They have no second chance: later steps overwrite or free them."""
        out = []
        for index, block_id, boundary in handed_over:
            if index not in self.groups or not self._is_real(state, index, block_id, boundary, pins):
                continue
            if not self._is_wanted(state, boundary):
                self._meter.count("saves_skipped", 1, "not_worth")
                continue
            block = boundary // self._layout.groups[index].tokens_per_block - 1
            out.append(Candidate(state, index, np.array([block]), np.array([block_id]), 1))
        return out

    def _is_real(self, state: RequestState, index: int, block_id: int, boundary: int, pins: PinBook) -> bool:
        """Does what the engine says agree with itself: does the block bear the hash of that boundary?

        A block without a hash must not be referenced either: the engine would move it.
        """
        block, rest = divmod(boundary, self._layout.groups[index].tokens_per_block)
        if rest or block_id == 0 or not 0 < block <= state.chain.num_blocks(index):
            return False
        return pins.holds(block_id, state.chain.hash_at(boundary))

    def _is_wanted(self, state: RequestState, boundary: int) -> bool:
        """Can a later prompt resume there, and is it this request's own work?"""
        if boundary % self._layout.lattice_tokens or boundary <= state.computed_from or state.barred_tokens:
            return False
        request = state.request
        if boundary > request.num_prompt_tokens:
            return self._options.retain_generated
        ends = (*state.boundaries, request.shared_prefix_boundary)
        return self._options.retention == "dense" or boundary in ends
