"""A compute kernel that copies many small pieces between device and pinned host memory.

Copy engines pay a fixed price per piece; threads that read one side and write the other do not.
"""

from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kvquilt.transfer.device import Addresses

__all__ = ["word_copy"]

WORDS_PER_STEP = 1024
"""64-bit words that one program moves at a time (8 KiB)."""
PROGRAMS = 16
"""Few: the link to the host is full long before the device is, and the engine needs the rest."""


@triton.jit(do_not_specialize=["num_pieces"])  # one compilation serves every job
def _copy_words(table, num_pieces, words_per_step: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row i of the table: destination, source (addresses), words."""
    lane = tl.arange(0, words_per_step)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        dst = tl.load(table + 3 * piece).to(tl.pointer_type(tl.int64))
        src = tl.load(table + 3 * piece + 1).to(tl.pointer_type(tl.int64))
        words = tl.load(table + 3 * piece + 2)
        for start in range(0, words, words_per_step):
            at = start + lane
            inside = at < words
            tl.store(dst + at, tl.load(src + at, mask=inside), mask=inside)


def word_copy(device: Any, stream: Any, dst: Addresses, src: Addresses, size: Addresses) -> Any:
    """Give `stream` the copies dst[i] <- src[i] of size[i] bytes, all multiples of 8.

    Returns the tables, which must stay alive until the copies are done.
    """
    rows = np.stack([dst, src, size // 8], axis=1)
    host = torch.from_numpy(np.ascontiguousarray(rows)).pin_memory()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        table = host.to(device, non_blocking=True)
        _copy_words[(min(PROGRAMS, len(dst)),)](table, len(dst), words_per_step=WORDS_PER_STEP)
    return host, table
