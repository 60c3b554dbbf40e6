"""Cache groups of a model and what a boundary needs of each."""

from kvquilt.layout.groups import CacheGroup, GroupKind, first_needed_token, needed_blocks
from kvquilt.layout.layout import CacheLayout

__all__ = ["CacheGroup", "CacheLayout", "GroupKind", "first_needed_token", "needed_blocks"]
