"""Places below host RAM that keep pages: the protocol, the NVMe tier, and the ways down and up."""

from kvquilt.tiers.base import GroupTierStats, Loaded, Pages, Tier, TierStats
from kvquilt.tiers.memory import RamMemory
from kvquilt.tiers.nvme import DiskOptions, NVMeTier
from kvquilt.tiers.promotion import Promoter
from kvquilt.tiers.ram import RamTier
from kvquilt.tiers.writeback import WriteBack

__all__ = [
    "DiskOptions",
    "GroupTierStats",
    "Loaded",
    "NVMeTier",
    "Pages",
    "Promoter",
    "RamMemory",
    "RamTier",
    "Tier",
    "TierStats",
    "WriteBack",
]
