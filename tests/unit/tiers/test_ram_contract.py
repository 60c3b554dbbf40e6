"""Host RAM as a tier, as it is and with ends that are told late."""

from __future__ import annotations

import pytest

from kvquilt.errors import SizingError
from kvquilt.testing.tier_contract import SOURCES, MakeTier, TierContract
from kvquilt.testing.tier_faults import FaultyTier
from kvquilt.testing.tier_pages import PageSource
from kvquilt.tiers import RamTier


def ram(source: PageSource, num_bytes: int) -> RamTier:
    return RamTier(source.layout, num_bytes, num_ranks=source.num_ranks, partition=source.partition)


class TestRamTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return ram


class TestLateRamTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return lambda source, num_bytes: FaultyTier(ram(source, num_bytes))


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(SizingError, match="bytes"):
        ram(SOURCES["full and sliding"](), 4096)
