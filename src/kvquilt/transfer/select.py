"""The copier that fits the memory in which the engine's tensors lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvquilt.errors import TransferError
from kvquilt.transfer.base import Copier, GroupPages
from kvquilt.transfer.cuda import CudaCopier
from kvquilt.transfer.host import HostCopier
from kvquilt.transfer.plan import ArenaOf

__all__ = ["copier_for"]


def copier_for(
    groups: Sequence[GroupPages | None],
    arena_of: ArenaOf,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    num_threads: int = 2,
    cpus: Iterable[int] | None = None,
) -> Copier:
    """`HostCopier` for tensors in host memory, `CudaCopier` for CUDA.

    num_threads, cpus: of the host copier. Raises TransferError for any other memory, for
    tensors of several kinds at once, and as the copiers do.
    """
    kinds = {layer.device_type for group in groups if group for layer in group.layers}
    if kinds <= {"cpu"}:
        return HostCopier(groups, arena_of, rank, num_ranks, num_threads, cpus=cpus)
    if kinds == {"cuda"}:
        return CudaCopier(groups, arena_of, rank, num_ranks)
    raise TransferError(f"the engine's tensors lie in {sorted(kinds)} memory: only all cpu or all cuda works")
