"""References on the engine's blocks that transfers hold, beyond any request's life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

__all__ = ["MAX_PINNED_SHARE", "MAX_STEP_SHARE", "MIN_PINNED_BLOCKS", "PinBook"]

MAX_PINNED_SHARE = 0.02
MAX_STEP_SHARE = 0.25
MIN_PINNED_BLOCKS = 64


class PinBook:
    """Takes and returns references on blocks, and knows which blocks only pins keep from the engine.

    A pin on a block that a live request holds costs the engine nothing; one on a block that
    everyone else has freed does. So the cap is on the latter: 2 % of the pool, but at least what
    one engine step fills and 64 blocks, as long as that is no more than a quarter of the pool:
    windows slide on before a copy can end, and what is not pinned by then is lost.

    Used on the scheduler's thread only.
    """

    def __init__(self, pool: BlockPool, blocks_per_step: int = 0) -> None:
        self._pool = pool
        self._pins: Counter[int] = Counter()
        size = pool.num_gpu_blocks
        one_step = min(blocks_per_step, int(size * MAX_STEP_SHARE))
        few = min(MIN_PINNED_BLOCKS, int(size * MAX_STEP_SHARE))
        self.cap = max(1, int(size * MAX_PINNED_SHARE), one_step, few)

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block; an id may come twice."""
        blocks = self._pool.blocks
        self._pool.touch([blocks[i] for i in block_ids])
        self._pins.update(block_ids)

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Return one reference on each block, last block first, so that a chain's tail is
        evicted before its head."""
        ids = list(block_ids)[::-1]
        self._pins.subtract(ids)
        for block_id in ids:
            if self._pins[block_id] <= 0:
                del self._pins[block_id]
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[i] for i in ids])

    def holds(self, block_id: int, block_hash: bytes) -> bool:
        """Does the engine itself name that block by this hash?"""
        key = self._pool.blocks[block_id].block_hash
        return key is not None and bytes(get_block_hash(key)) == block_hash

    def exclusive(self) -> int:
        """Blocks that nothing but pins keeps from the engine."""
        blocks = self._pool.blocks
        return sum(blocks[i].ref_cnt <= count for i, count in self._pins.items())

    def all_that_is_used(self) -> bool:
        """True if pins alone hold every used block, so a cache reset waits for nothing else."""
        used = self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() - 1  # less the null block
        return bool(used == self.exclusive())
