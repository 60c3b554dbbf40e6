"""Layouts, namespaces, pages and tiers for tests of the disk tier. The content of a page follows from its
group and key, so that anyone can say which bytes are right."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.layout.namespace import GroupFactors, LayerFactors, NamespaceFactors
from kvquilt.store import Chain, arena_span_keys, warm_up
from kvquilt.tiers import DiskOptions, NVMeTier, Pages
from kvquilt.tiers.files import Files, aligned_buffer
from kvquilt.tiers.format import BLOCK_BYTES, entry_dtype, header_bytes

LIMIT_SECONDS = 60.0
"""No test waits that long unless something hangs."""

UNIT = 16


class SlabFiles(Files):
    """Tells calls that move pages from those for tables, first blocks and headers."""

    def __init__(self) -> None:
        self._slabs: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        (self._slabs.add if path.suffix == ".slab" else self._slabs.discard)(fd)
        return fd

    def moves_pages(self, fd: int, buffers: Sequence[memoryview | bytes]) -> bool:
        """Is this call for whole slots?"""
        return fd in self._slabs and sum(map(len, buffers)) > BLOCK_BYTES


def three_kinds() -> CacheLayout:
    """Full blocks of 32 tokens, a window of 32 in blocks of 16, states of 64; hash unit 16."""
    return CacheLayout(
        [
            CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=8192),
            CacheGroup("win", kind="sliding", tokens_per_block=16, window=32, page_bytes=4096),
            CacheGroup("state", kind="recurrent", tokens_per_block=64, page_bytes=12_000),
        ],
        UNIT,
    )


def one_full() -> CacheLayout:
    """One group of blocks of 16 tokens."""
    return CacheLayout([CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=4096)])


def namespace_of(layout: CacheLayout, **more: Any) -> NamespaceFactors:
    """A namespace of these groups."""
    groups = tuple(
        GroupFactors(
            name=group.name,
            kind=group.kind,
            tokens_per_block=group.tokens_per_block,
            page_bytes=group.page_bytes,
            dtype="bfloat16",
            layers=(LayerFactors(f"{group.name}.0"),),
            window=group.window,
            chunk=group.chunk,
            extra_tokens=group.extra_tokens,
            draft=group.draft,
            cacheable=group.cacheable,
        )
        for group in layout.groups
    )
    given: dict[str, Any] = {
        "model": "some/model",
        "config": "c0",
        "weights": "w0",
        "groups": groups,
        "tokens_per_hash": layout.tokens_per_hash,
        "hash_algorithm": "sha256",
        "hash_seed": "0",
        "cache_layout": "LBHNC",
    }
    return NamespaceFactors(**{**given, **more})


def budget_for(layout: CacheLayout, slots: int) -> int:
    """The least `disk_bytes` that gives each group of a layout of one group `slots` slots, roughly."""
    spans = max(arena_span_keys(layout, "solved").values())
    per_slot = header_bytes(spans) + entry_dtype(spans).itemsize + 8
    sizes = [-(-g.page_bytes // BLOCK_BYTES) * BLOCK_BYTES for g in layout.groups]
    fixed = (256 << 10) + 4 * BLOCK_BYTES * len(sizes) + 3 * len(namespace_of(layout).to_json())
    return fixed + sum(slots * (size + per_slot) for size in sizes) + BLOCK_BYTES


@functools.cache
def warm_up_once() -> None:
    """A thread of the tier's that compiles kernels for ten seconds looks like a disk that hangs."""
    warm_up()


def make_tier(root: Path, layout: CacheLayout, num_bytes: int, **more: Any) -> NVMeTier:
    """A tier in `root`. more: fields of `DiskOptions`, arguments of `NVMeTier`, or `salt`."""
    warm_up_once()
    fields = {name: more.pop(name) for name in list(more) if name in DiskOptions.__dataclass_fields__}
    namespace = more.pop("namespace", None) or namespace_of(layout, salt=more.pop("salt", ""))
    options = DiskOptions(root, num_bytes, **{"threads": 2, **fields})
    # A busy machine is no hung disk.
    return NVMeTier(layout, namespace, options, **{"stall_seconds": LIMIT_SECONDS, **more})


def prompt(layout: CacheLayout, number: int, units: int = 8) -> Chain:
    """Chained 32-byte hashes of prompt `number`, `units` hash units long."""
    hashes, state = [], number.to_bytes(8, "little")
    for _ in range(units):
        state = hashlib.sha256(state).digest()
        hashes.append(state)
    return Chain(layout, hashes)


def content(group: int, key: NDArray[np.uint64], num_bytes: int) -> NDArray[np.uint8]:
    """The bytes of the page with this key."""
    words = np.arange(num_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((words + key[0] + np.uint64(group)) ^ key[1]).view(np.uint8)


def memory_for(tier: NVMeTier, chain: Chain, group: int, blocks: Iterable[int], fill: bool) -> Pages:
    """Host memory for these blocks. fill: with their content, otherwise with zeros."""
    size = tier.plan.slot_bytes[tier.layout.groups[group].name]
    wanted = np.asarray(list(blocks), dtype=np.int64)
    memory = aligned_buffer(max(1, wanted.size) * size)
    keys = chain.keys(group)
    if fill:
        for i, block in enumerate(wanted.tolist()):
            memory[i * size : (i + 1) * size] = content(group, keys[block], size).data
    return Pages(chain, group, wanted, memory, np.arange(wanted.size, dtype=np.int64) * size)


def kept_groups(layout: CacheLayout) -> list[int]:
    """Groups that have pages."""
    return [i for i, group in enumerate(layout.groups) if group.cacheable and group.page_bytes]


def save(tier: NVMeTier, chain: Chain, blocks: dict[int, Iterable[int]] | None = None) -> int:
    """Save these blocks by group, or all; wait for the end. How many were accepted."""
    if blocks is None:
        return save_several(tier, [chain])
    return _save(tier, [memory_for(tier, chain, g, b, True) for g, b in blocks.items()])


def save_several(tier: NVMeTier, chains: Sequence[Chain]) -> int:
    """Save all blocks of all groups of several prompts at once."""
    groups = kept_groups(tier.layout)
    return _save(tier, [memory_for(tier, c, g, range(c.num_blocks(g)), True) for c in chains for g in groups])


def _save(tier: NVMeTier, pages: list[Pages]) -> int:
    ended = threading.Event()
    accepted = tier.save(pages, ended.set)
    assert ended.wait(LIMIT_SECONDS)
    assert tier.wait_idle(LIMIT_SECONDS)
    return accepted


def load(tier: NVMeTier, chain: Chain, group: int, blocks: Iterable[int]) -> list[int]:
    """Which of these blocks are had back. Raises AssertionError if one of them has a wrong byte, or if
    anything was written beside the places of all."""
    wanted = np.asarray(list(blocks), dtype=np.int64)
    size, keys = tier.plan.slot_bytes[tier.layout.groups[group].name], chain.keys(group)
    memory = aligned_buffer((wanted.size + 1) * (size + BLOCK_BYTES))
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(-1, size + BLOCK_BYTES)
    rows[:] = 0xA5
    pages = Pages(chain, group, wanted, memory, np.arange(wanted.size, dtype=np.int64) * (size + BLOCK_BYTES))
    ended, answers = threading.Event(), []

    def done(results: Any) -> None:
        answers.extend(results)
        ended.set()

    tier.load([pages], done)
    assert ended.wait(LIMIT_SECONDS)
    assert (rows[:, size:] == 0xA5).all()
    assert (rows[-1] == 0xA5).all()
    for i, block in enumerate(wanted.tolist()):
        if answers[0][i]:
            same = (rows[i, :size] == content(group, keys[block], size)).all()
            assert same, f"wrong bytes: group {group}, block {block}"
    return wanted[answers[0]].tolist()


def load_all(tier: NVMeTier, chain: Chain) -> dict[int, list[int]]:
    """`load` for all blocks of all groups."""
    return {g: load(tier, chain, g, range(chain.num_blocks(g))) for g in kept_groups(tier.layout)}


def whole(layout: CacheLayout, chain: Chain) -> dict[int, list[int]]:
    """What `load_all` says if nothing lacks."""
    return {g: list(range(chain.num_blocks(g))) for g in kept_groups(layout)}


def namespace_path(tier: NVMeTier) -> Path:
    """Directory of a tier's namespace."""
    return tier.path
