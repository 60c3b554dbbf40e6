"""Where the engine's pages lie, what is to be copied, and the interface of the copiers.

A page is described by addresses alone: (offset of a block, bytes) pieces from the tensor's
storage offset, strides and item size. Two tensors of equal shape can hold their blocks in
different places, so the order of the axes is never guessed from the shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvquilt.errors import TransferError

__all__ = [
    "ArenaView",
    "Completion",
    "Copier",
    "GroupPages",
    "LayerPages",
    "PageCopies",
    "check_shared_memory",
    "layer_pages",
]

UNCHECKED = -1


@dataclass(frozen=True)
class LayerPages:
    """Where each block of one layer lies.

    base_address: address of block 0 (bytes). block_stride_bytes: from one block to the next.
    fragments: (offset from the block's address, bytes) of each contiguous piece, ascending; a
    page is these pieces one after another. tensor: keeps the memory alive.
    """

    name: str
    base_address: int
    block_stride_bytes: int
    num_blocks: int
    fragments: tuple[tuple[int, int], ...]
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return sum(size for _, size in self.fragments)

    @property
    def device_type(self) -> str:
        """The kind of memory: "cpu", "cuda"."""
        return "cpu" if self.tensor is None else self.tensor.device.type


def layer_pages(name: str, tensor: torch.Tensor, num_blocks: int, *, block_dim: int = 0) -> LayerPages:
    """Describe the blocks of `tensor` by its storage offset, strides and item size.

    block_dim: the axis that counts blocks; the caller knows it. Its size may be a multiple
    `r` of num_blocks (the engine's kernels use smaller blocks): block b then is the kernel
    blocks [b*r, (b+1)*r), all of them.

    Raises TransferError with the layer's name: no such axis, num_blocks not positive, the axis
    is not a multiple of it, elements that share memory (broadcast or overlapping strides).
    """
    if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
        raise TransferError(f"layer {name!r}: num_blocks={num_blocks!r}: must be a positive integer")
    if not -tensor.dim() <= block_dim < tensor.dim():
        raise TransferError(f"layer {name!r}: block_dim={block_dim}: the tensor has {tensor.dim()} axes")
    block_dim %= tensor.dim()
    shape, item = tuple(tensor.shape), tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    if shape[block_dim] == 0 or shape[block_dim] % num_blocks:
        raise TransferError(
            f"layer {name!r}: axis {block_dim} of shape {shape} is not a multiple of {num_blocks} blocks"
        )
    ratio = shape[block_dim] // num_blocks
    storage = tensor.untyped_storage()
    start = int(tensor.storage_offset()) * item
    fragments: tuple[tuple[int, int], ...] = ()
    if tensor.numel():
        _check_strides(name, shape, strides, item, storage.nbytes() - start)
        inner = [(n, s) for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if d != block_dim]
        fragments = _fragments([*inner, (ratio, strides[block_dim])], item)
    return LayerPages(
        name=name,
        base_address=int(storage.data_ptr()) + start,
        block_stride_bytes=strides[block_dim] * ratio,
        num_blocks=num_blocks,
        fragments=fragments,
        tensor=tensor,
    )


def _check_strides(
    name: str, shape: Sequence[int], strides: Sequence[int], item: int, room_bytes: int
) -> None:
    """Every element has bytes of its own inside the storage: each axis steps over all that the
    axes with smaller strides span."""
    span = item
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < span:
            raise TransferError(
                f"layer {name!r}: shape {tuple(shape)} with strides of {tuple(strides)} bytes: elements "
                f"share memory (broadcast or overlapping), so pages cannot be told apart"
            )
        span += (size - 1) * stride
    if span > room_bytes:
        raise TransferError(f"layer {name!r}: spans {span} bytes, its storage has {room_bytes} from there")


def _fragments(axes: Sequence[tuple[int, int]], item: int) -> tuple[tuple[int, int], ...]:
    """Contiguous pieces of one block, by offset; axes: (size, stride in bytes)."""
    run = item
    outer: list[range] = []
    for stride, size in sorted((s, n) for n, s in axes if n > 1):
        if stride == run and not outer:
            run *= size
        else:
            outer.append(range(0, size * stride, stride))
    offsets = sorted(sum(steps) for steps in itertools.product(*outer))
    return tuple((offset, run) for offset in offsets)


@dataclass(frozen=True)
class GroupPages:
    """The layers of one cache group, in the order in which a page holds them.

    page_bytes: bytes of one block over all layers. Pass what the layout says: a difference is
    an error here, before anything is copied. Left out, it is the sum over the layers.
    replicated: all ranks hold the same bytes, so a slot holds one page, which all of them read.

    Raises TransferError if the sizes differ or the layers differ in their number of blocks.
    """

    name: str
    layers: tuple[LayerPages, ...]
    page_bytes: int = UNCHECKED
    replicated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        total = sum(layer.page_bytes for layer in self.layers)
        if self.page_bytes not in (UNCHECKED, total):
            raise TransferError(
                f"cache group {self.name!r}: its layers hold {total} bytes per block, the layout says "
                f"{self.page_bytes}"
            )
        object.__setattr__(self, "page_bytes", total)
        counts = {layer.num_blocks for layer in self.layers}
        if len(counts) > 1:
            raise TransferError(
                f"cache group {self.name!r}: layers with {sorted(counts)} blocks in one group"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks that the engine's tensors hold; 0 without layers."""
        return self.layers[0].num_blocks if self.layers else 0

    def fragment_runs(self) -> list[tuple[int, int, int]]:
        """(address in block 0, block stride, bytes) of each piece of a page, in page order.

        Pieces that follow one another in memory in every block are one piece.
        """
        runs: list[tuple[int, int, int]] = []
        for layer in self.layers:
            for offset, size in layer.fragments:
                address, stride = layer.base_address + offset, layer.block_stride_bytes
                if runs and runs[-1][1] == stride and runs[-1][0] + runs[-1][2] == address:
                    address, size = runs[-1][0], runs[-1][2] + size
                    runs.pop()
                runs.append((address, stride, size))
        return runs


def check_shared_memory(groups: Iterable[GroupPages]) -> None:
    """Refuse layers that lie in the same memory but step from block to block at different distances.

    Groups may share memory, since a block belongs to one of them at a time; but then block b must be the
    same place for all, or one group's block lies over another's. Raises TransferError.
    """
    seen: list[tuple[int, int, str, LayerPages]] = []
    for group in groups:
        for layer in group.layers:
            reach = max((offset + size for offset, size in layer.fragments), default=0)
            first = layer.base_address
            end = first + (layer.num_blocks - 1) * layer.block_stride_bytes + reach
            for other_first, other_end, other_group, other in seen:
                apart = end <= other_first or other_end <= first
                if not apart and layer.block_stride_bytes != other.block_stride_bytes:
                    raise TransferError(
                        f"cache groups {other_group!r} and {group.name!r}: layers {other.name!r} and "
                        f"{layer.name!r} lie in the same memory, but their blocks are "
                        f"{other.block_stride_bytes} and {layer.block_stride_bytes} bytes apart, so a "
                        "block of one lies over another block of the other"
                    )
            seen.append((first, end, group.name, layer))


@dataclass
class PageCopies:
    """What one job copies: entry i is block[i] of group[i] and slot[i] of the group's arena.

    group: int32[n], block: int64[n], slot: int64[n]; any integer arrays are taken and converted.
    Not to be changed once submitted.
    Raises TransferError if the arrays are not flat, not integers or differ in length.
    """

    group: NDArray[np.integer[Any]]
    block: NDArray[np.integer[Any]]
    slot: NDArray[np.integer[Any]]

    def __post_init__(self) -> None:
        group = _indices("group", self.group)
        self.group = group.clip(-1, np.iinfo(np.int32).max).astype(np.int32)  # never wraps into range
        self.block = _indices("block", self.block)
        self.slot = _indices("slot", self.slot)
        if not len(self.group) == len(self.block) == len(self.slot):
            sizes = len(self.group), len(self.block), len(self.slot)
            raise TransferError(f"page copies: {sizes} groups, blocks and slots")

    def __len__(self) -> int:
        return len(self.group)


def _indices(name: str, values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TransferError(f"page copies: {name} is {array.dtype}{list(array.shape)}: must be flat integers")
    return np.ascontiguousarray(array, dtype=np.int64)


@dataclass(frozen=True)
class ArenaView:
    """The slots of one arena in this process: slot s is at address + s * slot_stride (bytes).

    buffer: whatever keeps the mapping alive.
    """

    address: int
    num_slots: int
    slot_stride: int
    buffer: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, buffer: Any, slot_stride: int) -> ArenaView:
        """View of a writable buffer (mmap, memoryview, array) as whole slots."""
        array = np.frombuffer(buffer, dtype=np.uint8)
        if not array.flags.writeable:
            raise TransferError("arena: the buffer is read-only")
        return cls(array.ctypes.data, array.size // slot_stride, slot_stride, array)


@dataclass(frozen=True)
class Completion:
    """The end of one job: no byte of its blocks or slots is touched any more.

    pages, num_bytes: what was copied between blocks and slots; 0 if not ok.
    seconds: from submission to the end.
    """

    job_id: int
    ok: bool
    pages: int
    num_bytes: int
    seconds: float
    error: str | None = None


class Copier(Protocol):
    """Copies pages between the engine's tensors and slots, off the engine's thread.

    A job that cannot be done (an index out of range, the null block, no arenas yet) ends with
    `ok=False` and copies nothing. A job is never given up half-way: until its Completion is
    out, its blocks and slots belong to it, whatever became of the request.

    pins_memory: does `attach` pin the arenas? Pinned memory is never moved again: it should be there by then.
    """

    @property
    def pins_memory(self) -> bool: ...

    def attach(self, arenas: Sequence[ArenaView]) -> None:
        """Make the arenas known; once. CUDA: pins them, which takes long. Raises TransferError."""

    def save(self, job_id: int, copies: PageCopies) -> None:
        """Blocks -> slots, after the work that the engine has submitted so far.

        Raises TransferError if closed or if `job_id` is still pending.
        """

    def load(self, job_id: int, copies: PageCopies, zero: PageCopies | None = None) -> None:
        """Slots -> blocks, after the work that the engine has submitted so far.

        zero: blocks to fill with zeros instead (their slots are ignored). Raises as `save`.
        """

    def poll(self) -> list[Completion]:
        """Jobs that ended since the last call, each once. Never blocks."""

    def wait(self, job_id: int, timeout: float | None) -> bool:
        """Wait until the job has ended (True) or `timeout` seconds passed (False).

        True for a job that is not pending. Its Completion still comes from `poll`.
        """

    def pending(self) -> int:
        """Jobs submitted whose copies have not ended."""

    def close(self) -> None:
        """Wait for running copies, fail the ones not begun, end the threads. Twice is harmless."""
