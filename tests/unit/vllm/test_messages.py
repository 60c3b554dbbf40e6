"""Messages between the two sides, the ring of look-ups, and the counts."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvquilt.vllm.lookups import LookupRecord, LookupRing
from kvquilt.vllm.metadata import (
    CopyList,
    JobEnd,
    LoadJob,
    SaveJob,
    StepMetadata,
    StepPlan,
    WorkerMetadata,
    WorkerReport,
    decode_plan,
    decode_reports,
    encode_plan,
    encode_reports,
)
from kvquilt.vllm.metrics import METRICS, KVQuiltPromMetrics, KVQuiltStats, Meter


def copy_list(count: int = 3, keys: bytes = b"") -> CopyList:
    return CopyList.of(
        np.arange(count, dtype=np.int32), np.arange(10, 10 + count), np.arange(20, 20 + count), keys
    )


# ---- plans and reports ----


def test_plan_comes_back_as_it_was() -> None:
    plan = StepPlan(
        attach_path="/run/x",
        saves=(SaveJob(1, copy_list()),),
        loads=(LoadJob(2, "r", copy_list(1, b"k" * 32), 1.5, doomed=True),),
        flush=(3,),
        cancel=(4,),
        refail=((5, "s"),),
        idle=True,
    )
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan(encode_plan(StepPlan())) == StepPlan()


def test_copies_are_the_arrays_that_went_in() -> None:
    pages = copy_list()
    copies = pages.copies()
    assert len(pages) == len(copies) == 3
    assert copies.group.tolist() == [0, 1, 2]
    assert copies.block.tolist() == [10, 11, 12]
    assert copies.slot.tolist() == [20, 21, 22]


def test_metadata_survives_the_engines_pickling() -> None:
    """Across processes the engine pickles its metadata classes; ours hold bytes alone."""
    payload = encode_plan(StepPlan(flush=(7,)))
    again = pickle.loads(pickle.dumps(StepMetadata(payload)))  # noqa: S301 - what the engine does
    assert decode_plan(again.payload).flush == (7,)


def test_garbage_is_refused() -> None:
    for payload in (b"\xc1", b"", encode_plan(StepPlan())[:-1], b"\x93\x01\x02\x03"):
        with pytest.raises(msgspec.DecodeError):
            decode_plan(payload)


def test_reports_of_all_ranks_are_merged() -> None:
    parts = [
        WorkerMetadata(encode_reports([WorkerReport(rank, attached=True, saves=(JobEnd(rank, ok=True),))]))
        for rank in range(3)
    ]
    merged = parts[0].aggregate(parts[1]).aggregate(parts[2])
    assert [report.rank for report in decode_reports(merged.payload)] == [0, 1, 2]
    assert decode_reports(b"") == []


def test_reports_are_not_merged_with_strangers() -> None:
    with pytest.raises(TypeError, match="StepMetadata"):
        WorkerMetadata(b"").aggregate(StepMetadata(b""))  # type: ignore[arg-type]


# ---- the ring ----


def record(name: str, hit: int = 0) -> LookupRecord:
    return LookupRecord(name, 97, 0, hit, None, "why")


def test_ring_keeps_the_newest_in_order() -> None:
    ring = LookupRing(size=2)
    for name in "abc":
        ring.add(record(name))
    assert [r.request_id for r in ring.last()] == ["b", "c"]
    assert [r.request_id for r in ring.last(1)] == ["c"]
    assert ring.of("a") is None


def test_ring_finds_the_newest_of_a_request() -> None:
    ring = LookupRing()
    for hit in (32, 64):
        ring.add(record("a", hit))
    ring.add(record("b", 96))
    found = ring.of("a")
    assert found is not None
    assert found.hit_tokens == 64


# ---- counts ----


def test_meter_drains_what_is_new_and_keeps_totals() -> None:
    meter = Meter()
    assert not meter.fresh
    meter.count("saved_pages", 0, "g")
    assert not meter.fresh, "zero is no event"
    meter.count("saved_pages", 2, "g")
    meter.count("saved_pages", 3, "h")
    meter.sample("load_seconds", 0.25)
    assert meter.fresh
    first = meter.drain({"pins": {"": 1}})
    meter.count("saved_pages", 5, "g")
    second = meter.drain({"pins": {"": 0}})
    assert first.data["counters"]["saved_pages"] == {"g": 2, "h": 3}
    assert second.data["counters"]["saved_pages"] == {"g": 5}
    assert (meter.total("saved_pages"), meter.total("saved_pages", "h")) == (10, 3)
    assert meter.total("saved_pages", "never") == 0
    merged = first.aggregate(second)
    assert merged.data["counters"]["saved_pages"] == {"g": 7, "h": 3}
    assert merged.data["gauges"]["pins"] == {"": 0}, "a gauge is what it was last"
    assert merged.reduce()["saved_pages"] == 10
    assert merged.reduce()["load_seconds_mean"] == 0.25


def test_stats_survive_the_way_between_processes() -> None:
    stats = Meter()
    stats.count("lookups", 1, "hit")
    stats.sample("save_seconds", 0.5)
    drained = stats.drain({"leases": {"": 0}})
    again = KVQuiltStats(msgspec.msgpack.decode(msgspec.msgpack.encode(drained.to_dict())))
    assert again.reduce() == drained.reduce()
    assert not again.is_empty()
    again.reset()
    assert again.is_empty()
    assert KVQuiltStats().is_empty()


class PromMetrics(KVQuiltPromMetrics):
    """Ours in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: type) -> object:
            return lambda **options: kind(**options, registry=self.registry)

        types = {kind: made(kind) for kind in (Counter, Gauge, Histogram)}
        super().__init__(
            SimpleNamespace(kv_transfer_config=None),
            types,
            ["model_name", "engine"],
            {0: ["tiny", "0"], 1: ["tiny", "1"]},
        )

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()


def test_counts_reach_prometheus_under_their_names_and_engine() -> None:
    metrics = PromMetrics()
    meter = Meter()
    for name, metric in METRICS.items():
        if metric.kind is Counter:
            meter.count(name, 2, "l" if metric.label else "")
        elif metric.kind is Histogram:
            meter.sample(name, 0.02)
    gauges = {name: {"l" if m.label else "": 3.0} for name, m in METRICS.items() if m.kind is Gauge}
    data = meter.drain(gauges).to_dict()
    metrics.observe(data, 0)
    metrics.observe(data, 1)
    metrics.observe(data, 1)
    for name, metric in METRICS.items():
        label = f',{metric.label}="l"' if metric.label else ""
        for engine, times in ((0, 1), (1, 2)):
            labels = (
                f'engine="{engine}"{label},model_name="tiny"'
                if label
                else f'engine="{engine}",model_name="tiny"'
            )
            if metric.kind is Counter:
                row, value = f"kvquilt_{name}_total", 2.0 * times
            elif metric.kind is Gauge:
                row, value = f"kvquilt_{name}", 3.0
            else:
                row, value = f"kvquilt_{name}_count", float(times)
            rows = [line for line in metrics.text.splitlines() if line.startswith(f"{row}{{")]
            mine = [
                line
                for line in rows
                if set(labels.split(",")) <= set(line[line.index("{") + 1 : line.index("}")].split(","))
            ]
            assert [float(line.split()[-1]) for line in mine] == [value], (name, engine)
