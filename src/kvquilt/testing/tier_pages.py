"""Pages for tests of a tier, whose right bytes follow from what names them.

So whoever holds a page can tell whether it is the right one, without a copy of what was saved.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheLayout
from kvquilt.sizing import Partition, plan_slots
from kvquilt.store import Chain
from kvquilt.tiers.base import Pages, Tier

__all__ = ["Ended", "PageSource"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_BLANK = 0xA5


class Ended:
    """A `done` that counts its calls. results: what the last one was given. then: called by each."""

    def __init__(self) -> None:
        self.calls = 0
        self.then: Callable[[], object] | None = None
        self.results: Sequence[BoolArray] = ()
        self._lock = threading.Lock()
        self._called = threading.Event()

    def __call__(self, results: Sequence[BoolArray] = ()) -> None:
        with self._lock:
            self.calls += 1
        self.results = results
        if self.then is not None:
            self.then()
        self._called.set()

    def wait(self, timeout_seconds: float = 60.0) -> Sequence[BoolArray]:
        """Wait for the first call, and return what it was given. Raises TimeoutError."""
        if not self._called.wait(timeout_seconds):
            raise TimeoutError(f"done was not called within {timeout_seconds:.0f} s")
        return self.results


class PageSource:
    """Chains and pages of one layout. Slots as a tier of the same ranks and partition has them.

    ends: every `done` that was made here, to be counted when all is over.
    """

    def __init__(self, layout: CacheLayout, *, num_ranks: int = 1, partition: Partition = "solved") -> None:
        self.layout = layout
        self.num_ranks = num_ranks
        self.partition: Partition = partition
        self.ends: list[Ended] = []
        plan = plan_slots(layout, 1 << 50, num_ranks=num_ranks, partition=partition)
        self._slot_bytes = [plan.slot_bytes[group.name] for group in layout.groups]
        self._content_bytes = [group.slot_content_bytes(num_ranks) for group in layout.groups]

    @property
    def stored(self) -> list[int]:
        """Indices of the groups that keep pages."""
        return [i for i, size in enumerate(self._slot_bytes) if size]

    def content_bytes(self, group: int) -> int:
        """Bytes of a slot that mean anything: the pages of all ranks."""
        return self._content_bytes[group]

    def ended(self) -> Ended:
        """A new `done`."""
        ended = Ended()
        self.ends.append(ended)
        return ended

    def chain(self, name: str, num_tokens: int, *, after: Chain | None = None) -> Chain:
        """A prompt of `num_tokens` tokens; its first ones are those of `after`."""
        chain = Chain(self.layout)
        start, state = 0, b""
        if after is not None:
            start = len(after)
            chain.extend([row.tobytes() for row in after.hashes])
            state = after.hashes[-1].tobytes() if start else b""
        hashes = []
        for i in range(start, num_tokens // self.layout.tokens_per_hash):
            state = hashlib.sha256(state + f"{name} {i}".encode()).digest()
            hashes.append(state)
        chain.extend(hashes)
        return chain

    def content(self, chain: Chain, group: int, block: int) -> bytes:
        """The right bytes of one page."""
        name = hashlib.sha256(chain.keys(group)[block].tobytes() + bytes([group])).digest()
        draw = np.random.default_rng(np.frombuffer(name, dtype=np.uint64))
        return draw.bytes(self._content_bytes[group])

    def blank(self, chain: Chain, group: int, blocks: Iterable[int] | None = None) -> Pages:
        """Memory for these blocks of a group, all whole ones by default, that holds none of them."""
        wanted = range(chain.num_blocks(group)) if blocks is None else blocks
        which = np.asarray(list(wanted), dtype=np.int64)
        size = self._slot_bytes[group]
        memory = memoryview(mmap.mmap(-1, max(4096, which.size * size)))
        memory[:] = bytes([_BLANK]) * len(memory)
        # The slots lie in reverse, so that nobody may take them for a run.
        offsets = np.arange(which.size, dtype=np.int64)[::-1] * size
        return Pages(chain, group, which, memory, offsets)

    def pages(self, chain: Chain, group: int, blocks: Iterable[int] | None = None) -> Pages:
        """The same, with the right bytes in it."""
        pages = self.blank(chain, group, blocks)
        for block, offset in zip(pages.blocks.tolist(), pages.offsets.tolist(), strict=True):
            content = self.content(chain, group, block)
            pages.memory[offset : offset + len(content)] = content
        return pages

    def all_pages(self, chain: Chain) -> list[Pages]:
        """All whole blocks of every group that keeps pages."""
        return [self.pages(chain, group) for group in self.stored]

    def right(self, pages: Pages) -> BoolArray:
        """Which blocks lie in the memory, byte for byte."""
        out = np.zeros(pages.blocks.size, dtype=np.bool_)
        for i, (block, offset) in enumerate(zip(pages.blocks.tolist(), pages.offsets.tolist(), strict=True)):
            content = self.content(pages.chain, pages.group, block)
            out[i] = pages.memory[offset : offset + len(content)] == content
        return out

    def save(self, tier: Tier, chain: Chain, groups: Iterable[int] | None = None) -> int:
        """Save all blocks of these groups, and wait until they are there; how many were accepted."""
        ended = self.ended()
        wanted = self.stored if groups is None else groups
        accepted = tier.save([self.pages(chain, group) for group in wanted], ended)
        ended.wait()
        return accepted

    def load(self, tier: Tier, chain: Chain, group: int, blocks: Iterable[int] | None = None) -> BoolArray:
        """Load these blocks; which of them came. Raises AssertionError for one called good that is not."""
        pages, ended = self.blank(chain, group, blocks), self.ended()
        tier.load([pages], ended)
        (good,) = ended.wait()
        wrong = good & ~self.right(pages)
        if wrong.any():
            name = self.layout.groups[group].name
            raise AssertionError(f"{name}: blocks {pages.blocks[wrong].tolist()} came with wrong bytes")
        return good
