"""What lies below host RAM: the disk tier, its way down and its way up, as the scheduler side uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvquilt.config import Options
from kvquilt.errors import ConfigError
from kvquilt.layout import CacheLayout
from kvquilt.layout.namespace import NamespaceFactors
from kvquilt.sizing import SlotPlan
from kvquilt.store import Chain, Store, Want
from kvquilt.tiers import DiskOptions, NVMeTier, Promoter, RamMemory, TierStats, WriteBack

__all__ = ["Below", "DataParallelRank"]

IDLE_SECONDS = 0.001
"""How long an engine with nothing else to do waits for a disk before it asks again."""


def queue_bytes(ram_bytes: int) -> int:
    """Bytes that may wait to be written: what is queued can't be evicted, so a quarter of host RAM, half
    of a small one, and never more than 256 MiB."""
    return min(256 << 20, max(ram_bytes // 4, min(64 << 20, ram_bytes // 2)))


DataParallelRank = tuple[int, int]
"""(index, number of ranks)."""


class Below:
    """The disk tier under one store. Used on the scheduler's thread only.

    rank: of the data-parallel ranks, each of which has a directory and a share of its own.
    Raises ConfigError as `NVMeTier` does.
    """

    def __init__(
        self,
        store: Store,
        layout: CacheLayout,
        plan: SlotPlan,
        options: Options,
        namespace: NamespaceFactors,
        *,
        state_interval: int | None,
        optional: frozenset[str],
        rank: DataParallelRank,
        clock: Callable[[], float],
    ) -> None:
        if options.disk_path is None:
            raise ConfigError("disk_path is not given")
        self._adapters_too = options.disk_lora
        self.tier = NVMeTier(
            layout,
            namespace,
            DiskOptions(
                Path(options.disk_path),
                options.disk_budget_bytes,
                write=options.disk_write,
                threads=options.disk_threads,
                reclaim=options.disk_reclaim,
                dp_rank=rank[0],
                dp_size=rank[1],
                queue_bytes=queue_bytes(options.budget_bytes),
            ),
            num_ranks=plan.num_ranks,
            partition=plan.partition,
            checkpoint_interval=options.planned_checkpoint_interval,
            state_interval=state_interval,
            optional=optional,
        )
        memory = self._memory = RamMemory(store)
        self._write_back: WriteBack | None = None
        if options.disk_write != "never":
            self._write_back = WriteBack(
                store, self.tier, layout, memory, partition=plan.partition, when=options.disk_write
            )
        self.promoter = Promoter(
            store,
            self.tier,
            layout,
            memory,
            timeout_seconds=options.load_timeout_seconds,
            clock=clock,
            room_taken=self._write_back.look_ahead if self._write_back is not None else lambda: None,
            room_soon=self._write_back.holds_slots if self._write_back is not None else lambda: False,
        )

    def committed(self, wants: Sequence[Want]) -> None:
        """These pages have become visible in host RAM."""
        if self._write_back is not None:
            self._write_back.committed(wants)

    def is_durable(self, *, adapter: bool) -> bool:
        """May pages of a request stay on disk? An adapter that is trained again in place keeps its name."""
        return self._adapters_too or not adapter

    def touch(self, chain: Chain, tokens: int) -> None:
        """A request has used this prefix."""
        self.tier.touch(chain, tokens)

    def breathe(self) -> None:
        """The engine computes nothing: let the threads work while something is on its way."""
        if self.promoter.under_way():
            self.promoter.wait_briefly(IDLE_SECONDS)

    def reset(self) -> bool:
        """Forget all pages; False if a process that is killed now might find them again."""
        return self.tier.reset()

    @property
    def not_durable(self) -> int:
        """Pages that were kept off the disk because of their adapter."""
        return self._write_back.not_durable if self._write_back is not None else 0

    @property
    def left_unwritten(self) -> int:
        """Pages that left host RAM before they could be offered to the disk."""
        return self._write_back.left_unwritten if self._write_back is not None else 0

    def stats(self) -> TierStats:
        """Counters and levels of the tier."""
        return self.tier.stats()

    def close(self) -> None:
        """Write what is queued, briefly; then end. The store must still be open."""
        self.promoter.close()
        self.tier.close()
        self._memory.close()
