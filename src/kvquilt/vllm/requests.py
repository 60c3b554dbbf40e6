"""What the scheduler side remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvquilt.layout import CacheLayout
from kvquilt.store import Chain, Found

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["NEVER", "RequestState"]

NEVER = 1 << 62
"""As `RequestState.barred_tokens`: nothing of this admission is saved."""


@dataclass
class RequestState:
    """Progress of one request.

    chain: its engine hashes so far. boundaries: where "prompt_end" keeps checkpoints.
    found, found_local: the remembered answer of the last look-up, for that local length.
    found_without: the drafter groups that this answer does without. behind_checked: the local length
    for which it was last asked whether less would be more.
    next_block: per group, the first block not yet considered for saving; retry: blocks that
    were considered and could not be saved yet. next_check: written tokens below which no group
    has a new block. checkpoint: the boundary whose window blocks are pinned while decoding,
    and those pins as (group, first block, block ids). no_fetch: a load of it failed.
    loaded_tokens: the whole prefix of that length came from the store, for this admission.
    scheduled: the engine has computed something of it in this admission; before that, what it
    counts as computed may still be on its way from another connector. barred_tokens: computed
    before a reset, or on top of what is, never to be saved. computed_from: where the engine began
    to compute in this admission; external_tokens: what a load of it brought. hollow: a load of
    this admission filled a drafter's blocks with zeros.
    """

    request: Request
    chain: Chain
    boundaries: tuple[int, ...]
    num_groups: int
    found: Found | None = None
    found_local: int = -1
    found_without: frozenset[str] = frozenset()
    behind_checked: int = -1
    no_fetch: bool = False
    loaded_tokens: int = 0
    next_block: list[int] = field(default_factory=list)
    retry: list[list[int]] = field(default_factory=list)
    next_check: int = 0
    scheduled: bool = False
    barred_tokens: int = 0
    computed_from: int = 0
    external_tokens: int = 0
    hollow: bool = False
    checkpoint: int = 0
    checkpoint_pins: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    @classmethod
    def of(cls, request: Request, layout: CacheLayout, boundaries: tuple[int, ...]) -> RequestState:
        return cls(request, Chain(layout), boundaries, len(layout.groups))

    def restart(self) -> None:
        """Look at every block again: the block tables are new (admission, resume)."""
        self.next_block = [0] * self.num_groups
        self.retry = [[] for _ in range(self.num_groups)]
        self.next_check = 0
        self.scheduled = False
        self.barred_tokens = 0
        self.computed_from = 0
        self.external_tokens = 0
        self.behind_checked = -1
        self.hollow = False

    def sync_hashes(self) -> None:
        """Append the hashes that the engine has computed since the last call."""
        hashes = self.request.block_hashes
        if len(hashes) > len(self.chain):
            self.chain.extend(hashes[len(self.chain) :])
