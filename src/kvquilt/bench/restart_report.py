"""The result of a run with a restart: what was measured, as JSON, and what of it did not hold."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvquilt.bench.expect import RestartExpectation
from kvquilt.bench.report import PhaseReport, drift_failures, drift_is_exact, output_failures

__all__ = ["RESTART_PHASES", "RestartGroup", "RestartReport", "restart_failures"]

RESTART_PHASES = ("cold", "engine_warm", "restart_warm")


class RestartGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group. written_pages, dropped_pages (not written): of the first life. killed_pages,
    found_pages: on disk when it was killed, and when the second one had started. read_pages: from disk, by
    the second life, loaded_pages: put back by it; expected_pages: what the hits that must be need."""

    name: str
    kind: str
    window: int | None
    tokens_per_block: int
    page_bytes: int
    ram_slots: int
    disk_slots: int
    written_pages: int
    dropped_pages: int
    killed_pages: int
    found_pages: int
    read_pages: int
    bad_pages: int
    evictions: int
    loaded_pages: int
    expected_pages: int
    pages_compared: int


class RestartReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a restart, with the keys of `--json`.

    equal_outputs: requests whose tokens were equal in both lives. external_hit_tokens, expected_hit_tokens,
    best_hit_tokens: of `restart_warm`: put back, what the layout and the retention allow, and the most that
    can be; exact_hits: requests whose hit was as long as expected. pages_recorded: digests that the first
    life handed over. promotions: of the second life, those begun, cut by lack of room, and timed out.
    """

    model: str
    requests: int
    equal_outputs: int
    max_logprob_drift: float
    engine_logprob_drift: float
    external_hit_tokens: int
    expected_hit_tokens: int
    best_hit_tokens: int
    exact_hits: int
    loads: int
    load_failures: int
    bytes_loaded: int
    disk_bytes: int
    pages_written: int
    pages_dropped: int
    pages_read: int
    pages_bad: int
    promotions: dict[str, int]
    pages_recorded: int
    pages_compared: int
    pages_equal: int
    pages_unknown: int
    phases: dict[str, PhaseReport]
    groups: list[RestartGroup]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def restart_failures(
    report: RestartReport,
    expected: RestartExpectation,
    *,
    concurrency: int,
    write: Literal["through", "evicted"] = "through",
) -> list[str]:
    """Whatever did not hold, one sentence each; empty if the run proves what it is for.

    write: under "evicted" what was still in host memory is lost with the process, so hits may be missing.
    """
    return [
        *output_failures(report.requests, report.equal_outputs, report.phases["engine_warm"].equal_outputs),
        *drift_failures(
            report.max_logprob_drift,
            report.engine_logprob_drift,
            exact=drift_is_exact(report.phases, concurrency),
        ),
        *_hit_failures(report, must_be_exact=expected.holds and write == "through"),
        *_read_failures(report),
        *_page_failures(report),
    ]


def _hit_failures(report: RestartReport, *, must_be_exact: bool) -> list[str]:
    found = []
    for name, phase in report.phases.items():
        external = phase.external_hit_tokens
        if name != "engine_warm" and phase.local_hit_tokens:
            found.append(
                f"{name}: the engine itself held {phase.local_hit_tokens:,} tokens, so it is no test"
            )
        if name == "cold" and external:
            found.append(f"cold: {external:,} tokens hit, so it was not cold")
    if must_be_exact and report.exact_hits != report.requests:
        dropped = f"; {report.pages_dropped:,} pages were not written" if report.pages_dropped else ""
        found.append(
            f"restart_warm: {report.external_hit_tokens:,} tokens hit, {report.expected_hit_tokens:,} were "
            f"to be, {report.exact_hits} of {report.requests} requests as long as expected{dropped}"
        )
    elif not report.external_hit_tokens:
        found.append("restart_warm: no token hit, so it proves nothing")
    return found


def _read_failures(report: RestartReport) -> list[str]:
    """Each group whose pages are loaded must have been read from disk: host memory was empty."""
    found = []
    unread = [group.name for group in report.groups if group.loaded_pages and not group.read_pages]
    unread += [
        group.name
        for group in report.groups
        if group.expected_pages and not group.loaded_pages and report.exact_hits == report.requests
    ]
    if unread:
        found.append(f"disk: no page of {', '.join(unread)} was read")
    lost = [
        f"{group.name} {group.found_pages:,} of {group.killed_pages:,}"
        for group in report.groups
        if group.found_pages < group.killed_pages
    ]
    if lost:
        found.append(f"disk: pages lost by the restart: found {', '.join(lost)}")
    if report.pages_bad:
        found.append(f"disk: {report.pages_bad} pages did not pass their check")
    if report.load_failures:
        found.append(f"loads: {report.load_failures} failed")
    return found


def _page_failures(report: RestartReport) -> list[str]:
    found = []
    if report.pages_equal != report.pages_compared:
        wrong = report.pages_compared - report.pages_equal
        found.append(f"pages: {wrong} of {report.pages_compared} came back different")
    if report.pages_unknown:
        found.append(f"pages: {report.pages_unknown} were loaded that the first life had not shown")
    unseen = [g.name for g in report.groups if g.pages_compared != g.loaded_pages]
    if unseen and not report.pages_unknown:
        found.append(f"pages: not all compared of {', '.join(unseen)}")
    return found
