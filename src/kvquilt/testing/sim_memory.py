"""Simulated KV memory, laid out as in the engine: one allocation that the layers of all groups share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvquilt.testing.sim_fingerprint import POISON, layer_constants
from kvquilt.testing.sim_shapes import GroupShape, HarnessError

if TYPE_CHECKING:
    import torch

__all__ = ["SimLayer", "SimMemory", "StrayWrite"]


class StrayWrite(HarnessError):
    """Something wrote to a block that nobody holds, or to the null block."""


@dataclass(frozen=True)
class SimLayer:
    """One layer's pages in the shared allocation.

    words: view of shape (num_blocks, entries of a block, words of an entry): an entry is a token's
    KV, or the one state of a recurrent block.
    tensor: the engine's view of the same bytes, shape (num_blocks, 1, entries, width).
    """

    name: str
    group: int
    words: NDArray[np.uint64]
    tensor: torch.Tensor
    constants: NDArray[np.uint64]


class SimMemory:
    """The KV memory of one rank: one allocation that all groups share, as the engine lays it out.

    config: the engine's KVCacheConfig, with its `kv_cache_tensors` filled in.
    """

    def __init__(self, config: Any, shapes: Sequence[GroupShape], rank: int) -> None:
        import torch
        from vllm.v1.kv_cache_interface import create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        self.rank = rank
        self.num_blocks: int = config.num_blocks
        size = max(tensor.size for tensor in config.kv_cache_tensors)
        self._raw = torch.full((size // 8,), int(POISON.astype(np.int64)), dtype=torch.int64)
        raw_words = self._raw.numpy().view(np.uint64)
        self.layers: list[SimLayer] = []
        group_of = {name: i for i, g in enumerate(config.kv_cache_groups) for name in g.layer_names}
        for place in config.kv_cache_tensors:
            index = group_of[place.layers[0]]
            shape, group = shapes[index], config.kv_cache_groups[index]
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(
                place.layers[0], group.kv_cache_spec
            )
            layout = KVCacheLayout[config.kv_cache_layout]
            views = create_kv_cache_views(self._raw.view(torch.int8), spec, self.num_blocks, layout, place)
            for i, (name, tensor) in enumerate(zip(place.layers, views, strict=True)):
                number = group.layer_names.index(name)
                entry = shape.layer_entry_bytes(number)
                words = np.lib.stride_tricks.as_strided(
                    raw_words[(place.offset + i * place.layer_stride) // 8 :],
                    shape=(self.num_blocks, shape.layer_page_bytes(number) // entry, entry // 8),
                    strides=(place.block_stride, entry, 8),
                )
                constants = layer_constants(index, number, 0 if shape.replicated else rank, entry // 8)
                self.layers.append(SimLayer(name, index, words, tensor, constants))
        # Blocks that nobody holds and whose contents nobody may read; the null block always is one.
        self._idle = np.zeros(self.num_blocks, dtype=bool)
        self._idle[0] = True

    @property
    def kv_caches(self) -> dict[str, torch.Tensor]:
        """What `register_kv_caches` takes: one tensor per layer, all over one storage."""
        return {layer.name: layer.tensor for layer in self.layers}

    def recycle(self, fresh: Iterable[int], freed: Iterable[int]) -> None:
        """Poison blocks that were handed out (`fresh`) or given back without a hash (`freed`).

        Raises StrayWrite if a block was written while nobody held it.
        """
        fresh_ids = np.fromiter(fresh, dtype=np.int64)
        freed_ids = np.fromiter(freed, dtype=np.int64)
        self.check_idle(fresh_ids[self._idle[fresh_ids]])
        changed = np.concatenate([fresh_ids, freed_ids])
        for layer in self.layers:
            layer.words[changed] = POISON
        self._idle[fresh_ids] = False
        self._idle[freed_ids] = True

    def prepare(self, zero: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """What the scheduler wants done before a forward pass: blocks zeroed, then (from, to) copied."""
        sources, targets = [source for source, _ in copies], [target for _, target in copies]
        for layer in self.layers:
            layer.words[list(zero)] = 0
        for layer in self.layers:
            layer.words[targets] = layer.words[sources]

    def check_idle(self, blocks: NDArray[np.int64] | None = None) -> None:
        """Raise StrayWrite if an idle block (one of `blocks`, or any) or the null block was written."""
        ids = np.flatnonzero(self._idle) if blocks is None else np.append(blocks, 0)
        for layer in self.layers:
            touched = (layer.words[ids] != POISON).any(axis=(1, 2))
            if touched.any():
                block = int(ids[touched][0])
                what = "the null block" if block == 0 else f"block {block}, which nobody holds,"
                raise StrayWrite(
                    f"rank {self.rank}: {what} was written (group {layer.group}, layer {layer.name})"
                )
