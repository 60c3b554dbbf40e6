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
from kvquilt.transfer.host import HostCopier

__all__ = [
    "ArenaView",
    "Completion",
    "Copier",
    "GroupPages",
    "HostCopier",
    "LayerPages",
    "PageCopies",
    "layer_pages",
]
