"""One run of the benchmark: set up, both engines, the report and what of it did not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvquilt.bench.config import BenchConfig
from kvquilt.bench.phases import Reference, Tested, run_reference, run_tested
from kvquilt.bench.progress import BenchProgress, SilentProgress
from kvquilt.bench.report import (
    PHASES,
    GroupReport,
    PhaseReport,
    Report,
    equal_outputs,
    failures,
    logprob_drift,
    phase_report,
)
from kvquilt.bench.setup import BenchSetup, set_up
from kvquilt.layout import CacheGroup
from kvquilt.testing.engine import Engine
from kvquilt.testing.results import Result
from kvquilt.units import format_bytes

__all__ = ["Outcome", "run_bench"]


@dataclass(frozen=True)
class Outcome:
    """setup: what was run. report: what was measured. failures: what did not hold; empty is success.
    saves_skipped: pages that kvquilt wanted to save and did not, by reason; "present" is none of them.
    drifts: phase -> its largest difference of a log-probability. reference: what was equalled."""

    setup: BenchSetup
    report: Report
    failures: tuple[str, ...]
    saves_skipped: Mapping[str, int]
    drifts: Mapping[str, float]
    reference: Reference | None = None


def run_bench(
    config: BenchConfig,
    progress: BenchProgress | None = None,
    prepare: Callable[[Engine], None] | None = None,
    reference: Reference | None = None,
) -> Outcome:
    """Run all phases in this process.

    prepare: called with the engine that has kvquilt, before its first phase. reference: that of a
    run which differs in kvquilt's options alone, to save the time. Raises ConfigError,
    LayoutError or SizingError for what cannot be run, BenchError if an engine does not do its part.
    """
    progress = progress if progress is not None else SilentProgress()
    setup = set_up(config)
    for line in _intentions(setup):
        progress.say(line)
    if reference is None:
        reference = run_reference(setup, progress)
    tested = run_tested(setup, reference, progress, prepare)
    report = _report(setup, reference, tested)
    found = failures(
        report, setup.expected, concurrency=config.concurrency, unknown_pages=tested.pages.unknown
    )
    return Outcome(setup, report, tuple(found), _skipped(tested), _drifts(reference, tested), reference)


def _intentions(setup: BenchSetup) -> list[str]:
    config = setup.config
    why = "what holds the working set" if setup.ram_chosen else "as given"
    return [
        f"{config.model}: {config.requests} prompts of {config.prompt_tokens} tokens, {config.output_tokens} "
        f"generated, {config.concurrency} at a time",
        f"kvquilt: ram_bytes {setup.ram_bytes} ({format_bytes(setup.ram_bytes)}, {why}), "
        f"retention {config.retention}, partition {config.group_partition}; "
        f"engine: {setup.pool_blocks} blocks ({format_bytes(setup.pool_bytes)})",
    ]


def _report(setup: BenchSetup, reference: Reference, tested: Tested) -> Report:
    equal = zip(
        *(equal_outputs(mine, other) for mine, other in _pairs(reference, tested).values()), strict=True
    )
    groups = [_group(setup, tested, index, group) for index, group in enumerate(setup.model.layout.groups)]
    warm, before = tested.after_warm, tested.before_warm
    return Report(
        model=setup.config.model,
        requests=setup.config.requests,
        equal_outputs=sum(all(row) for row in equal),
        max_logprob_drift=max(_drifts(reference, tested).values()),
        engine_logprob_drift=reference.drift,
        external_hit_tokens=sum(r.external_hit_tokens for r in tested.warm),
        best_hit_tokens=setup.expected.best_warm,
        hit_blocks=warm.since(before, "loaded_pages"),
        loads=sum(r.external_hit_tokens > 0 for r in tested.warm),
        load_failures=tested.end.since(tested.start, "load_failures"),
        bytes_loaded=warm.since(before, "loaded_bytes"),
        bytes_resident=sum(warm.bytes_resident.values()),
        tokens_covered=setup.plan.tokens,
        evictions=sum(g.evictions for g in groups),
        pages_compared=tested.pages.compared,
        pages_equal=tested.pages.equal,
        sensitivity=dict(tested.sensitivity),
        phases=_phases(reference, tested),
        groups=groups,
    )


def _skipped(tested: Tested) -> dict[str, int]:
    reasons = (reason for reason in tested.end.totals.get("saves_skipped", {}) if reason != "present")
    counts = {r: tested.end.since(tested.start, "saves_skipped", r) for r in reasons}
    return {reason: count for reason, count in counts.items() if count}


def _pairs(reference: Reference, tested: Tested) -> dict[str, tuple[list[Result], list[Result]]]:
    """kvquilt's phases, each beside the results that it must equal."""
    pairs = {
        "cold": (tested.cold, reference.cold),
        "kvquilt_warm": (tested.warm, reference.cold),
        "branch": (tested.branch, reference.branch),
    }
    if reference.second_branch:
        pairs["second_branch"] = (tested.second_branch, reference.second_branch)
    return pairs


def _drifts(reference: Reference, tested: Tested) -> dict[str, float]:
    return {name: logprob_drift(*pair) for name, pair in _pairs(reference, tested).items()}


def _phases(reference: Reference, tested: Tested) -> dict[str, PhaseReport]:
    pairs = {"engine_warm": (reference.warm, reference.cold), **_pairs(reference, tested)}
    drafts = {**reference.drafts, **tested.drafts}
    return {name: phase_report(*pairs[name], drafts[name]) for name in PHASES if name in pairs}


def _group(setup: BenchSetup, tested: Tested, index: int, group: CacheGroup) -> GroupReport:
    name, start, end = group.name, tested.start, tested.end
    return GroupReport(
        name=name,
        kind=group.kind,
        window=group.window,
        layers=len(group.layers),
        tokens_per_block=group.tokens_per_block,
        page_bytes=group.page_bytes,
        slot_bytes=setup.plan.slot_bytes[name],
        slots=setup.plan.slots[name],
        pages=tested.after_warm.pages.get(name, 0),
        bytes_resident=tested.after_warm.bytes_resident.get(name, 0),
        saved_pages=end.since(start, "saved_pages", name),
        loaded_pages=end.since(start, "loaded_pages", name),
        loaded_bytes=end.since(start, "loaded_bytes", name),
        evictions=end.evictions.get(name, 0) - start.evictions.get(name, 0),
        pages_compared=tested.pages.compared_by_group.get(index, 0),
        sensitivity=tested.sensitivity.get(name),
    )
