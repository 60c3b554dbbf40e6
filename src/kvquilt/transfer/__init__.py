"""Gather and scatter between the engine's tensors and the slots of the store."""

from kvquilt.transfer.base import (
    ArenaView,
    Completion,
    Copier,
    GroupPages,
    LayerPages,
    PageCopies,
    check_shared_memory,
    layer_pages,
)
from kvquilt.transfer.cuda import CudaCopier
from kvquilt.transfer.factory import make_copier
from kvquilt.transfer.host import HostCopier

__all__ = [
    "ArenaView",
    "Completion",
    "Copier",
    "CudaCopier",
    "GroupPages",
    "HostCopier",
    "LayerPages",
    "PageCopies",
    "check_shared_memory",
    "layer_pages",
    "make_copier",
]
