"""A simulated model: a forward pass over simulated KV memory that checks it.

Instead of attention, the forward pass writes a fingerprint of each computed token and compares
every entry that attention would read with the fingerprint that must be there. Wrong, stale, missing
or misplaced KV is thus an error at once, with its request, group and block, also where a real
model's output would not have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvquilt.testing.sim_fingerprint import POISON, TokenHashes, fingerprints, next_token
from kvquilt.testing.sim_memory import SimLayer, SimMemory
from kvquilt.testing.sim_shapes import GroupShape, HarnessError
from kvquilt.testing.sim_states import Running, StateStep, plan_states

__all__ = ["SimModel", "SimRequest", "WrongKV"]


class WrongKV(HarnessError):
    """Attention would have read KV that is not the request's own."""


@dataclass
class SimRequest:
    """What the worker knows of a request: its tokens and its block table, one list per group.

    first: where computing began; a window that is computed anew after a hit holds nothing before.
    computed: tokens computed and accepted so far. drafts: how many were to be verified in the last step.
    running: where its states are, by group, while drafts are verified beside them.
    """

    id: str
    hashes: TokenHashes
    num_prompt_tokens: int
    tables: tuple[list[int], ...]
    first: int = 0
    computed: int = 0
    drafts: int = 0
    running: dict[int, Running] = field(default_factory=dict)


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
    # Recurrent groups with blocks to spare for drafts.
    states: Mapping[int, StateStep] = field(default_factory=dict)


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
            unverified = TokenHashes(request.hashes.tokens, request.hashes.salt) if drafted else None
            if stop == len(request.hashes):
                sampled[request_id] = self._sample(request.hashes, drafted)
                stop = len(request.hashes) - 1
            states = self._plan_states(request, start, count, len(drafted), sampled[request_id])
            work = _Work(seen, start, stop, request.hashes.values, states=states)
            if unverified is not None:
                unverified.extend([max(0, token) for token in drafted])  # -1: no draft at all
                work = _Work(seen, start, start + count, unverified.values, work, states)
            self._work.append(work)
            request.computed, request.drafts = stop, len(drafted)
        return sampled

    def _plan_states(
        self, request: SimRequest, start: int, count: int, num_drafts: int, sampled: Sequence[int]
    ) -> dict[int, StateStep]:
        steps: dict[int, StateStep] = {}
        for index, shape in enumerate(self.shapes):
            if shape.spare_states:
                steps[index], request.running[index] = plan_states(
                    shape, request.running.get(index), start, count, num_drafts, max(0, len(sampled) - 1)
                )
        return steps

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
        if shape.spare_states:
            self._forward_spare_states(layer, step)
            return
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
            if layer.group in work.states:
                for column, written in work.states[layer.group].columns():
                    yield base + self._block(layer, work, column) * stride, size, written
                continue
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

    def _forward_spare_states(self, layer: SimLayer, step: Sequence[_Work]) -> None:
        """The same where drafts are verified: the state after each of them is kept, until it is known
        which of those count."""
        for work in step:
            before = work.states[layer.group].before
            if before is not None:
                self._copy(layer, work, before)
        for work in step:
            column = work.states[layer.group].read
            if column is not None:
                block = np.asarray([self._block(layer, work, column)])
                self._compare(layer, work, np.asarray([work.start - 1]), block, np.zeros_like(block))
        for work in step:
            state = work.states[layer.group]
            blocks = [self._block(layer, work, state.first + i) for i in range(len(state.positions))]
            layer.words[blocks, 0] = self._entries(layer, work, np.asarray(state.positions))

    def commit_states(self, layer: SimLayer, step: Sequence[_Work]) -> None:
        """Once the drafts have been verified: states at the ends of blocks go where they belong."""
        for work in step:
            state = work.states.get(layer.group)
            if state is not None and state.after is not None:
                self._copy(layer, work, state.after)

    def _copy(self, layer: SimLayer, work: _Work, columns: tuple[int, int]) -> None:
        source, target = (self._block(layer, work, column) for column in columns)
        layer.words[target] = layer.words[source]

    def _block(self, layer: SimLayer, work: _Work, column: int) -> int:
        """The block in a column of a request's table; WrongKV if there is none."""
        position = np.asarray([column * self.shapes[layer.group].tokens_per_block])
        return int(self._locate(layer, work, position)[0][0])

    def _read(self, layer: SimLayer, work: _Work, positions: NDArray[np.int64]) -> bool:
        """Compare with what must be there; True if a drafter met zeros instead."""
        blocks, offsets = self._locate(layer, work, positions)
        return self._compare(layer, work, positions, blocks, offsets)

    def _compare(
        self,
        layer: SimLayer,
        work: _Work,
        positions: NDArray[np.int64],
        blocks: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> bool:
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
