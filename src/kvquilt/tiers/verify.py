"""Every page of one namespace, read and proven: what `fsck` counts."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import LayoutError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import span_steps
from kvquilt.tiers.files import Files, aligned_buffer
from kvquilt.tiers.format import BLOCK_BYTES, entry_dtype, header_bytes, intact_entries
from kvquilt.tiers.manifest import Manifest, ManifestArena
from kvquilt.tiers.slab import Slab
from kvquilt.tiers.slot_pages import SlotPages
from kvquilt.tiers.table import SlabFacts

__all__ = ["Advance", "CheckedSlab", "Orphan", "check_slabs", "drop_pages", "layout_of", "slab_facts"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Advance = Callable[[int, int], None]
"""Called with (slots read, slots to read) of a namespace."""
Orphan = Literal["generation", "duplicate", "checkpoint", "seed"]

_BATCH_BYTES = 8 << 20
_TRIES = 3  # a page whose entry does not change while it fails that often is bad
_ARENA = re.compile(r"arena(\d{2,})")


@dataclass(eq=False)
class CheckedSlab:
    """One slab's pages by slot: `good` ones are proven, `bad` ones failed, `orphans` are good or old.

    entries: what the table says, or the slots' headers where it says nothing intact. problems: what is
    wrong with the files as a whole.
    """

    facts: SlabFacts
    groups: list[tuple[int, str]]
    entries: NDArray[np.void]
    good: BoolArray
    bad: BoolArray
    orphans: dict[Orphan, BoolArray] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: bool = False

    @property
    def orphaned(self) -> BoolArray:
        """Slots of pages that nothing can use."""
        found = np.zeros(len(self.entries), dtype=np.bool_)
        for which in self.orphans.values():
            found |= which
        return found


def layout_of(manifest: Manifest) -> CacheLayout | None:
    """The groups that the factors describe; None if they describe none that could be."""
    factors = manifest.namespace
    try:
        groups = [
            CacheGroup(
                group.name,
                kind=group.kind,  # type: ignore[arg-type]  # CacheGroup refuses what it does not know
                tokens_per_block=group.tokens_per_block,
                page_bytes=group.page_bytes,
                window=group.window,
                chunk=group.chunk,
                extra_tokens=group.extra_tokens,
                draft=group.draft,
                cacheable=group.cacheable,
            )
            for group in factors.groups
        ]
        return CacheLayout(groups, factors.tokens_per_hash)
    except LayoutError:
        return None


def slab_facts(manifest: Manifest, arena: ManifestArena) -> SlabFacts | None:
    """A slab as the manifest describes it; None if no slab is like that."""
    name = _ARENA.fullmatch(arena.name)
    if name is None or min(arena.num_slots, arena.slot_bytes, arena.span_keys + 1) < 1 or not arena.groups:
        return None
    payload_bytes = arena.slot_bytes - header_bytes(arena.span_keys)
    if payload_bytes < 1 or payload_bytes % BLOCK_BYTES:
        return None
    return SlabFacts(
        int(name[1]),
        arena.name,
        arena.num_slots,
        arena.slot_bytes,
        arena.span_keys,
        bytes.fromhex(manifest.digest),
    )


def check_slabs(
    path: Path,
    manifest: Manifest,
    facts: list[SlabFacts],
    layout: CacheLayout,
    files: Files,
    advance: Advance,
) -> list[CheckedSlab]:
    """Read and prove all pages of the manifest's generation in `path`; changes nothing.

    Safe beside a live owner: a page that it overwrites meanwhile is looked at again, or left out.
    """
    opened: list[tuple[Slab | None, CheckedSlab]] = []
    try:
        for one, arena in zip(facts, manifest.arenas, strict=True):
            slab, problem = _open(path, one, files, manifest.generation)
            opened.append((slab, _listed(slab, one, arena, problem)))
        total, done = sum(int(checked.good.sum()) for _, checked in opened), 0
        for slab, checked in opened:
            if slab is not None:
                done = _prove(slab, checked, lambda count: advance(count, total), done)
    finally:
        for slab, _ in opened:
            if slab is not None:
                slab.close()
    results = [checked for _, checked in opened]
    _find_orphans(results, layout)
    return results


def _open(path: Path, facts: SlabFacts, files: Files, generation: int) -> tuple[Slab | None, str]:
    """The slab for reading, past the page cache where that goes; or why it can't be."""
    for direct in (True, False):
        try:
            return Slab.open(path, facts, files, generation, direct=direct, writable=False), ""
        except FileNotFoundError:
            return None, f"{facts.name}.slab is missing"
        except OSError as error:
            if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                return None, f"{facts.name}: {error.strerror}"
    return None, ""


def _listed(slab: Slab | None, facts: SlabFacts, arena: ManifestArena, problem: str) -> CheckedSlab:
    """Pages that the table lists, or headers of slots where it does not: `good` until proven otherwise."""
    entries = np.zeros(0, dtype=entry_dtype(facts.span_keys))
    if slab is None:
        none = np.zeros(0, dtype=np.bool_)
        return CheckedSlab(facts, arena.groups, entries, none, none.copy(), problems=[problem], lost=True)
    slots = np.arange(max(slab.usable_slots, slab.listed_slots), dtype=np.int64)
    entries, doubtful = slab.survey(slots)
    intact = intact_entries(entries, slots)
    now = entries["generation"] == slab.generation
    gone = slots >= slab.usable_slots
    problems = []
    if slab.head_lost:
        problems.append(f"{facts.name}.slab has no intact first block")
    elif slab.table_lost:
        problems.append(f"{facts.name}.table is lost: the headers of all slots were read")
    elif doubtful[~gone].any():
        problems.append(f"{facts.name}.table: {int(doubtful[~gone].sum())} entries are damaged or missing")
    if (intact & now & gone).any():
        problems.append(f"{facts.name}.slab ends before slots that its table lists")
    return CheckedSlab(
        facts,
        arena.groups,
        entries,
        intact & now & ~gone,
        intact & now & gone,
        {"generation": intact & ~now},
        problems,
        slab.head_lost,
    )


def _prove(slab: Slab, checked: CheckedSlab, advance: Callable[[int], None], done: int) -> int:
    """Read every page of a slab, in order of its slots."""
    todo = np.flatnonzero(checked.good)
    payload_bytes = slab.facts.slot_bytes - slab.facts.header_bytes
    per_batch = max(1, _BATCH_BYTES // slab.facts.slot_bytes)
    memory = aligned_buffer(per_batch * payload_bytes)
    for start in range(0, todo.size, per_batch):
        slots = todo[start : start + per_batch]
        _prove_batch(slab, checked, slots, memory)
        advance(done + slots.size)
        done += slots.size
    return done


def _prove_batch(slab: Slab, checked: CheckedSlab, slots: IntArray, memory: memoryview) -> None:
    for _ in range(_TRIES):
        slots = slots[~_read(slab, checked, slots, memory)]
        if not slots.size:
            return
        # A live owner clears an entry before it overwrites the slot, and fills it afterwards.
        checked.entries[slots], _ = slab.survey(slots)
        there = intact_entries(checked.entries[slots], slots)
        there &= checked.entries["generation"][slots] == slab.generation
        checked.good[slots[~there]] = False
        slots = slots[there]
    checked.good[slots] = False
    checked.bad[slots] = True


def _read(slab: Slab, checked: CheckedSlab, slots: IntArray, memory: memoryview) -> BoolArray:
    size = slab.facts.slot_bytes - slab.facts.header_bytes
    entries = checked.entries[slots]
    pages = SlotPages(
        slots,
        entries["group"].astype(np.int64),
        entries["key"],
        entries["span"],
        np.frombuffer(memory, dtype=np.uint8),
        np.arange(slots.size, dtype=np.int64) * size,
    )
    good = np.zeros(slots.size, dtype=np.bool_)
    with contextlib.suppress(OSError):
        good = slab.read_pages(pages, slab.generation).good
    known = np.isin(entries["group"], [index for index, _ in checked.groups])
    return good & known


def _find_orphans(slabs: list[CheckedSlab], layout: CacheLayout) -> None:
    """Move duplicates, and checkpoints without their dense page, from the good ones to the orphans."""
    for checked in slabs:
        twice = np.zeros(len(checked.good), dtype=np.bool_)
        slots = np.flatnonzero(checked.good)
        if slots.size:
            # As at a start: of two slots with one page the one written first stays.
            slots = slots[np.argsort(checked.entries["stamp"][slots], kind="stable")]
            names = _names(checked, slots)
            _, first = np.unique(names, return_index=True)
            twice[np.delete(slots, first)] = True
        checked.orphans["duplicate"] = twice
    ends = _dense_ends(slabs, layout)
    for checked in slabs:
        alone = np.zeros(len(checked.good), dtype=np.bool_)
        for index, _ in checked.groups:
            if index >= len(layout.groups) or layout.groups[index].dense or layout.groups[index].draft:
                continue
            slots = np.flatnonzero(checked.good & (checked.entries["group"] == index))
            for there in ends:
                alone[slots] |= ~np.isin(_keys(checked.entries["key"][slots]), there)
        checked.orphans["checkpoint"] = alone & ~checked.orphans["duplicate"]


def _dense_ends(slabs: list[CheckedSlab], layout: CacheLayout) -> list[NDArray[np.bytes_]]:
    """Per dense group that every hit needs: the hashes at which a checkpoint may end inside its pages."""
    ends = []
    for index, step in span_steps(layout).items():
        group = layout.groups[index]
        if not step or group.draft:
            continue
        inner = layout.hashes_per_block(group) // step - 1
        there = [np.zeros(0, dtype="S32")]
        for checked in slabs:
            if index in [own for own, _ in checked.groups]:
                found = checked.entries[checked.good & (checked.entries["group"] == index)]
                there += [_keys(found["key"]), _keys(found["span"][:, :inner].reshape(-1, 4))]
        ends.append(np.unique(np.concatenate(there)))
    return ends


def _keys(words: NDArray[np.uint64]) -> NDArray[np.bytes_]:
    return np.ascontiguousarray(words).reshape(-1, 4).view("S32").reshape(-1)


def _names(checked: CheckedSlab, slots: IntArray) -> NDArray[np.bytes_]:
    """Group and key of each slot's page."""
    entries = checked.entries[slots]
    named = np.zeros((slots.size, 5), dtype=np.uint64)
    named[:, 0] = entries["group"].astype(np.uint64) + np.uint64(1)
    named[:, 1:] = entries["key"]
    return named.view("S40").reshape(-1)


def drop_pages(path: Path, checked: CheckedSlab, files: Files, generation: int) -> None:
    """Clear what is bad or orphaned, and write down anew what the table lacks. For who holds the namespace.

    A slab without an intact first block is made anew, as an engine does. Raises OSError.
    """
    slab = Slab.open(path, checked.facts, files, generation, direct=False, writable=True)
    try:
        slab.recover([index for index, _ in checked.groups], generation)
        slots = np.flatnonzero(checked.bad | checked.orphaned)
        slab.forget(slots[slots < slab.usable_slots].tolist())
    finally:
        slab.close()
