"""Recurrent states beside drafted tokens, as the engine's workers treat them in "align" mode.

A request's running state lies in one column of its block table, and as many columns behind it as
tokens may be drafted hold the states after each draft. Which of those counts is known once the drafts
have been verified: then the state at a block's end, if one was passed, is copied to where the
scheduler's hash says it is, and the next step goes on from the state after the last accepted token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvquilt.testing.sim_shapes import GroupShape

__all__ = ["Running", "StateStep", "plan_states"]

Running = tuple[int, int]
"""(column of the running state, columns behind it where the state after the last token lies)."""


@dataclass(frozen=True)
class StateStep:
    """What one step does with one request's states in one group; columns of its block table.

    before: (from, to) copied before the forward pass; read: where it finds the state so far, None at
    the first token. first, positions: columns first, first + 1, ... get the states after these tokens.
    after: (from, to) copied once the drafts have been verified.
    """

    before: Running | None
    read: int | None
    first: int
    positions: range
    after: Running | None

    def columns(self) -> Iterable[tuple[int, bool]]:
        """(column, written?) of all that the step touches."""
        for copied in filter(None, (self.before, self.after)):
            yield copied[0], False
            yield copied[1], True
        if self.read is not None:
            yield self.read, False
        for number in range(len(self.positions)):
            yield self.first + number, True


def plan_states(
    shape: GroupShape, running: Running | None, start: int, count: int, num_drafts: int, num_accepted: int
) -> tuple[StateStep, Running]:
    """The step that computes `count` tokens from `start`, the last `num_drafts` of them drafts.

    running: what the step before returned; None for a request that is new here, or was resumed.
    num_accepted: drafts that turn out to be right. Returns the step and where the state is then.
    """
    block = shape.tokens_per_block
    column, ahead = running if running is not None else ((start - 1) // block, 0)
    first = -(-(start + count) // block) - 1
    before = None
    if start and column != first:
        before, ahead = (column + ahead, first), 0
    computed = start + count - num_drafts
    # Only the passed boundary can be resumed from; it lies at most `num_accepted` tokens back.
    boundary = (computed + num_accepted) // block * block
    after = None
    ahead_next = num_accepted
    if boundary >= computed:
        source, target = first + boundary - computed, boundary // block - 1
        if source != target:
            after = (source, target)
        if target == first:
            ahead_next = 0
    step = StateStep(
        before,
        first + ahead if start else None,
        first,
        range(computed - 1, start + count),
        after,
    )
    return step, (first, ahead_next)
