"""The disk tier's counts as the engine's metrics get them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvquilt.tiers import GroupTierStats, TierStats
from kvquilt.vllm.metrics import METRICS, DiskLevels, Meter


class Disk:
    """What the scheduler side asks of `Below`."""

    def __init__(self) -> None:
        self.state, self.reads, self.dropped, self.seconds = "on", 3, {"queue": 2}, [0.5]
        self.not_durable = self.left_unwritten = 0
        self.promoter = SimpleNamespace(counts={"started": 1, "no_room": 0, "timed_out": 0})
        self.tier = SimpleNamespace(take_seconds=self.take_seconds)

    def take_seconds(self) -> dict[str, list[float]]:
        taken, self.seconds = self.seconds, []
        return {"read": taken, "write": []}

    def stats(self) -> TierStats:
        group = GroupTierStats(
            name="full",
            slots=10,
            pages=4,
            bytes_used=400,
            reads=self.reads,
            read_bytes=100 * self.reads,
            writes=5,
            written_bytes=500,
            dropped=self.dropped,
            bad=1,
            evictions=0,
        )
        return TierStats("nvme", self.state, "", [group], 2, 7)


def test_levels_are_gauges_and_what_has_been_added_is_counted_once() -> None:
    meter, disk = Meter(), Disk()
    levels = DiskLevels(meter)
    gauges = levels.gauges(disk)  # type: ignore[arg-type]
    assert gauges["disk_pages"] == {"full": 4}
    assert gauges["disk_queue"] == {"read": 2, "write": 7}
    assert gauges["disk_on"] == {"": 1.0}
    disk.reads, disk.left_unwritten, disk.not_durable = 5, 4, 6
    levels.gauges(disk)  # type: ignore[arg-type]
    assert meter.total("disk_read_pages", "full") == 5
    assert meter.total("disk_read_bytes", "full") == 500
    assert meter.total("disk_bad_pages", "full") == 1
    assert meter.total("disk_dropped_pages", "full") == 2
    assert {r: meter.total("disk_not_written", r) for r in ("queue", "evicted", "lora")} == {
        "queue": 2,
        "evicted": 4,
        "lora": 6,
    }
    data = meter.drain(gauges).data
    assert data["samples"] == {"disk_read_seconds": [0.5]}
    assert {*data["counters"], *data["gauges"], *data["samples"]} <= set(METRICS)


def test_a_tier_that_is_opened_anew_counts_from_nothing_and_nothing_is_taken_back() -> None:
    meter, disk = Meter(), Disk()
    levels = DiskLevels(meter)
    levels.gauges(disk)  # type: ignore[arg-type]
    disk.reads, disk.state = 1, "off"
    assert levels.gauges(disk)["disk_on"] == {"": 0.0}  # type: ignore[arg-type]
    assert meter.total("disk_read_pages", "full") == 4
