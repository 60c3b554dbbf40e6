"""What may be saved: blocks of one request and group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvquilt.vllm.requests import RequestState

__all__ = ["Candidate"]


@dataclass
class Candidate:
    """Blocks of one request and group that are written, hashed, wanted and not null.

    num_fresh: those that were not postponed before.
    """

    state: RequestState
    group: int
    blocks: NDArray[np.int64]
    block_ids: NDArray[np.int64]
    num_fresh: int
