"""`SlotPages`: a batch of pages as arrays, and the copies between their places and whole slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.store.kernels import njit

__all__ = ["SlotPages", "warm_up"]

IntArray = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]


@dataclass(frozen=True, eq=False, slots=True)
class SlotPages:
    """Pages of one slab: where they lie on the medium, what names them, and where in host memory.

    slots, groups, offsets: shape (n,); payload i starts at memory[offsets[i]], a multiple
    of 8. keys: shape (n, 4).
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

    def put_payloads(self, first: int, slots: Bytes, header_bytes: int) -> None:
        """Copy the payloads of pages first, first + 1, ... into `slots`, shape (m, slot bytes)."""
        offsets = self.offsets[first : first + len(slots)]
        _gather(self.memory.view(np.uint64), offsets // 8, slots.view(np.uint64), header_bytes // 8)

    def take_payloads(self, first: int, slots: Bytes, header_bytes: int, which: NDArray[np.bool_]) -> None:
        """Copy those payloads of `slots` that are among `which`, shape (m,), to their places."""
        offsets = self.offsets[first : first + len(slots)][which]
        rows = np.flatnonzero(which)
        _scatter(slots.view(np.uint64), rows, header_bytes // 8, self.memory.view(np.uint64), offsets // 8)


@njit
def _gather(memory: Words, offsets: IntArray, slots: Words, header: int) -> None:
    size = slots.shape[1] - header
    for i in range(slots.shape[0]):
        slots[i, header:] = memory[offsets[i] : offsets[i] + size]


@njit
def _scatter(slots: Words, rows: IntArray, header: int, memory: Words, offsets: IntArray) -> None:
    size = slots.shape[1] - header
    for i in range(rows.shape[0]):
        memory[offsets[i] : offsets[i] + size] = slots[rows[i], header:]


def warm_up() -> None:
    """Compile both copies before the first pages need them."""
    memory, slots = np.zeros(2, dtype=np.uint64), np.zeros((1, 2), dtype=np.uint64)
    first = np.zeros(1, dtype=np.int64)
    _gather(memory, first, slots, 1)
    _scatter(slots, first, 1, memory, first)
