"""`PagePlan`: groups and arenas as flat tables, and the checks that precede every copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import TransferError
from kvquilt.transfer.base import ArenaView, GroupPages, PageCopies

__all__ = ["ArenaOf", "PagePlan", "Tables", "Triples"]

ArenaOf = Sequence[int | None] | Mapping[int, int]
IntArray = NDArray[np.int64]
NO_ARENA = -1


class Tables(NamedTuple):
    """What the kernels read. Pieces of group g are [first[g], first[g + 1])."""

    first: IntArray
    address: IntArray
    stride: IntArray
    size: IntArray
    offset: IntArray
    """Of the piece in the slot, the rank's part included."""
    arena_address: IntArray
    slot_stride: IntArray


class Triples(NamedTuple):
    """One copy per entry: `size[i]` bytes between `engine[i]` and `host[i]` (addresses)."""

    engine: IntArray
    host: IntArray
    size: IntArray


class PagePlan:
    """Fragments of all groups and the arenas of one rank.

    groups: by the engine's index; None where nothing is ever copied. arena_of: the arena of
    each group; none is needed for groups without bytes. In a slot the pages of `num_ranks`
    ranks lie one after another; this rank's is at `rank * page_bytes`.

    Raises TransferError if the rank or an arena index is impossible, or the memory is not of
    the given kind.
    """

    def __init__(
        self,
        groups: Sequence[GroupPages | None],
        arena_of: ArenaOf,
        rank: int,
        num_ranks: int,
        device_type: str = "cpu",
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise TransferError(f"rank {rank} of {num_ranks} ranks")
        self.groups = tuple(groups)
        self.rank, self.num_ranks = rank, num_ranks
        for group in self.groups:
            for layer in group.layers if group else ():
                if layer.device_type != device_type:
                    raise TransferError(
                        f"layer {layer.name!r} lies in {layer.device_type} memory, not in {device_type}"
                    )
        self.arena_of = np.array([_arena(arena_of, g, p) for g, p in enumerate(self.groups)], dtype=np.int64)
        self.page_bytes = np.array([g.page_bytes if g else 0 for g in self.groups], dtype=np.int64)
        self.num_blocks = np.array([g.num_blocks if g else 0 for g in self.groups], dtype=np.int64)
        self.num_slots = np.zeros(len(self.groups), dtype=np.int64)
        self.attached = False
        self.tables = self._tables()

    def _tables(self) -> Tables:
        first, pieces, offsets = [0], [], []
        for group in self.groups:
            runs = group.fragment_runs() if group else []
            pieces += runs
            sizes = [size for _, _, size in runs]
            base = self.rank * group.page_bytes if group and not group.replicated else 0
            offsets += [base + before for before in np.cumsum([0, *sizes])[:-1].tolist()]
            first.append(len(pieces))
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        address, stride, size = (np.ascontiguousarray(column) for column in table.T)
        zeros = np.zeros(len(self.groups), dtype=np.int64)
        return Tables(
            np.array(first, dtype=np.int64), address, stride, size,
            np.array(offsets, dtype=np.int64), zeros, zeros.copy(),
        )  # fmt: skip

    def attach(self, arenas: Sequence[ArenaView]) -> None:
        """Take the arenas' addresses. Raises TransferError if a group's pages do not fit its slots."""
        if self.attached:
            raise TransferError("arenas are attached already")
        for g, group in enumerate(self.groups):
            if group is None or group.page_bytes == 0:
                continue
            index = int(self.arena_of[g])
            if not 0 <= index < len(arenas):
                raise TransferError(f"cache group {group.name!r}: arena {index} of {len(arenas)} arenas")
            pages = 1 if group.replicated else self.num_ranks
            need, arena = group.page_bytes * pages, arenas[index]
            if need > arena.slot_stride:
                raise TransferError(
                    f"cache group {group.name!r}: {pages} pages of {group.page_bytes} bytes do not "
                    f"fit in slots of {arena.slot_stride} bytes"
                )
            self.tables.arena_address[g] = arena.address
            self.tables.slot_stride[g] = arena.slot_stride
            self.num_slots[g] = arena.num_slots
        self.attached = True

    def check(self, copies: PageCopies, *, save: bool) -> None:
        """Refuse what must not be copied, before any byte moves.

        Raises TransferError: no arenas yet, group without pages, block 0 (the engine keeps it
        as the null block), block or slot out of range, one destination written twice.
        """
        if not self.attached:
            raise TransferError("no arenas are attached yet")
        self.check_blocks(copies)
        group, slot = copies.group, copies.slot
        holds = self.page_bytes[group] > 0
        self._refuse(copies, holds & (slot < 0), "slot is negative")
        self._refuse(copies, holds & (slot >= self.num_slots[group]), "slot is beyond the arena")
        if save:
            self._refuse_twice(copies, holds, self.arena_of[group], slot, "slot is written twice")
        else:
            self._refuse_twice(copies, holds, group, copies.block, "block is written twice")

    def check_blocks(self, copies: PageCopies) -> None:
        """The part of `check` that concerns groups and blocks alone."""
        group, block = copies.group, copies.block
        self._refuse(copies, (group < 0) | (group >= len(self.groups)), "no such group")
        known = np.array([g is not None for g in self.groups], dtype=np.bool_)
        self._refuse(copies, ~known[group], "nothing of this group is ever copied")
        self._refuse(copies, block == 0, "block 0 is the engine's null block")
        self._refuse(copies, block < 0, "block is negative")
        self._refuse(copies, block >= self.num_blocks[group], "block is beyond the engine's tensors")

    def _refuse(self, copies: PageCopies, bad: NDArray[np.bool_], reason: str) -> None:
        if not bad.any():
            return
        i = int(np.flatnonzero(bad)[0])
        g = int(copies.group[i])
        group = self.groups[g] if 0 <= g < len(self.groups) else None
        raise TransferError(
            f"page copy {i} of {len(copies)}: group {g} ({group.name if group else 'none'!r}), "
            f"block {copies.block[i]}, slot {copies.slot[i]}: {reason}"
        )

    def _refuse_twice(
        self,
        copies: PageCopies,
        holds: NDArray[np.bool_],
        space: NDArray[np.integer[Any]],
        index: NDArray[np.integer[Any]],
        why: str,
    ) -> None:
        key = space.astype(np.int64) << 40 | index.astype(np.int64)
        order = np.argsort(key, kind="stable")
        again = np.zeros(len(copies), dtype=np.bool_)
        again[order[1:]] = key[order[1:]] == key[order[:-1]]
        self._refuse(copies, again & holds, why)

    def num_bytes(self, copies: PageCopies) -> int:
        """Bytes that the copies move on this rank."""
        return int(self.page_bytes[copies.group].sum())

    def triples(self, copies: PageCopies) -> Triples:
        """Every piece of every page as addresses; `copies` must have been checked."""
        t = self.tables
        engine, host, size = [], [], []
        for g in np.unique(copies.group).tolist():
            mine = copies.group == g
            pieces = slice(int(t.first[g]), int(t.first[g + 1]))
            block, slot = copies.block[mine][:, None], copies.slot[mine][:, None]
            engine.append((t.address[pieces] + block * t.stride[pieces]).ravel())
            host.append((t.arena_address[g] + slot * t.slot_stride[g] + t.offset[pieces]).ravel())
            size.append(np.tile(t.size[pieces], len(block)))
        if not engine:
            empty = np.zeros(0, dtype=np.int64)
            return Triples(empty, empty, empty)
        return Triples(np.concatenate(engine), np.concatenate(host), np.concatenate(size))


def _arena(arena_of: ArenaOf, g: int, group: GroupPages | None) -> int:
    if group is None or group.page_bytes == 0:
        return NO_ARENA
    by_group = arena_of if isinstance(arena_of, Mapping) else dict(enumerate(arena_of))
    index = by_group.get(g)
    if index is None:
        raise TransferError(f"cache group {group.name!r}: has pages but no arena")
    return index
