"""The NVMe tier: as it is, with ends that are told late, on a slow disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvquilt.testing.tier_contract import MakeTier, Reopen, TierContract
from kvquilt.testing.tier_faults import FaultyFiles, FaultyTier, FileFault
from kvquilt.testing.tier_pages import PageSource
from kvquilt.tiers import NVMeTier, Tier
from kvquilt.tiers.files import Files
from unit.tiers.tier_support import disk


class Opener:
    """Makes disk tiers, each in a directory of its own, and opens them again."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self._path = path
        self._files = files
        self._made: list[tuple[Tier, PageSource, int, Path]] = []

    def make(self, source: PageSource, num_bytes: int) -> NVMeTier:
        return self._open(source, num_bytes, self._path / str(len(self._made)))

    def reopen(self, tier: Tier) -> NVMeTier:
        _, source, num_bytes, path = next(made for made in self._made if made[0] is tier)
        tier.close()
        return self._open(source, num_bytes, path)

    def _open(self, source: PageSource, num_bytes: int, path: Path) -> NVMeTier:
        tier = disk(path, source, num_bytes, files=self._files)
        self._made.append((tier, source, num_bytes, path))
        return tier


class TestNVMeTier(TierContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return Opener(tmp_path)

    @pytest.fixture
    def make_tier(self, opener: Opener) -> MakeTier:
        return opener.make

    @pytest.fixture
    def reopen(self, opener: Opener) -> Reopen | None:
        return opener.reopen


class TestLateNVMeTier(TestNVMeTier):
    @pytest.fixture
    def make_tier(self, opener: Opener) -> MakeTier:
        return lambda source, num_bytes: FaultyTier(opener.make(source, num_bytes))

    @pytest.fixture
    def reopen(self, opener: Opener) -> Reopen | None:
        def again(tier: Tier) -> Tier:
            assert isinstance(tier, FaultyTier)
            tier.close()
            return FaultyTier(opener.reopen(tier.inner))

        return again


class TestNVMeTierOnASlowDisk(TestNVMeTier):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Opener]:
        files = FaultyFiles()
        slow = FileFault({"read", "write"}, effect="delay", from_offset=4096)
        with files.inject(slow):
            yield Opener(tmp_path, files)
