"""The peer of `compare_native.py` and `compare_disk.py`: vLLM's own offloading on a machine without an
accelerator.

vLLM's `OffloadingConnector` decides what to store, looks it up, evicts it; vLLM's
`CPUOffloadingManager` owns the rows, and its `TieringOffloadingManager` what moves between them and
files. Only the worker that moves the bytes is ours, since vLLM's
needs CUDA streams: here it is one memcpy per page between the engine's tensors and one pool of
rows, done at once on the engine's own thread. At about a megabyte per prompt that is the
fastest that there is: no thread to wake, and the load has ended in the step that began it.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["MemcpySpec", "MemcpyWorker", "TieredMemcpySpec"]


class MemcpyWorker(OffloadingWorker):
    """Copies pages between the engine's tensors and rows. pool: uint8, shape (rows, row bytes).
    release: called at the end, when the pool is no longer used.

    A block of any group takes a whole row, as in vLLM's own worker: the page of tensor i lies
    after those of the tensors before it.
    """

    def __init__(
        self, caches: CanonicalKVCaches, pool: NDArray[np.uint8], release: Callable[[], None] | None = None
    ) -> None:
        self.row_bytes = row_bytes = pool.shape[1]
        self._release = release
        self._caches = caches
        self._pool = pool
        sizes = [tensor.page_size_bytes for tensor in caches.tensors]
        self._offsets = [0, *itertools.accumulate(sizes)]
        if self._offsets[-1] > row_bytes:
            raise ValueError(f"pages of {self._offsets[-1]} bytes do not fit in rows of {row_bytes} bytes")
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._copy(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._copy(job_id, dst_spec, src_spec, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy ends before its submission returns."""

    def shutdown(self) -> None:
        self._pool = self._pool[:0].copy()
        if self._release is not None:
            self._release()

    def content(self) -> list[list[tuple[int, int]]]:
        """Per group: where in a row its pages lie, as (offset, bytes); the rest is not used."""
        return [
            [(self._offsets[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
            for refs in self._caches.group_data_refs
        ]

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, host: LoadStoreSpec, *, store: bool) -> None:
        if not isinstance(host, BlockIDsLoadStoreSpec):
            raise TypeError(f"rows are named by their number, not by {type(host).__name__}")
        begin, moved, first = time.perf_counter(), 0, 0
        for refs, count in zip(self._caches.group_data_refs, engine.group_sizes, strict=True):
            part = slice(first, first + count)
            moved += self._copy_group(refs, engine.block_ids[part], host.block_ids[part], store)
            first += count
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - begin))

    def _copy_group(
        self,
        refs: Sequence[CanonicalKVCacheRef],
        blocks: NDArray[np.int32],
        rows: NDArray[np.int32],
        store: bool,
    ) -> int:
        moved = 0
        for ref in refs:
            tensor = self._caches.tensors[ref.tensor_idx].tensor
            inside = tensor.data_ptr() + blocks.astype(np.int64) * (tensor.stride(0) * tensor.element_size())
            outside = self._pool.ctypes.data + rows.astype(np.int64) * self.row_bytes
            outside += self._offsets[ref.tensor_idx]
            targets, sources = (outside, inside) if store else (inside, outside)
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, ref.page_size_bytes)
            moved += ref.page_size_bytes * len(blocks)
        return moved


class MemcpySpec(CPUOffloadingSpec):
    """vLLM's CPU spec with another worker. Raises ValueError for chunks of several blocks."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        _check_chunks(self)
        # Written once, so that no save waits for a page fault; kvquilt's pools are faulted in, too.
        pool = np.full((self.num_chunks, self.kv_bytes_per_chunk), 0, dtype=np.uint8)
        pool.fill(0)
        return MemcpyWorker(kv_caches, pool)


class TieredMemcpySpec(TieringOffloadingSpec):
    """vLLM's spec with tiers below host memory, with another worker over the same shared rows: manager,
    rows and file tier are vLLM's. Raises ValueError for chunks of several blocks, or several ranks."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        _check_chunks(self)
        if self.config.parallel.world_size != 1:
            raise ValueError(f"{self.config.parallel.world_size} ranks: only 1 is served here")
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        pool = region.base_tensor.view(self.num_chunks, self.kv_bytes_per_chunk).numpy().view(np.uint8)
        return MemcpyWorker(kv_caches, pool, region.cleanup)


def _check_chunks(spec: CPUOffloadingSpec) -> None:
    if spec.blocks_per_chunk != 1:
        raise ValueError(f"blocks_per_chunk={spec.blocks_per_chunk}: only 1 is served here")
