"""`SlotPages`: a batch of pages as arrays, and the copy from whole slots to their places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.compiled import memcpy, njit

__all__ = ["SlotPages", "warm_up"]

IntArray = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True)
class SlotPages:
    """Pages of one slab: where they lie on the medium, what names them, and where in host memory. Whoever
    makes it checks that they lie in it: the copy looks at nothing.

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

    def take_payloads(self, first: int, slots: Bytes, header_bytes: int, which: NDArray[np.bool_]) -> None:
        """Copy those payloads of `slots` that are among `which`, shape (m,), to their places."""
        _scatter(slots, which, header_bytes, self.memory, self.offsets[first : first + len(slots)])


@njit
def _scatter(slots: Bytes, which: NDArray[np.bool_], header: int, memory: Bytes, offsets: IntArray) -> None:
    size = slots.shape[1] - header
    for i in range(slots.shape[0]):
        if which[i]:
            memcpy(memory.ctypes.data + offsets[i], slots.ctypes.data + i * slots.shape[1] + header, size)


def warm_up() -> None:
    """Compile the copy before the first pages need it."""
    memory, slots = np.zeros(16, dtype=np.uint8), np.zeros((1, 16), dtype=np.uint8)
    first = np.zeros(1, dtype=np.int64)
    _scatter(slots, np.ones(1, dtype=np.bool_), 8, memory, first)
