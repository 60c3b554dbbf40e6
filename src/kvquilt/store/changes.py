"""What became visible in the store and what went, in order, for those who mirror its index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.store import kernels
from kvquilt.store.chain import Chain
from kvquilt.store.kernels import Slots
from kvquilt.store.leases import Reserved

__all__ = ["Change", "ChangeLog"]

IntArray = NDArray[np.int64]
Keys = NDArray[np.uint64]


@dataclass(frozen=True, eq=False, slots=True)
class Change:
    """Pages of one group that became visible, or that can no longer be found.

    keys: shape (n, 4), as in `Chain.keys`. chain, blocks: of pages that became visible, where they
    come from; None for pages that went.
    """

    group: int
    keys: Keys
    chain: Chain | None = None
    blocks: IntArray | None = None

    @property
    def stored(self) -> bool:
        """True if the pages became visible."""
        return self.chain is not None


class ChangeLog:
    """Changes since the last `take`, oldest first. Guarded by the store's lock.

    Keys are copied at once: a slot that was freed may hold another page at the next call.
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def committing(self, part: Reserved) -> None:
        """A ticket's pages are about to become visible; detached ones will not."""
        visible = part.view.slots.state[part.slots] == kernels.TICKETED
        slots = part.slots[visible]
        if slots.size:
            keys = part.view.slots.keys[slots]
            self._changes.append(Change(part.view.index, keys, part.chain, part.blocks[visible]))

    def removed(self, slots: Slots, which: IntArray) -> None:
        """These slots' pages have gone; nothing has been written to the slots since."""
        groups = slots.group[which]
        for group in np.unique(groups):
            self._changes.append(Change(int(group), slots.keys[which[groups == group]]))

    def resetting(self, slots: Slots, usable: int) -> None:
        """All pages of an arena are about to go."""
        self.removed(slots, np.flatnonzero(slots.state[:usable] == kernels.RESIDENT))

    def take(self) -> list[Change]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes
