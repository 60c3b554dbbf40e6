"""Compiled bulk operations over the slots of one arena: index, recency, states.

Everything works on one `Slots` record of flat arrays, in place, for a whole batch of blocks
per call and without the GIL. The index is open addressing with linear probing and
backward-shift deletion, so it never degrades and never needs tombstones. An entry is one
uint64, `tag << 32 | slot + 1`: the tag both filters mismatches and gives an entry's home, so
that neither probing past an entry nor moving it needs the entry's key. A tag decides nothing:
a match is the group and all 256 bits of the key.

All kernels live in this one file because the compiler's cache sees changes of one file only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvquilt.compiled import njit

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

# States of a slot.
FREE = 0
TICKETED = 1  # being written; in the index, not visible
RESIDENT = 2  # visible
DETACHED_WRITE = 3  # being written, but its key was taken away: it lands invisibly
DETACHED_READ = 4  # leased, but its key was taken away: readable until the last lease ends

# What `reserve` answers in place of a slot.
PRESENT = -1
PENDING = -2
FULL = -3

# Places in `Slots.meta`.
NUM_FREE = 0
OLDEST = 1
NEWEST = 2
NUM_ENTRIES = 3
NUM_FRESH = 4  # usable slots that have never held a page
META_SIZE = 5

_MIX_WORD = np.uint64(0x9E3779B97F4A7C15)
_MIX_GROUP = np.uint64(0xD6E8FEB86659FD93)
_MIX_ALL = np.uint64(0xFF51AFD7ED558CCD)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_STAGE = 64  # blocks whose cache misses overlap
_STRETCH = 1024  # blocks probed before a prefix is checked for its first hole


class Slots(NamedTuple):
    """Flat state of one arena of n slots. `clock` and `pages` are shared by all arenas."""

    keys: U64  # (n, 4)
    group: I32  # (n,)
    state: U8  # (n,)
    pins: I32  # (n,) leases that cover the slot
    older: I32  # (n,) recency list, -1 ends it
    newer: I32  # (n,)
    stamp: I64  # (n,) clock of the last touch, -1 before the first
    span: U64  # (n, s, 4) dense slots: hashes inside the block, without the closing one
    table: U64  # (capacity,) power of two
    free: I32  # (n,) stack of free slots
    meta: I64  # (META_SIZE,)
    clock: I64  # (1,)
    pages: I64  # (groups,) resident pages


@njit
def _tag(hashes: U64, row: int, group: int) -> Any:
    word = hashes[row, 0] ^ (hashes[row, 1] * _MIX_WORD) ^ ((np.uint64(group) + _ONE) * _MIX_GROUP)
    word = (word ^ (word >> _HALF)) * _MIX_ALL
    return word >> _HALF


@njit
def _find(s: Slots, group: int, hashes: U64, row: int) -> Any:
    """Slot that holds the key hashes[row] of `group`, or -1."""
    tag = _tag(hashes, row, group)
    mask = np.uint64(s.table.size - 1)
    at = tag & mask
    while True:
        entry = s.table[at]
        if entry == 0:
            return -1
        if entry >> _HALF == tag:
            slot = np.int64(entry & _LOW) - 1
            if (
                s.group[slot] == group
                and s.keys[slot, 0] == hashes[row, 0]
                and s.keys[slot, 1] == hashes[row, 1]
                and s.keys[slot, 2] == hashes[row, 2]
                and s.keys[slot, 3] == hashes[row, 3]
            ):
                return slot
        at = (at + _ONE) & mask


@njit
def _index_add(s: Slots, slot: int) -> None:
    tag = _tag(s.keys, slot, s.group[slot])
    mask = np.uint64(s.table.size - 1)
    at = tag & mask
    while s.table[at] != 0:
        at = (at + _ONE) & mask
    s.table[at] = (tag << _HALF) | (np.uint64(slot) + _ONE)
    s.meta[NUM_ENTRIES] += 1


@njit
def _index_drop(s: Slots, slot: int) -> None:
    """Take a slot's entry out; later entries of its run move back, so no tombstone is left."""
    tag = _tag(s.keys, slot, s.group[slot])
    entry = (tag << _HALF) | (np.uint64(slot) + _ONE)
    mask = np.uint64(s.table.size - 1)
    hole = tag & mask
    while s.table[hole] != entry:
        hole = (hole + _ONE) & mask
    at = hole
    while True:
        at = (at + _ONE) & mask
        moved = s.table[at]
        if moved == 0:
            break
        home = (moved >> _HALF) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            s.table[hole] = moved
            hole = at
    s.table[hole] = np.uint64(0)
    s.meta[NUM_ENTRIES] -= 1


@njit
def _unlink(s: Slots, slot: int) -> None:
    older, newer = s.older[slot], s.newer[slot]
    if older >= 0:
        s.newer[older] = newer
    else:
        s.meta[OLDEST] = newer
    if newer >= 0:
        s.older[newer] = older
    else:
        s.meta[NEWEST] = older


@njit
def _link_newest(s: Slots, slot: int) -> None:
    newest = s.meta[NEWEST]
    s.older[slot] = newest
    s.newer[slot] = -1
    if newest >= 0:
        s.newer[newest] = slot
    else:
        s.meta[OLDEST] = slot
    s.meta[NEWEST] = slot
    s.stamp[slot] = s.clock[0]
    s.clock[0] += 1


@njit
def _set_free(s: Slots, slot: int) -> None:
    s.state[slot] = FREE
    s.free[s.meta[NUM_FREE]] = slot
    s.meta[NUM_FREE] += 1


@njit
def _withdraw(s: Slots, slot: int) -> None:
    """Take a resident page out of the index; a leased one stays readable, unseen."""
    _index_drop(s, slot)
    _unlink(s, slot)
    s.pages[s.group[slot]] -= 1
    if s.pins[slot] > 0:
        s.state[slot] = DETACHED_READ
    else:
        _set_free(s, slot)


@njit
def add_usable(s: Slots, first: int, last: int) -> None:
    """Slots [first, last) can be used now: make them free, the lowest to be used first.

    Those that `adopt` has filled before stay as they are.
    """
    for slot in range(last - 1, first - 1, -1):
        if s.state[slot] == FREE:
            s.stamp[slot] = -1
            _set_free(s, slot)
            s.meta[NUM_FRESH] += 1


@njit
def _visible(s: Slots, group: int, hashes: U64, k: int, first: int, out: I64) -> None:
    """Visible slots of out.size blocks from `first` on, -1 where there is none.

    In stages without branches, so that the cache misses of many blocks overlap: all first index
    entries, then all keys they point to, then the verdicts. What does not match at its home
    (missing, or moved on by a collision) is looked up by itself.
    """
    table, keys, state, group_of = s.table, s.keys, s.state, s.group
    mask = np.uint64(table.size - 1)
    tags = np.empty(_STAGE, dtype=np.uint64)
    homes = np.empty(_STAGE, dtype=np.int64)
    for start in range(0, out.size, _STAGE):
        size = min(_STAGE, out.size - start)
        for i in range(size):
            tags[i] = _tag(hashes, (first + start + i + 1) * k - 1, group)
        for i in range(size):
            entry = table[tags[i] & mask]
            homes[i] = np.int64(entry & _LOW) - 1
            tags[i] ^= entry >> _HALF
        for i in range(size):
            slot = max(homes[i], 0)
            tags[i] |= keys[slot, 0] ^ hashes[(first + start + i + 1) * k - 1, 0]
        for i in range(size):
            row = (first + start + i + 1) * k - 1
            slot = homes[i]
            if not (
                slot >= 0
                and tags[i] == 0
                and group_of[slot] == group
                and keys[slot, 1] == hashes[row, 1]
                and keys[slot, 2] == hashes[row, 2]
                and keys[slot, 3] == hashes[row, 3]
            ):
                slot = _find(s, group, hashes, row)
            out[start + i] = slot if slot >= 0 and state[slot] == RESIDENT else -1


@njit
def probe_prefix(s: Slots, group: int, hashes: U64, k: int, first: int, last: int, out: I64) -> int:
    """Visible slots of blocks first..last-1 into `out`, up to the first hole; how many."""
    for start in range(0, last - first, _STRETCH):
        part = out[start : min(start + _STRETCH, last - first)]
        _visible(s, group, hashes, k, first + start, part)
        for i in range(part.size):
            if part[i] < 0:
                return start + i
    return max(0, last - first)


@njit
def probe(s: Slots, group: int, hashes: U64, k: int, first: int, last: int, out: I64) -> int:
    """Visible slots of blocks first..last-1 into `out`, -1 where there is none; how many."""
    part = out[: max(0, last - first)]
    _visible(s, group, hashes, k, first, part)
    count = 0
    for i in range(part.size):
        count += part[i] >= 0
    return count


@njit
def all_visible(
    s: Slots,
    group: int,
    hashes: U64,
    k: int,
    held: int,
    hashed: int,
    lo: I64,
    hi: I64,
    out: NDArray[np.bool_],
) -> None:
    """out[i]: are all of blocks lo[i]..hi[i]-1 visible? lo, hi: ascending.

    Blocks before `held` count as visible, those from `hashed` on never are.
    """
    base, last = lo[0], hi[hi.size - 1]
    first = min(max(base, held), last)
    slots = np.empty(max(0, min(last, hashed) - first), dtype=np.int64)
    _visible(s, group, hashes, k, first, slots)
    missing = np.zeros(last - base + 1, dtype=np.int64)  # before each block, from base on
    for block in range(base, last):
        i = block - first
        gone = i >= 0 and (i >= slots.size or slots[i] < 0)
        missing[block - base + 1] = missing[block - base] + gone
    for i in range(lo.size):
        out[i] = missing[hi[i] - base] == missing[lo[i] - base]


@njit
def find(s: Slots, group: int, hashes: U64, k: int, blocks: I64, out: I64) -> None:
    """Visible slot of each block, -1 where there is none."""
    for i in range(blocks.size):
        slot = _find(s, group, hashes, (blocks[i] + 1) * k - 1)
        out[i] = slot if slot >= 0 and s.state[slot] == RESIDENT else -1


@njit
def states(s: Slots, group: int, hashes: U64, k: int, blocks: I64, out: U8) -> int:
    """FREE (missing), TICKETED or RESIDENT for each block; returns how many are missing."""
    missing = 0
    for i in range(blocks.size):
        slot = _find(s, group, hashes, (blocks[i] + 1) * k - 1)
        out[i] = s.state[slot] if slot >= 0 else FREE
        missing += slot < 0
    return missing


@njit
def touch_slots(s: Slots, slots: I64, leased: int) -> None:
    """Make these resident slots the newest, the last one of the array the oldest among them; -1 is none.

    The first `leased` of them get one more lease each.

    Written out on local arrays: a call with the whole record per slot costs more than the move.
    """
    older, newer, stamp = s.older, s.newer, s.stamp
    oldest, newest, clock = s.meta[OLDEST], s.meta[NEWEST], s.clock[0]
    for i in range(slots.size - 1, -1, -1):
        slot = slots[i]
        if slot < 0:
            continue
        stamp[slot] = clock
        clock += 1
        if slot == newest:
            continue
        before, after = np.int64(older[slot]), np.int64(newer[slot])
        if before >= 0:
            newer[before] = after
        else:
            oldest = after
        older[after] = before
        older[slot] = newest
        newer[newest] = slot
        newer[slot] = -1
        newest = slot
    s.meta[OLDEST], s.meta[NEWEST], s.clock[0] = oldest, newest, clock
    for i in range(leased):
        s.pins[slots[i]] += 1


@njit
def touch_blocks(s: Slots, group: int, hashes: U64, k: int, first: int, last: int) -> None:
    """`touch_slots` for those of blocks first..last-1 that are visible."""
    slots = np.empty(max(0, last - first), dtype=np.int64)
    _visible(s, group, hashes, k, first, slots)
    touch_slots(s, slots, 0)


@njit
def unpin(s: Slots, slots: I64) -> None:
    """One lease less on each slot, last block first; a detached slot goes with its last lease."""
    for i in range(slots.size - 1, -1, -1):
        slot = slots[i]
        s.pins[slot] -= 1
        if s.pins[slot] == 0 and s.state[slot] == DETACHED_READ:
            _set_free(s, slot)


@njit
def reserve(s: Slots, group: int, hashes: U64, k: int, blocks: I64, span_step: int, out: I64) -> int:
    """Give each missing block a free slot, as ticketed; else PRESENT, PENDING or FULL. How many."""
    granted = 0
    for i in range(blocks.size):
        row = (blocks[i] + 1) * k - 1
        slot = _find(s, group, hashes, row)
        if slot >= 0:
            out[i] = PRESENT if s.state[slot] == RESIDENT else PENDING
            continue
        if s.meta[NUM_FREE] == 0:
            out[i] = FULL
            continue
        s.meta[NUM_FREE] -= 1
        slot = s.free[s.meta[NUM_FREE]]
        if s.stamp[slot] < 0:
            s.stamp[slot] = 0
            s.meta[NUM_FRESH] -= 1
        s.keys[slot] = hashes[row]
        s.group[slot] = group
        s.state[slot] = TICKETED
        if span_step > 0:
            for inner in range(k // span_step - 1):
                s.span[slot, inner] = hashes[blocks[i] * k + (inner + 1) * span_step - 1]
        _index_add(s, slot)
        out[i] = slot
        granted += 1
    return granted


@njit
def commit(s: Slots, slots: I64) -> int:
    """Ticketed slots become visible, the last one the newest; detached ones are freed. How many."""
    visible = 0
    for i in range(slots.size):
        slot = slots[i]
        if s.state[slot] == TICKETED:
            s.state[slot] = RESIDENT
            s.pages[s.group[slot]] += 1
            _link_newest(s, slot)
            visible += 1
        else:
            _set_free(s, slot)
    return visible


@njit
def adopt(s: Slots, slots: I64, keys: U64, groups: I32, spans: U64, stamps: I64) -> int:
    """Fill slots that are not usable yet with pages of an earlier run, oldest first. How many.

    A key that is there already stays where it was adopted first. stamps: ascending; equal ones move up.
    """
    count = 0
    now = s.clock[0]
    for i in range(slots.size):
        slot = slots[i]
        if s.state[slot] != FREE or _find(s, groups[i], keys, i) >= 0:
            continue
        s.keys[slot] = keys[i]
        s.group[slot] = groups[i]
        s.span[slot] = spans[i]
        s.state[slot] = RESIDENT
        s.pages[groups[i]] += 1
        _index_add(s, slot)
        s.clock[0] = max(stamps[i], s.stamp[s.meta[NEWEST]] + 1 if s.meta[NEWEST] >= 0 else 0)
        _link_newest(s, slot)
        count += 1
    s.clock[0] = max(s.clock[0], now)  # other arenas, whose clock it is too, may have newer pages
    return count


@njit
def oldest(s: Slots, before: int, out: I64) -> int:
    """The oldest pages that nobody leases and that were last touched before clock `before` into `out`,
    oldest first. How many."""
    count = 0
    slot = s.meta[OLDEST]
    while slot >= 0 and count < out.size and s.stamp[slot] < before:
        if s.pins[slot] == 0:
            out[count] = slot
            count += 1
        slot = np.int64(s.newer[slot])
    return count


@njit
def pin(s: Slots, slots: I64) -> None:
    """One lease more on each slot."""
    for i in range(slots.size):
        s.pins[slots[i]] += 1


@njit
def abort(s: Slots, slots: I64) -> None:
    """Ticketed slots are given back unseen."""
    for i in range(slots.size - 1, -1, -1):
        if s.state[slots[i]] == TICKETED:
            _index_drop(s, slots[i])
        _set_free(s, slots[i])


@njit
def detach(s: Slots, slots: I64) -> None:
    """Take the keys from ticketed slots: they can be written again elsewhere."""
    for i in range(slots.size):
        if s.state[slots[i]] == TICKETED:
            _index_drop(s, slots[i])
            s.state[slots[i]] = DETACHED_WRITE


@njit
def evict(s: Slots, need: int, before: int, out: I64) -> int:
    """Free up to `need` of the oldest pages that nobody leases and that were last touched before
    clock `before`; their slots into `out`, oldest first. How many."""
    count = 0
    slot = s.meta[OLDEST]
    while slot >= 0 and count < need and s.stamp[slot] < before:
        newer = np.int64(s.newer[slot])
        if s.pins[slot] == 0:
            _withdraw(s, slot)
            out[count] = slot
            count += 1
        slot = newer
    return count


@njit
def withdraw(s: Slots, group: int, hashes: U64, k: int, blocks: I64, out: I64) -> int:
    """Take these blocks' pages out of the index if visible; their slots into `out`. How many."""
    count = 0
    for i in range(blocks.size):
        slot = _find(s, group, hashes, (blocks[i] + 1) * k - 1)
        if slot >= 0 and s.state[slot] == RESIDENT:
            _withdraw(s, slot)
            out[count] = slot
            count += 1
    return count


@njit
def withdraw_orphans(
    dense: Slots, lost: I64, inner: int, step: int, s: Slots, group: int, after: int, out: I64
) -> int:
    """Free the unleased pages of `group` that end inside the blocks that `lost` slots of `dense` held.

    inner: hashes kept in `span` per lost slot; step: fine hashes from one to the next.
    after: pages that end within this many hashes of the block's start stay. How many went;
    their slots into `out` as far as it reaches.
    """
    count = 0
    for i in range(lost.size):
        for at in range(inner + 1):
            if (at + 1) * step <= after:
                continue
            if at < inner:
                slot = _find(s, group, dense.span[lost[i]], at)
            else:
                slot = _find(s, group, dense.keys, lost[i])
            if slot >= 0 and s.state[slot] == RESIDENT and s.pins[slot] == 0:
                _withdraw(s, slot)
                if count < out.size:
                    out[count] = slot
                count += 1
    return count


@njit
def clear(s: Slots, usable: int) -> None:
    """Empty the index. Leased and ticketed slots stay held, without their keys; those that `adopt` has filled
    and that are not usable yet become as if it had not."""
    s.table[:] = np.uint64(0)
    s.meta[NUM_ENTRIES] = 0
    s.meta[OLDEST] = -1
    s.meta[NEWEST] = -1
    for slot in range(s.state.size - 1, -1, -1):
        if s.state[slot] == TICKETED:
            s.state[slot] = DETACHED_WRITE
        elif s.state[slot] == RESIDENT:
            s.pages[s.group[slot]] -= 1
            if s.pins[slot] > 0:
                s.state[slot] = DETACHED_READ
            elif slot < usable:
                _set_free(s, slot)
            else:  # `add_usable` will
                s.state[slot] = FREE


@njit
def check_index(s: Slots, usable: int) -> int:
    """How many indexed slots are not found under their own key."""
    wrong = 0
    for slot in range(usable):
        if s.state[slot] == TICKETED or s.state[slot] == RESIDENT:
            wrong += _find(s, s.group[slot], s.keys, slot) != slot
    return wrong


@njit
def check_recency(s: Slots, usable: int) -> int:
    """Length of the recency list if it is consistent (both ways, resident only, by clock), else -1."""
    count = 0
    previous = np.int64(-1)
    slot = s.meta[OLDEST]
    while slot >= 0:
        if s.state[slot] != RESIDENT or s.older[slot] != previous or count > usable:
            return -1
        if previous >= 0 and s.stamp[previous] >= s.stamp[slot]:
            return -1
        previous = slot
        slot = np.int64(s.newer[slot])
        count += 1
    return count if s.meta[NEWEST] == previous else -1
