"""A simulated model: KV memory laid out as in the engine, and a forward pass that checks it.

Instead of attention, the forward pass writes a fingerprint of each computed token and compares
every entry that attention would read with the fingerprint that must be there. Wrong, stale, missing
or misplaced KV is thus an error at once, with its request, group and block, also where a real
model's output would not have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvquilt.testing.sim_fingerprint import (
    POISON,
    TokenHashes,
    fingerprints,
    layer_constants,
    next_token,
)
from kvquilt.testing.sim_shapes import GroupShape, HarnessError

if TYPE_CHECKING:
    import torch

__all__ = ["SimMemory", "SimModel", "SimRequest", "StrayWrite", "WrongKV"]


class WrongKV(HarnessError):
    """Attention would have read KV that is not the request's own."""


class StrayWrite(HarnessError):
    """Something wrote to a block that nobody holds, or to the null block."""


@dataclass(frozen=True)
class SimLayer:
    """One layer's pages in the shared allocation.

    words: view of shape (num_blocks, entries of a block, words of an entry): an entry is a token's
    KV, or the one state of a recurrent block.
    tensor: the engine's view of the same bytes, shape (num_blocks, 1, entries, width).
    """

    name: str
    group: int
    words: NDArray[np.uint64]
    tensor: torch.Tensor
    constants: NDArray[np.uint64]


class SimMemory:
    """The KV memory of one rank: one allocation that all groups share, as the engine lays it out.

    config: the engine's KVCacheConfig, with its `kv_cache_tensors` filled in.
    """

    def __init__(self, config: Any, shapes: Sequence[GroupShape], rank: int) -> None:
        import torch
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        self.rank = rank
        self.num_blocks: int = config.num_blocks
        size = max(tensor.size for tensor in config.kv_cache_tensors)
        self._raw = torch.full((size // 8,), int(POISON.astype(np.int64)), dtype=torch.int64)
        raw_words = self._raw.numpy().view(np.uint64)
        placement = {layer: place for place in config.kv_cache_tensors for layer in place.layers}
        self.layers: list[SimLayer] = []
        for index, (shape, group) in enumerate(zip(shapes, config.kv_cache_groups, strict=True)):
            place = placement[group.layer_names[0]]
            views = create_kv_cache_views(
                self._raw.view(torch.int8),
                group.kv_cache_spec,
                self.num_blocks,
                KVCacheLayout[config.kv_cache_layout],
                place,
            )
            width = shape.entry_bytes // 8
            for number, (name, tensor) in enumerate(zip(place.layers, views, strict=True)):
                words = np.lib.stride_tricks.as_strided(
                    raw_words[(place.offset + number * place.layer_stride) // 8 :],
                    shape=(self.num_blocks, shape.page_bytes // shape.entry_bytes, width),
                    strides=(place.block_stride, shape.entry_bytes, 8),
                )
                constants = layer_constants(index, number, rank, width)
                self.layers.append(SimLayer(name, index, words, tensor, constants))
        # Blocks that nobody holds and whose contents nobody may read; the null block always is one.
        self._idle = np.zeros(self.num_blocks, dtype=bool)
        self._idle[0] = True

    @property
    def kv_caches(self) -> dict[str, torch.Tensor]:
        """What `register_kv_caches` takes: one tensor per layer, all over one storage."""
        return {layer.name: layer.tensor for layer in self.layers}

    def recycle(self, fresh: Iterable[int], freed: Iterable[int]) -> None:
        """Poison blocks that were handed out (`fresh`) or given back without a hash (`freed`).

        Raises StrayWrite if a block was written while nobody held it.
        """
        fresh_ids = np.fromiter(fresh, dtype=np.int64)
        freed_ids = np.fromiter(freed, dtype=np.int64)
        self.check_idle(fresh_ids[self._idle[fresh_ids]])
        changed = np.concatenate([fresh_ids, freed_ids])
        for layer in self.layers:
            layer.words[changed] = POISON
        self._idle[fresh_ids] = False
        self._idle[freed_ids] = True

    def prepare(self, zero: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """What the scheduler wants done before a forward pass: blocks zeroed, then (from, to) copied."""
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        for layer in self.layers:
            layer.words[list(zero)] = 0
        for layer in self.layers:
            layer.words[targets] = layer.words[sources]

    def check_idle(self, blocks: NDArray[np.int64] | None = None) -> None:
        """Raise StrayWrite if an idle block (one of `blocks`, or any) or the null block was written."""
        ids = np.flatnonzero(self._idle) if blocks is None else np.append(blocks, 0)
        for layer in self.layers:
            touched = (layer.words[ids] != POISON).any(axis=(1, 2))
            if touched.any():
                block = int(ids[touched][0])
                what = "the null block" if block == 0 else f"block {block}, which nobody holds,"
                raise StrayWrite(
                    f"rank {self.rank}: {what} was written (group {layer.group}, layer {layer.name})"
                )


@dataclass
class SimRequest:
    """What the worker knows of a request: its tokens and its block table, one list per group."""

    id: str
    hashes: TokenHashes
    num_prompt_tokens: int
    tables: tuple[list[int], ...]


@dataclass(frozen=True)
class _Work:
    """One request's share of a step: positions [start, stop) are computed."""

    request: SimRequest
    start: int
    stop: int
    # Running hashes, one longer than the tokens when the next token is already decided.
    hashes: NDArray[np.uint64]


class SimModel:
    """The forward pass over one rank's memory, and the worker's own record of its requests."""

    def __init__(self, memory: SimMemory, shapes: Sequence[GroupShape], vocab_size: int) -> None:
        self.memory = memory
        self.shapes = tuple(shapes)
        self.vocab_size = vocab_size
        self.requests: dict[str, SimRequest] = {}
        self._work: list[_Work] = []

    def plan(self, scheduled: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
        """Take up a step: request -> (computed tokens, tokens to compute). Returns what is sampled.

        A request that still has known tokens after this step samples nothing.
        """
        self._work = []
        sampled: dict[str, list[int]] = {}
        for request_id, (start, count) in scheduled.items():
            request = self.requests[request_id]
            stop = start + count
            if stop > len(request.hashes):
                known = len(request.hashes)
                raise HarnessError(f"request {request_id}: asked to compute {stop} tokens, {known} are known")
            sampled[request_id] = []
            if stop == len(request.hashes):
                token = next_token(request.hashes.values[-1], self.vocab_size)
                request.hashes.extend([token])
                sampled[request_id] = [token]
            self._work.append(_Work(request, start, stop, request.hashes.values))
        return sampled

    def forward(self, layer: SimLayer) -> None:
        """Compute one layer: write the new entries of all requests, then read as attention does.

        All write before any reads, as in the engine: a request may hit blocks that another request
        fills in the same step. A state is read before, as in the engine. Raises WrongKV.
        """
        if self.shapes[layer.group].kind == "recurrent":
            self._forward_states(layer)
            return
        for work in self._work:
            positions = np.arange(work.start, work.stop)
            blocks, offsets = self._locate(layer, work, positions)
            layer.words[blocks, offsets] = self._entries(layer, work, positions)
        for work in self._work:
            positions = np.arange(self.shapes[layer.group].first_read(work.start), work.stop)
            self._read(layer, work, positions)

    def _forward_states(self, layer: SimLayer) -> None:
        """The state after the last computed token is read; the one after the last new token is kept."""
        for work in self._work:
            if work.start:
                self._read(layer, work, np.asarray([work.start - 1]))
        for work in self._work:
            last = np.asarray([work.stop - 1])
            blocks, _ = self._locate(layer, work, last)
            layer.words[blocks, 0] = self._entries(layer, work, last)

    def _read(self, layer: SimLayer, work: _Work, positions: NDArray[np.int64]) -> None:
        blocks, offsets = self._locate(layer, work, positions)
        read = layer.words[blocks, offsets]
        wrong = (read != self._entries(layer, work, positions)).any(axis=1)
        if self.shapes[layer.group].draft:
            # The target model verifies every draft, so a connector may leave zeros there.
            wrong &= read.any(axis=1)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            what = "never written" if (read[at] == POISON).any() else "another token's"
            raise self._wrong(layer, work, int(positions[at]), int(blocks[at]), what)

    def _entries(self, layer: SimLayer, work: _Work, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        # A draft layer's entry also depends on the token after it: that is why a hit in such a
        # group needs the block that starts at the boundary.
        ahead = int(self.shapes[layer.group].draft)
        return fingerprints(work.hashes[positions + ahead], layer.constants)

    def _locate(
        self, layer: SimLayer, work: _Work, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Block id and offset of each position; WrongKV where the table has no block or the null block."""
        tokens_per_block = self.shapes[layer.group].tokens_per_block
        table = np.asarray(work.request.tables[layer.group], dtype=np.int64)
        index = positions // tokens_per_block
        missing = index >= len(table)
        if missing.any():
            raise self._wrong(layer, work, int(positions[missing][0]), -1, "outside its block table")
        blocks = table[index]
        null = blocks == 0
        if null.any():
            raise self._wrong(layer, work, int(positions[null][0]), 0, "in the null block")
        if self.shapes[layer.group].kind == "recurrent":
            return blocks, np.zeros_like(positions)
        return blocks, positions % tokens_per_block

    def _wrong(self, layer: SimLayer, work: _Work, position: int, block: int, what: str) -> WrongKV:
        shape = self.shapes[layer.group]
        return WrongKV(
            f"request {work.request.id}: KV of token {position} is {what}: group {layer.group} ({shape}), "
            f"layer {layer.name}, rank {self.memory.rank}, block {block} "
            f"(index {position // shape.tokens_per_block}), computing tokens [{work.start}, {work.stop})"
        )
