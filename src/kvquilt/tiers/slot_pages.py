"""`SlotPages`: a batch of pages as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SlotPages"]

IntArray = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True)
class SlotPages:
    """Pages of one slab: where they lie on the medium, what names them, and where in host memory.

    slots, groups, offsets: shape (n,); payload i starts at memory[offsets[i]]. keys: shape (n, 4).
    spans: shape (n, s, 4), the s hashes inside each block.
    """

    slots: IntArray
    groups: IntArray
    keys: NDArray[np.uint64]
    spans: NDArray[np.uint64]
    memory: Bytes
    offsets: IntArray

    def __len__(self) -> int:
        return self.slots.size

    def take(self, order: IntArray) -> SlotPages:
        """The pages at these places of the batch."""
        return SlotPages(
            self.slots[order],
            self.groups[order],
            self.keys[order],
            self.spans[order],
            self.memory,
            self.offsets[order],
        )

    def payload(self, place: int, size: int) -> memoryview:
        """A page's payload, where it lies."""
        start = int(self.offsets[place])
        return self.memory[start : start + size].data
