"""Under "prompt_end": the window of a request's newest boundary, pinned while it is decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvquilt.layout import CacheLayout
from kvquilt.retention import checkpoint_range
from kvquilt.vllm.candidates import Candidate
from kvquilt.vllm.metrics import Meter
from kvquilt.vllm.pins import PinBook
from kvquilt.vllm.requests import RequestState

__all__ = ["BlockTables", "Checkpoints"]

BlockTables = Sequence[Sequence[int]]
_Pins = list[tuple[int, int, list[int]]]


class Checkpoints:
    """Moves the pins on as the request goes on, so that at its end the window can still be saved:
    by then the engine would have dropped some of its blocks.

    saved: groups whose blocks are saved by table position.
    """

    def __init__(self, layout: CacheLayout, saved: Sequence[int], meter: Meter) -> None:
        self._layout = layout
        self._windows = [i for i in saved if not layout.groups[i].dense]
        self._meter = meter
        self._overhang = 0

    def move(self, state: RequestState, written: int, table: BlockTables, pins: PinBook) -> None:
        """Pin the window of the newest lattice boundary instead of the one before, if it can be."""
        boundary = written // self._layout.lattice_tokens * self._layout.lattice_tokens
        if boundary <= max(state.checkpoint, *state.boundaries, 0):
            return
        window = self._window(state, boundary, table)
        if window is None:
            return
        overhang = self._overhang_of(window)
        others = self._overhang - self._overhang_of(state.checkpoint_pins)
        if others + overhang > pins.cap:
            self._meter.count("saves_skipped", sum(len(ids) for _, _, ids in window), "pin_cap")
            return
        pins.pin([i for _, _, block_ids in window for i in block_ids])
        self.drop(state, pins)  # only now: the old one is better than none
        self._overhang += overhang
        state.checkpoint, state.checkpoint_pins = boundary, window

    def drop(self, state: RequestState, pins: PinBook | None) -> None:
        """Return the pins on a request's newest window."""
        if state.checkpoint_pins and pins is not None:
            self._overhang -= self._overhang_of(state.checkpoint_pins)
            for _, _, block_ids in state.checkpoint_pins:
                pins.unpin(block_ids)
        state.checkpoint_pins = []
        state.checkpoint = 0

    @staticmethod
    def candidates(state: RequestState) -> list[Candidate]:
        """The pinned window, to be saved at the request's end."""
        out = []
        for group, first, block_ids in state.checkpoint_pins:
            hashed = max(0, min(len(block_ids), state.chain.num_blocks(group) - first))
            blocks = np.arange(first, first + hashed, dtype=np.int64)
            out.append(Candidate(state, group, blocks, np.asarray(block_ids[:hashed], np.int64), hashed))
        return [c for c in out if c.blocks.size]

    def _window(self, state: RequestState, boundary: int, table: BlockTables) -> _Pins | None:
        """(group, first block, engine blocks) of what the boundary needs; None if some of it is gone."""
        window: _Pins = []
        for index in self._windows:
            group = self._layout.groups[index]
            lo, hi = checkpoint_range(group, boundary)
            ids = list(table[index][lo:hi])
            if len(ids) < hi - lo or 0 in ids or lo * group.tokens_per_block < state.barred_tokens:
                return None
            window.append((index, lo, ids))
        return window

    def _overhang_of(self, window: _Pins) -> int:
        """Blocks that these pins can come to hold alone before they move on: those that slide out
        of the window within one lattice step."""
        lattice = self._layout.lattice_tokens
        return sum(
            min(len(ids), lattice // self._layout.groups[index].tokens_per_block + 1)
            for index, _, ids in window
        )
