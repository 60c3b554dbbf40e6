"""What all compiled code is made with: the decorator, and the one thing that the compiler does not offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba  # type: ignore[import-untyped,unused-ignore]
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["memcpy", "njit"]

F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """Compile lazily, without the interpreter's lock, and keep the machine code on disk where any place is
    writable for it."""
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no writable cache directory, e.g. a read-only installation without a home
        return cast(F, numba.njit(nogil=True)(function))


@intrinsic
def memcpy(typingctx: Any, dst: Any, src: Any, size: Any) -> Any:
    """memcpy(dst, src, size) on addresses, in compiled code. Nothing is checked.

    For KiB and more the C library is faster than a compiled loop.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
