"""The peer of `compare_native.py`: vLLM's own offloading on a machine without an accelerator.

vLLM's `OffloadingConnector` decides what to store, looks it up, evicts it; vLLM's
`CPUOffloadingManager` owns the rows. Only the worker that moves the bytes is ours, since vLLM's
needs CUDA streams: here it is one memcpy per page between the engine's tensors and one pool of
rows, done at once on the engine's own thread. At about a megabyte per prompt that is the
fastest that there is: no thread to wake, and the load has ended in the step that began it.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence

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
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["MemcpySpec", "MemcpyWorker"]


class MemcpyWorker(OffloadingWorker):
    """Copies pages between the engine's tensors and `num_rows` rows of `row_bytes` bytes.

    A block of any group takes a whole row, as in vLLM's own worker: the page of tensor i lies
    after those of the tensors before it.
    """

    def __init__(self, caches: CanonicalKVCaches, num_rows: int, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._caches = caches
        # Written once, so that no save waits for a page fault; kvquilt's pools are faulted in, too.
        self._pool = np.full((num_rows, row_bytes), 0, dtype=np.uint8)
        self._pool.fill(0)
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
        if self.blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk={self.blocks_per_chunk}: only 1 is served here")
        return MemcpyWorker(kv_caches, self.num_chunks, self.kv_bytes_per_chunk)
