"""Compiled loops over pages: one call copies many pages without the interpreter's lock.

Written stores go around the caches where that is faster: a page is far larger than what a
core's cache keeps, and an ordinary store first reads the line that it overwrites.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kvquilt.compiled import memcpy, njit

__all__ = ["STREAMING", "copy_pages", "zero_pages"]

LINE = 64
STREAM_FROM_BYTES = 2048
"""Smaller pieces are copied with memcpy: their ends, not their middle, cost the time."""
STREAMING = platform.machine() in ("x86_64", "AMD64")
_VECTOR = ir.VectorType(ir.IntType(64), 8)
_VOID = ir.VoidType()


@intrinsic
def _memzero(typingctx: Any, dst: Any, size: Any) -> Any:
    """Fill `size` bytes at address `dst` with zeros."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _stream_line(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copy 64 bytes to an aligned address with stores that bypass the caches."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _VECTOR.as_pointer()
        value = builder.load(builder.inttoptr(args[1], pointer), align=1)
        store = builder.store(value, builder.inttoptr(args[0], pointer), align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _fence(typingctx: Any) -> Any:
    """Streamed stores are visible to other threads before anything that follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        if STREAMING:
            kind = ir.FunctionType(_VOID, [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def _copy(dst: int, src: int, size: int, streaming: bool) -> None:
    if not streaming or size < STREAM_FROM_BYTES:
        memcpy(dst, src, size)
        return
    head = -dst % LINE
    lines = (size - head) // LINE
    if head:
        memcpy(dst, src, head)
    for i in range(lines):
        _stream_line(dst + head + i * LINE, src + head + i * LINE)
    done = head + lines * LINE
    if done < size:
        memcpy(dst + done, src + done, size - done)


@njit
def copy_pages(
    group: Any,
    block: Any,
    slot: Any,
    first: Any,
    address: Any,
    stride: Any,
    size: Any,
    offset: Any,
    arena_address: Any,
    slot_stride: Any,
    to_slots: bool,
    streaming: bool,
) -> None:
    """Copy entries (group, block, slot) between blocks and slots; tables as in `plan.Tables`.

    Nothing is checked here. The bytes are visible to every thread when it returns.
    """
    for i in range(group.size):
        g = group[i]
        page = arena_address[g] + slot[i] * slot_stride[g]
        for f in range(first[g], first[g + 1]):
            engine = address[f] + block[i] * stride[f]
            host = page + offset[f]
            if to_slots:
                _copy(host, engine, size[f], streaming)
            else:
                _copy(engine, host, size[f], streaming)
    _fence()


@njit
def zero_pages(group: Any, block: Any, first: Any, address: Any, stride: Any, size: Any) -> None:
    """Fill blocks with zeros; tables as in `plan.Tables`."""
    for i in range(group.size):
        g = group[i]
        for f in range(first[g], first[g + 1]):
            _memzero(address[f] + block[i] * stride[f], size[f])
