"""A simulated model: KV memory laid out as in the engine, and a forward pass that checks it.

Instead of attention, the forward pass writes a fingerprint of each computed token and compares
every entry that attention would read with the fingerprint that must be there. Wrong, stale, missing
or misplaced KV is thus an error at once, with its request, group and block, also where a real
model's output would not have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        self.layers: list[SimLayer] = []
        group_of = {name: i for i, g in enumerate(config.kv_cache_groups) for name in g.layer_names}
        for place in config.kv_cache_tensors:
            index = group_of[place.layers[0]]
            shape, group = shapes[index], config.kv_cache_groups[index]
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(
                place.layers[0], group.kv_cache_spec
            )
            layout = KVCacheLayout[config.kv_cache_layout]
            views = create_kv_cache_views(self._raw.view(torch.int8), spec, self.num_blocks, layout, place)
            for i, (name, tensor) in enumerate(zip(place.layers, views, strict=True)):
                number = group.layer_names.index(name)
                entry = shape.layer_entry_bytes(number)
                words = np.lib.stride_tricks.as_strided(
                    raw_words[(place.offset + i * place.layer_stride) // 8 :],
                    shape=(self.num_blocks, shape.layer_page_bytes(number) // entry, entry // 8),
                    strides=(place.block_stride, entry, 8),
                )
                constants = layer_constants(index, number, 0 if shape.replicated else rank, entry // 8)
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
    """What the worker knows of a request: its tokens and its block table, one list per group.

    first: where computing began; a window that is computed anew after a hit holds nothing before.
    """

    id: str
    hashes: TokenHashes
    num_prompt_tokens: int
    tables: tuple[list[int], ...]
    first: int = 0


@dataclass(frozen=True)
class _Work:
    """One request's share of a step: positions [start, stop) are computed."""

    request: SimRequest
    start: int
    stop: int
    # Running hashes, one longer than the tokens when the next token is already decided.
    hashes: NDArray[np.uint64]
    # What a drafter computes: it runs when the drafts have been verified.
    verified: _Work | None = None


class SimModel:
    """The forward pass over one rank's memory, and the worker's own record of its requests."""

    def __init__(self, memory: SimMemory, shapes: Sequence[GroupShape], vocab_size: int) -> None:
        self.memory = memory
        self.shapes = tuple(shapes)
        self.vocab_size = vocab_size
        self.requests: dict[str, SimRequest] = {}
        self._work: list[_Work] = []

    def plan(
        self, scheduled: Mapping[str, tuple[int, int]], drafts: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, list[int]]:
        """Take up a step: request -> (computed tokens, tokens to compute). Returns what is sampled.

        drafts: tokens to verify, at the end of those to compute. A request that still has known
        tokens after this step samples nothing.
        """
        self._work = []
        sampled: dict[str, list[int]] = {}
        for request_id, (start, count) in scheduled.items():
            request = self.requests[request_id]
            drafted = list((drafts or {}).get(request_id, ()))
            stop = start + count - len(drafted)
            # As they are now: later steps may be planned before this one is computed.
            seen = replace(request, tables=tuple(list(table) for table in request.tables))
            if stop > len(request.hashes) or (drafted and stop < len(request.hashes)):
                known = len(request.hashes)
                raise HarnessError(f"request {request_id}: asked to compute {stop} tokens, {known} are known")
            sampled[request_id] = []
            if stop < len(request.hashes):
                self._work.append(_Work(seen, start, stop, request.hashes.values))
                continue
            unverified = TokenHashes(request.hashes.tokens, request.hashes.salt) if drafted else None
            sampled[request_id] = self._sample(request.hashes, drafted)
            work = _Work(seen, start, len(request.hashes) - 1, request.hashes.values)
            if unverified is not None:
                unverified.extend([max(0, token) for token in drafted])  # -1: no draft at all
                work = _Work(seen, start, start + count, unverified.values, work)
            self._work.append(work)
        return sampled

    def _sample(self, hashes: TokenHashes, drafted: Sequence[int]) -> list[int]:
        """Extend by the drafts that are right, and by one token more; returns what was added."""
        sampled: list[int] = []
        for draft in (*drafted, None):
            sampled.append(next_token(hashes.values[-1], self.vocab_size))
            hashes.extend(sampled[-1:])
            if draft != sampled[-1]:
                break
        return sampled

    def propose(self, request_id: str, count: int) -> list[int]:
        """Drafts for a request: those to come, but for some that are wrong."""
        request = self.requests[request_id]
        hashes = TokenHashes(request.hashes.tokens, request.hashes.salt)
        drafts: list[int] = []
        for _ in range(count):
            drafts.append(next_token(hashes.values[-1], self.vocab_size))
            hashes.extend(drafts[-1:])
        wrong = int(hashes.values[-1]) % (count + 1)  # as many are right, all at most
        return [token if i < wrong else (token + 1) % self.vocab_size for i, token in enumerate(drafts)]

    def take_work(self) -> list[_Work]:
        """What `plan` took up last, for `forward` to compute whenever its time comes."""
        work, self._work = self._work, []
        return work

    def forward(self, layer: SimLayer, step: Sequence[_Work]) -> None:
        """Compute one layer of a step: write the new entries of all requests, then read as attention does.

        All write before any reads, as in the engine: a request may hit blocks that another request
        fills in the same step. A state is read before, as in the engine. Raises WrongKV.
        """
        shape = self.shapes[layer.group]
        if shape.kind == "recurrent":
            self._forward_states(layer, step)
            return
        if shape.kind == "ring":
            self._forward_ring(layer, step)
            return
        drafting = shape.draft or shape.drafter is not None
        todo = [work.verified if drafting and work.verified else work for work in step]
        for work in todo:
            positions = np.arange(work.start, work.stop)
            blocks, offsets = self._locate(layer, work, positions)
            layer.words[blocks, offsets] = self._entries(layer, work, positions)
        for work in todo:
            first = shape.first_read(work.start)
            if shape.kind == "replay":
                first = max(first, work.request.first)
            if self._read(layer, work, np.arange(first, work.stop)):
                positions = np.arange(work.start, work.stop)
                blocks, offsets = self._locate(layer, work, positions)
                layer.words[blocks, offsets] = 0  # what comes of zeros is worth no more than they are

    def touched(self, layer: SimLayer, step: Sequence[_Work]) -> Iterable[tuple[int, int, bool]]:
        """(address, bytes, written?) of all blocks that `forward` may read or write."""
        size, stride = layer.words[0].nbytes, layer.words.strides[0]
        base = layer.words.__array_interface__["data"][0]
        tokens = self.shapes[layer.group].tokens_per_block
        for work in step:
            first = max(0, self.shapes[layer.group].first_read(work.start)) // tokens
            table = work.request.tables[layer.group][first : -(-work.stop // tokens)]
            for index, block in enumerate(table, first):
                if block:
                    yield base + block * stride, size, (index + 1) * tokens > work.start

    def _forward_ring(self, layer: SimLayer, step: Sequence[_Work]) -> None:
        """One block per request, used round and round: it holds what of the open block was computed."""
        shape = self.shapes[layer.group]
        for work in step:
            self._read(layer, work, np.arange(shape.first_read(work.start), work.start))
            kept = np.arange(max(work.start, work.stop - shape.tokens_per_block), work.stop)
            blocks, offsets = self._locate(layer, work, kept)
            layer.words[blocks, offsets] = self._entries(layer, work, kept)

    def _forward_states(self, layer: SimLayer, step: Sequence[_Work]) -> None:
        """The state after the last computed token is read; the one after the last new token is kept,
        and with `state_mode` "all" each one at the end of a block."""
        shape = self.shapes[layer.group]
        for work in step:
            if work.start:
                self._read(layer, work, np.asarray([work.start - 1]))
        for work in step:
            kept = np.asarray([work.stop - 1])
            if shape.state_mode == "all":
                ends = np.arange(work.start + 1, work.stop)
                kept = np.append(ends[ends % shape.tokens_per_block == 0] - 1, kept)
            blocks, _ = self._locate(layer, work, kept)
            layer.words[blocks, 0] = self._entries(layer, work, kept)

    def _read(self, layer: SimLayer, work: _Work, positions: NDArray[np.int64]) -> bool:
        """Compare with what must be there; True if a drafter met zeros instead."""
        blocks, offsets = self._locate(layer, work, positions)
        read = layer.words[blocks, offsets]
        wrong = (read != self._entries(layer, work, positions)).any(axis=1)
        hollow = False
        if self.shapes[layer.group].drafter is not None:
            # The target model verifies every draft, so a connector may leave zeros there.
            zero = ~read.any(axis=1)
            hollow = bool(zero.any())
            wrong &= ~zero
            if self.shapes[layer.group].draft:
                # The block's hash does not cover the token after it: where another continuation was
                # saved first, its last entry is that one's, in the engine's own cache as well.
                last = self.shapes[layer.group].tokens_per_block - 1
                wrong &= (offsets != last) | (read == POISON).any(axis=1)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            what = "never written" if (read[at] == POISON).any() else "another token's"
            raise self._wrong(layer, work, int(positions[at]), int(blocks[at]), what)
        return hollow

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
        if self.shapes[layer.group].kind == "ring":
            index = np.zeros_like(positions)
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
