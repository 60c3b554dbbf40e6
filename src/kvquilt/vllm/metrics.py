"""What the connector counts, and how it reaches the engine's log and /metrics."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvquilt.store import StoreStats

if TYPE_CHECKING:
    from kvquilt.vllm.below import Below

__all__ = ["METRICS", "DiskLevels", "KVQuiltPromMetrics", "KVQuiltStats", "Levels", "Meter", "Metric"]


@dataclass(frozen=True)
class Metric:
    """One metric: its Prometheus type, what it says, and its one label ("" for none)."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    text: str
    label: str = ""


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

METRICS: dict[str, Metric] = {
    "lookups": Metric(Counter, "Look-ups resolved, by outcome", "outcome"),
    "hit_tokens": Metric(
        Counter, "Tokens loaded, by the group that kept the hit from being longer", "limited_by"
    ),
    "saved_pages": Metric(Counter, "Pages saved and committed", "group"),
    "saved_bytes": Metric(Counter, "Bytes saved and committed", "group"),
    "loaded_pages": Metric(Counter, "Pages put back", "group"),
    "loaded_bytes": Metric(Counter, "Bytes put back", "group"),
    "saves_skipped": Metric(Counter, "Pages not saved, by reason", "reason"),
    "saves_failed": Metric(Counter, "Save jobs that failed on some rank"),
    "evictions": Metric(Counter, "Pages evicted", "group"),
    "load_failures": Metric(Counter, "Loads reported failed and recomputed, by reason", "reason"),
    "hook_errors": Metric(Counter, "Errors inside the connector that the engine did not see", "hook"),
    "pages": Metric(Gauge, "Pages held", "group"),
    "bytes_resident": Metric(Gauge, "Bytes of the pages held", "group"),
    "pool_use": Metric(Gauge, "Share of the group's slots in use", "group"),
    "idle_slots": Metric(Gauge, "Free slots", "group"),
    "leases": Metric(Gauge, "Leases held"),
    "tickets": Metric(Gauge, "Tickets open"),
    "pins": Metric(Gauge, "Engine blocks pinned"),
    "disk_read_pages": Metric(Counter, "Pages read from disk and proven good", "group"),
    "disk_read_bytes": Metric(Counter, "Bytes of those pages", "group"),
    "disk_written_pages": Metric(Counter, "Pages written to disk", "group"),
    "disk_written_bytes": Metric(Counter, "Bytes of those pages", "group"),
    "disk_dropped_pages": Metric(Counter, "Pages that the disk tier did not write", "group"),
    "disk_not_written": Metric(Counter, "Pages not written to disk, by reason", "reason"),
    "disk_bad_pages": Metric(Counter, "Pages on disk that could not be read or proven good", "group"),
    "disk_evictions": Metric(Counter, "Pages evicted from disk", "group"),
    "disk_promotions": Metric(Counter, "Promotions from disk, by what became of them", "outcome"),
    "disk_pages": Metric(Gauge, "Pages on disk", "group"),
    "disk_bytes": Metric(Gauge, "Bytes of the slots in use on disk", "group"),
    "disk_queue": Metric(Gauge, "Pages waiting for the disk or under way", "direction"),
    "disk_on": Metric(Gauge, "1 while the disk tier is used, 0 while it is switched off"),
    "disk_read_seconds": Metric(Histogram, "Seconds from queueing to the end of a batch of reads"),
    "disk_write_seconds": Metric(Histogram, "Seconds from queueing to the end of a batch of writes"),
    "load_seconds": Metric(Histogram, "Seconds from the request for a load to the end of its copies"),
    "save_seconds": Metric(Histogram, "Seconds from the request for a save to the end of its copies"),
}


class KVQuiltStats(KVConnectorStats):
    """Counts since the last drain, gauges, and samples: {metric: {label value: number}} and
    {metric: [seconds]}. Plain dicts, since the engine ships them between processes."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or _empty())

    def reset(self) -> None:
        self.data = _empty()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVQuiltStats:
        for name, values in other.data["counters"].items():
            mine = self.data["counters"].setdefault(name, {})
            for label, value in values.items():
                mine[label] = mine.get(label, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        for name, samples in other.data["samples"].items():
            self.data["samples"].setdefault(name, []).extend(samples)
        return self

    def reduce(self) -> dict[str, int | float]:
        out: dict[str, int | float] = {
            name: sum(values.values()) for name, values in self.data["counters"].items()
        }
        for name, samples in self.data["samples"].items():
            if samples:
                out[f"{name}_mean"] = round(sum(samples) / len(samples), 4)
        for name in ("pages", "bytes_resident", "leases", "tickets", "pins"):
            if name in self.data["gauges"]:
                out[name] = sum(self.data["gauges"][name].values())
        return out


def _empty() -> dict[str, Any]:
    return {"counters": {}, "gauges": {}, "samples": {}}


class Meter:
    """Collects counts and samples on the scheduler side; keeps totals for tests and the bench."""

    def __init__(self) -> None:
        self.totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._fresh = KVQuiltStats()

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        """Add to a counter of METRICS; zero is no event."""
        if amount:
            self.totals[name][label] += amount
            fresh = self._fresh.data["counters"].setdefault(name, {})
            fresh[label] = fresh.get(label, 0) + amount

    def sample(self, name: str, seconds: float) -> None:
        self._fresh.data["samples"].setdefault(name, []).append(seconds)

    def total(self, name: str, label: str | None = None) -> float:
        """Sum of a counter since the start; of one label value if given."""
        values = self.totals[name]
        return sum(values.values()) if label is None else values.get(label, 0)

    @property
    def fresh(self) -> bool:
        """Something was counted since the last drain."""
        return not self._fresh.is_empty()

    def drain(self, gauges: dict[str, dict[str, float]]) -> KVQuiltStats:
        """Counts since the last drain, together with `gauges`."""
        stats, self._fresh = self._fresh, KVQuiltStats()
        stats.data["gauges"] = gauges
        return stats


class Levels:
    """The store's levels as gauges; its evictions, which only ever grow, as counts."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._evictions: dict[str, int] = {}

    def gauges(self, stats: StoreStats, pins: int) -> dict[str, dict[str, float]]:
        """Gauges of now. pins: engine blocks that are pinned."""
        gauges: dict[str, dict[str, float]] = {
            "leases": {"": stats.leases},
            "tickets": {"": stats.tickets},
            "pins": {"": pins},
        }
        for group in stats.groups:
            name = group.name
            gauges.setdefault("pages", {})[name] = group.pages
            gauges.setdefault("bytes_resident", {})[name] = group.bytes_used
            gauges.setdefault("idle_slots", {})[name] = group.idle_slots
            gauges.setdefault("pool_use", {})[name] = group.pages / max(1, group.slots)
            self._meter.count("evictions", group.evictions - self._evictions.get(name, 0), name)
            self._evictions[name] = group.evictions
        return gauges


class DiskLevels:
    """The disk tier's levels as gauges; what it counts since its start, as counts since the last call."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._before: defaultdict[tuple[str, str], int] = defaultdict(int)

    def gauges(self, below: Below) -> dict[str, dict[str, float]]:
        """Gauges of now."""
        stats = below.stats()
        self._more("disk_not_written", "lora", below.not_durable)
        self._more("disk_not_written", "evicted", below.left_unwritten)
        for outcome, number in below.promoter.counts.items():
            self._more("disk_promotions", outcome, number)
        dropped: defaultdict[str, int] = defaultdict(int)
        gauges: dict[str, dict[str, float]] = {
            "disk_queue": {"read": stats.queued_reads, "write": stats.queued_writes},
            "disk_on": {"": float(stats.state == "on")},
        }
        for group in stats.groups:
            gauges.setdefault("disk_pages", {})[group.name] = group.pages
            gauges.setdefault("disk_bytes", {})[group.name] = group.bytes_used
            self._more("disk_read_pages", group.name, group.reads)
            self._more("disk_read_bytes", group.name, group.read_bytes)
            self._more("disk_written_pages", group.name, group.writes)
            self._more("disk_written_bytes", group.name, group.written_bytes)
            self._more("disk_bad_pages", group.name, group.bad)
            self._more("disk_evictions", group.name, group.evictions)
            self._more("disk_dropped_pages", group.name, sum(group.dropped.values()))
            for reason, pages in group.dropped.items():
                dropped[reason] += pages
        for reason, pages in dropped.items():
            self._more("disk_not_written", reason, pages)
        for direction, samples in below.tier.take_seconds().items():
            for seconds in samples:
                self._meter.sample(f"disk_{direction}_seconds", seconds)
        return gauges

    def _more(self, name: str, label: str, total: int) -> None:
        before, self._before[name, label] = self._before[name, label], total
        # Counted anew where the tier has been opened anew.
        self._meter.count(name, total - before if total >= before else total, label)


# What this process has registered. An engine that starts replaces what an earlier one left, as vLLM
# does with its own metrics; without that the second engine of a process would not start.
_registered: list[Any] = []


class KVQuiltPromMetrics(KVConnectorPromMetrics):
    """METRICS as Prometheus metrics named kvquilt_*, labelled by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        while _registered:
            with contextlib.suppress(KeyError):  # not there: wrapped metrics, or unregistered by others
                REGISTRY.unregister(_registered.pop())
        self._metrics = {name: self._make(name, metric) for name, metric in METRICS.items()}

    def _make(self, name: str, metric: Metric) -> Any:
        classes = {Counter: self._counter_cls, Gauge: self._gauge_cls, Histogram: self._histogram_cls}
        extra: dict[str, Any] = {"buckets": _SECONDS} if metric.kind is Histogram else {}
        labels = self._labelnames + ([metric.label] if metric.label else [])
        made = classes[metric.kind](
            name=f"kvquilt_{name}", documentation=metric.text, labelnames=labels, **extra
        )
        _registered.append(made)
        return made

    def _of(self, name: str, label: str, engine_idx: int) -> Any:
        values = list(self.per_engine_labelvalues[engine_idx])
        return self._metrics[name].labels(*values, *([label] if METRICS[name].label else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, label, value in _flat(transfer_stats_data["counters"]):
            self._of(name, label, engine_idx).inc(value)
        for name, label, value in _flat(transfer_stats_data["gauges"]):
            self._of(name, label, engine_idx).set(value)
        for name, samples in transfer_stats_data["samples"].items():
            for seconds in samples:
                self._of(name, "", engine_idx).observe(seconds)


def _flat(table: dict[str, dict[str, float]]) -> Iterable[tuple[str, str, float]]:
    for name, values in table.items():
        for label, value in values.items():
            yield name, label, value
