"""The copier for the kind of memory that the engine's layers lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvquilt.errors import TransferError
from kvquilt.transfer.base import Copier, GroupPages
from kvquilt.transfer.host import HostCopier

__all__ = ["make_copier"]


def make_copier(
    groups: Sequence[GroupPages | None],
    arena_of: Sequence[int | None],
    rank: int,
    num_ranks: int,
    *,
    device_type: str,
    cpus: Iterable[int] | None = None,
) -> Copier:
    """A `HostCopier` for device_type "cpu", a `CudaCopier` for "cuda".

    cpus: CPUs for the copy threads of the host path. Raises TransferError for another device.
    """
    if device_type == "cpu":
        return HostCopier(groups, arena_of, rank, num_ranks, cpus=cpus)
    if device_type == "cuda":
        from kvquilt.transfer.cuda import CudaCopier  # needs a CUDA build of torch at construction

        return CudaCopier(groups, arena_of, rank, num_ranks)
    raise TransferError(f"layers in {device_type!r} memory: served are 'cpu' and 'cuda'")
