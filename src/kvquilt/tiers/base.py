"""What a tier is: a place below host RAM that keeps pages, in bulk and in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvquilt.store import Chain

__all__ = ["DropReason", "GroupTierStats", "Loaded", "Pages", "Tier", "TierStats"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
DropReason = Literal["queue", "full", "off", "error"]


@dataclass(frozen=True, eq=False, slots=True)
class Pages:
    """Pages of one group in host memory: the slot of blocks[i] starts at memory[offsets[i]].

    All ranks' pages lie in it, one after another; its length is the tier's affair, which has the
    same slots. memory: aligned to 4 KiB, as are the offsets. Whoever hands it over keeps it alive, and
    its bytes unchanged (to save) or unread (to load), until it is told of the end.
    """

    chain: Chain
    group: int
    blocks: IntArray
    memory: memoryview
    offsets: IntArray


Loaded = Callable[[Sequence[BoolArray]], None]
"""Called once when a load has ended: for each `Pages`, which blocks hold what was saved."""


class GroupTierStats(msgspec.Struct, frozen=True):
    """One group's use of a tier.

    pages, bytes_used: levels. The rest counts since the start: pages and payload bytes read and
    written, pages not written by reason, pages that failed their check, pages evicted.
    """

    name: str
    slots: int
    pages: int
    bytes_used: int
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    dropped: dict[str, int]
    bad: int
    evictions: int


class TierStats(msgspec.Struct, frozen=True):
    """state: "starting", "on" or "off"; why: for "off". queued_*: pages waiting or under way."""

    name: str
    state: str
    why: str
    groups: list[GroupTierStats]
    queued_reads: int
    queued_writes: int


class Tier(Protocol):
    """Keeps pages by the engine's hashes. Every call returns at once; what takes time is told later,
    from a thread of the tier's. No call raises for what the tier's medium does: a page that can't be
    kept is dropped and counted, one that can't be had or proven good is a miss.

    `kvquilt.testing.tier_contract` holds the tests that every tier passes.
    """

    name: str

    def present(self, chain: Chain, group: int, first: int, last: int) -> BoolArray:
        """For each of blocks first..last-1: could it be loaded?"""

    def save(self, pages: Sequence[Pages], done: Callable[[], None]) -> int:
        """Keep these pages; how many are accepted. Those that are here already need not be.

        done: called once when the memory is no longer read, maybe before this returns.
        """

    def room_bytes(self) -> int:
        """Bytes of pages that `save` would not refuse now for a full queue; 0 while nothing is kept."""

    def load(self, pages: Sequence[Pages], done: Loaded) -> None:
        """Fill this memory. done: called once when it is no longer written, maybe before this returns."""

    def touch(self, chain: Chain, tokens: int) -> None:
        """Make the pages of the last boundary within `tokens` the newest, tail before head."""

    def withdraw(self, chain: Chain, group: int, blocks: IntArray) -> int:
        """Forget these pages, for good; how many were there."""

    def reset(self) -> bool:
        """Forget all pages. True if they stay forgotten, whatever happens to this process next."""

    def stats(self) -> TierStats:
        """Counters and levels per group."""

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or under way; False if that took too long."""

    def close(self) -> None:
        """End what is under way and drop the rest; every `done` has been called when it returns. Twice is
        harmless."""
