"""A run with a restart: computed and saved, killed, and loaded from disk by another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvquilt.bench.config import BenchConfig
from kvquilt.bench.expect import RestartExpectation, default_disk_bytes, expect_restart
from kvquilt.bench.lives import DiskGroup, Life, Task, run_life
from kvquilt.bench.phases import Reference, run_reference
from kvquilt.bench.progress import BenchProgress, SilentProgress
from kvquilt.bench.report import equal_outputs, logprob_drift, phase_report
from kvquilt.bench.restart_report import RestartGroup, RestartReport, restart_failures
from kvquilt.bench.setup import BenchSetup, set_up
from kvquilt.layout import CacheGroup
from kvquilt.units import format_bytes, parse_bytes

__all__ = ["RestartOutcome", "run_restart"]


@dataclass(frozen=True)
class RestartOutcome:
    """setup, disk_bytes: what was run. report: what was measured. failures: what did not hold; empty is
    success."""

    setup: BenchSetup
    disk_bytes: int
    expected: RestartExpectation
    report: RestartReport
    failures: tuple[str, ...]


def run_restart(
    config: BenchConfig,
    progress: BenchProgress | None = None,
    reference: Reference | None = None,
    between: Callable[[], None] | None = None,
) -> RestartOutcome:
    """Run the prompts without kvquilt, then in an engine with a disk tier that is killed once all is
    written, then in another one that finds nothing but that disk. Both are processes of their own.

    reference: that of another run with the same prompts, to save the time. between: called after the kill;
    tests damage the disk there. Raises ConfigError, LayoutError
    or SizingError for what cannot be run, BenchError if an engine does not do its part.
    """
    progress = progress if progress is not None else SilentProgress()
    setup = set_up(config)
    config = msgspec.structs.replace(config, ram_bytes=setup.ram_bytes)
    disk_bytes = (
        default_disk_bytes(setup.model.layout, config)
        if config.disk_bytes is None
        else parse_bytes(config.disk_bytes, "--disk-bytes")
    )
    for line in _intentions(setup, disk_bytes):
        progress.say(line)
    if reference is None:
        reference = run_reference(setup, progress, branches=False)
    progress.say("first life: in a process that is killed once all is written")
    first = run_life(Task(config, "first", disk_bytes), kill=True)
    if between is not None:
        between()
    progress.say("killed; second life: another process, the same disk")
    second = run_life(Task(config, "second", disk_bytes, first.digests), kill=False)
    expected = expect_restart(
        setup.model.layout,
        config,
        setup.options,
        setup.expected.warm,
        ram=setup.plan,
        disk_slots={group.name: group.slots for group in first.groups},
    )
    report = _report(setup, disk_bytes, expected, reference, first, second)
    found = restart_failures(report, expected, concurrency=config.concurrency, write=config.disk_write)
    return RestartOutcome(setup, disk_bytes, expected, report, tuple(found))


def _intentions(setup: BenchSetup, disk_bytes: int) -> list[str]:
    config = setup.config
    return [
        f"{config.model}: {config.requests} prompts of {config.prompt_tokens} tokens, {config.output_tokens} "
        f"generated, {config.concurrency} at a time, and a restart",
        f"kvquilt: ram_bytes {setup.ram_bytes} ({format_bytes(setup.ram_bytes)}), retention "
        f"{config.retention}, partition {config.group_partition}; disk {config.disk}: {disk_bytes} "
        f"({format_bytes(disk_bytes)}), written {config.disk_write}",
    ]


def _report(
    setup: BenchSetup,
    disk_bytes: int,
    expected: RestartExpectation,
    reference: Reference,
    first: Life,
    second: Life,
) -> RestartReport:
    lives = [(first.results, reference.cold), (second.results, reference.cold)]
    equal = zip(*(equal_outputs(*pair) for pair in lives), strict=True)
    hits = [result.external_hit_tokens for result in second.results]
    groups = _groups(setup, expected, first, second)
    return RestartReport(
        model=setup.config.model,
        requests=setup.config.requests,
        equal_outputs=sum(all(row) for row in equal),
        max_logprob_drift=max(logprob_drift(*pair) for pair in lives),
        engine_logprob_drift=reference.drift,
        external_hit_tokens=sum(hits),
        expected_hit_tokens=setup.config.requests * expected.hit_tokens,
        best_hit_tokens=setup.expected.best_warm,
        exact_hits=sum(hit == expected.hit_tokens for hit in hits),
        loads=sum(hit > 0 for hit in hits),
        load_failures=first.load_failures + second.load_failures,
        bytes_loaded=second.bytes_loaded,
        disk_bytes=disk_bytes,
        pages_written=sum(group.written_pages for group in groups),
        pages_dropped=sum(group.dropped_pages for group in groups),
        pages_read=sum(group.read_pages for group in groups),
        pages_bad=sum(group.bad_pages for group in groups),
        promotions=second.promotions,
        pages_recorded=second.pages.recorded,
        pages_compared=second.pages.compared,
        pages_equal=second.pages.equal,
        pages_unknown=second.pages.unknown,
        phases={
            "cold": phase_report(first.results, reference.cold, first.drafts),
            "engine_warm": phase_report(reference.warm, reference.cold, reference.drafts.get("engine_warm")),
            "restart_warm": phase_report(second.results, reference.cold, second.drafts),
        },
        groups=groups,
    )


def _groups(setup: BenchSetup, expected: RestartExpectation, first: Life, second: Life) -> list[RestartGroup]:
    indices = {group.name: index for index, group in enumerate(setup.model.layout.groups)}
    return [
        _group(setup.model.layout.groups[index], index, expected, before, after, second)
        for before, after in zip(first.groups, second.groups, strict=True)
        for index in [indices[before.name]]
    ]


def _group(
    group: CacheGroup,
    index: int,
    expected: RestartExpectation,
    before: DiskGroup,
    after: DiskGroup,
    second: Life,
) -> RestartGroup:
    return RestartGroup(
        name=group.name,
        kind=group.kind,
        window=group.window,
        tokens_per_block=group.tokens_per_block,
        page_bytes=group.page_bytes,
        ram_slots=before.ram_slots,
        disk_slots=before.slots,
        written_pages=before.writes,
        dropped_pages=sum(before.dropped.values()),
        killed_pages=before.pages,
        found_pages=after.found,
        read_pages=after.reads,
        bad_pages=before.bad + after.bad,
        evictions=before.evictions + after.evictions,
        loaded_pages=after.loaded,
        expected_pages=expected.pages.get(group.name, 0),
        pages_compared=second.pages.compared_by_group.get(index, 0),
    )
