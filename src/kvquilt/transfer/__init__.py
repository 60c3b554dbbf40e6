"""Gather and scatter between the engine's tensors and the slots of the store."""

from kvquilt.transfer.base import (
    ArenaView,
    Completion,
    Copier,
    GroupPages,
    LayerPages,
    PageCopies,
    layer_pages,
)
from kvquilt.transfer.cuda import CudaCopier
from kvquilt.transfer.host import HostCopier
from kvquilt.transfer.select import copier_for

__all__ = [
    "ArenaView",
    "Completion",
    "Copier",
    "CudaCopier",
    "GroupPages",
    "HostCopier",
    "LayerPages",
    "PageCopies",
    "copier_for",
    "layer_pages",
]
