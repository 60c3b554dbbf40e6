"""The result of a run: what was measured, as JSON, and what of it did not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvquilt.bench.expect import Expectation
from kvquilt.testing.results import DraftCounts, Result

__all__ = [
    "DRIFT_BOUND",
    "MIN_PAGES",
    "PHASES",
    "GroupReport",
    "PhaseReport",
    "Report",
    "Ttft",
    "drift_failures",
    "drift_is_exact",
    "equal_outputs",
    "failures",
    "logprob_drift",
    "output_failures",
    "phase_report",
]

DRIFT_BOUND = 1e-5
PHASES = ("cold", "engine_warm", "kvquilt_warm", "branch", "second_branch")
MIN_PAGES = 1000
"""Pages that a run compares, over all groups, if its workload loads so many."""


class Ttft(msgspec.Struct, frozen=True):
    """Milliseconds from handing a request over to its first token."""

    mean: float
    p50: float
    p99: float


class PhaseReport(msgspec.Struct, frozen=True):
    """One phase. Hit tokens are sums over its prompts; equal_outputs counts requests. drafted_tokens,
    accepted_tokens: 0 without a drafter."""

    ttft_ms: Ttft
    local_hit_tokens: int
    external_hit_tokens: int
    equal_outputs: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class GroupReport(msgspec.Struct, frozen=True):
    """One cache group.

    pages, bytes_resident: held when `kvquilt_warm` ended. saved_pages, loaded_pages, loaded_bytes:
    of all phases. sensitivity: prompts whose output changed when the group was loaded as zeros;
    None for draft groups.
    """

    name: str
    kind: str
    window: int | None
    layers: int
    tokens_per_block: int
    page_bytes: int
    slot_bytes: int
    slots: int
    pages: int
    bytes_resident: int
    saved_pages: int
    loaded_pages: int
    loaded_bytes: int
    evictions: int
    pages_compared: int
    sensitivity: int | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run, with the keys of `--json`.

    equal_outputs: requests whose tokens were equal in all of kvquilt's phases. max_logprob_drift: of
    kvquilt's phases against the run without it; engine_logprob_drift: of the engine's own prefix
    hits. external_hit_tokens, best_hit_tokens, hit_blocks (blocks of all groups put back), loads,
    bytes_loaded: of `kvquilt_warm`. bytes_resident: when it ended. load_failures, evictions, pages_*:
    of all phases. tokens_covered: tokens that the slots cover. sensitivity: group -> prompts whose
    output changed when that group was loaded as zeros.
    """

    model: str
    requests: int
    equal_outputs: int
    max_logprob_drift: float
    engine_logprob_drift: float
    external_hit_tokens: int
    best_hit_tokens: int
    hit_blocks: int
    loads: int
    load_failures: int
    bytes_loaded: int
    bytes_resident: int
    tokens_covered: int
    evictions: int
    pages_compared: int
    pages_equal: int
    sensitivity: dict[str, int]
    phases: dict[str, PhaseReport]
    groups: list[GroupReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def phase_report(
    results: Sequence[Result], reference: Sequence[Result], drafts: DraftCounts | None = None
) -> PhaseReport:
    """One phase's figures; `reference` is the run without kvquilt of the same prompts."""
    seconds = [r.ttft_seconds for r in results if r.ttft_seconds is not None]
    times = np.asarray(seconds or [0.0]) * 1e3
    return PhaseReport(
        ttft_ms=Ttft(
            mean=round(float(times.mean()), 3),
            p50=round(float(np.percentile(times, 50)), 3),
            p99=round(float(np.percentile(times, 99)), 3),
        ),
        local_hit_tokens=sum(r.local_hit_tokens for r in results),
        external_hit_tokens=sum(r.external_hit_tokens for r in results),
        equal_outputs=sum(equal_outputs(results, reference)),
        drafted_tokens=drafts.drafted if drafts is not None else 0,
        accepted_tokens=drafts.accepted if drafts is not None else 0,
    )


def equal_outputs(results: Sequence[Result], reference: Sequence[Result]) -> list[bool]:
    """For each request: the same token ids, and as many as were asked for."""
    return [
        mine.tokens == other.tokens and mine.finish_reason == other.finish_reason == "length"
        for mine, other in zip(results, reference, strict=True)
    ]


def logprob_drift(results: Sequence[Result], reference: Sequence[Result]) -> float:
    """The largest difference of a log-probability, over positions up to the first other token."""
    return max(map(_drift, results, reference), default=0.0)


def _drift(mine: Result, other: Result) -> float:
    worst = 0.0
    for token, expected, a, b in zip(mine.tokens, other.tokens, mine.logprobs, other.logprobs, strict=False):
        if token != expected:
            break
        # Not a number is no agreement.
        worst = max(worst, abs(a - b)) if abs(a - b) < float("inf") else float("inf")
    return worst


def failures(report: Report, expected: Expectation, *, concurrency: int, unknown_pages: int = 0) -> list[str]:
    """Whatever did not hold, one sentence each; empty if the run proves what it is for."""
    return [
        *output_failures(
            report.requests,
            report.equal_outputs,
            report.phases["engine_warm"].equal_outputs,
            ", so batching decides a near tie here: another --seed or --concurrency 1 tells the two apart",
        ),
        *drift_failures(
            report.max_logprob_drift,
            report.engine_logprob_drift,
            exact=drift_is_exact(report.phases, concurrency),
        ),
        *_page_failures(report, unknown_pages),
        *_coverage_failures(report, expected.pages),
        *_control_failures(report.sensitivity),
        *_hit_failures(report.phases, expected),
    ]


def output_failures(requests: int, equal: int, engine_equal: int, hint: str = "") -> list[str]:
    """One sentence if not all outputs are equal. engine_equal: with the engine's own prefix hits instead.
    hint: what follows from it if those differ, too."""
    if equal == requests:
        return []
    text = f"outputs: {requests - equal} of {requests} differ"
    own = requests - engine_equal
    return [
        text + (f"; the engine's own prefix hits change {own} of them without kvquilt{hint}" if own else "")
    ]


def drift_is_exact(phases: Mapping[str, PhaseReport], concurrency: int) -> bool:
    """Must log-probabilities be equal to the last bit? One request at a time, every batch holds it alone;
    but with a drafter it has as many rows as there are drafts, and hits change which drafts are made."""
    return concurrency == 1 and not any(phase.drafted_tokens for phase in phases.values())


def drift_failures(drift: float, own: float, *, exact: bool) -> list[str]:
    """The largest drift of a log-probability against its bound: 0, or the engine's own."""
    if exact:
        return [] if drift == 0.0 else [f"log-probs: drift {drift:.3g}, must be 0 at concurrency 1"]
    bound = min(own, DRIFT_BOUND)
    if drift <= bound:
        return []
    return [f"log-probs: drift {drift:.3g} is above {bound:.3g} (the engine's own {own:.3g}, at most 1e-5)"]


def _page_failures(report: Report, unknown_pages: int) -> list[str]:
    found = []
    if report.pages_equal != report.pages_compared:
        wrong = report.pages_compared - report.pages_equal
        found.append(f"pages: {wrong} of {report.pages_compared} came back different")
    if unknown_pages:
        found.append(f"pages: {unknown_pages} were loaded that no save had shown")
    missed = [g.name for g in report.groups if g.loaded_pages and not g.pages_compared]
    if missed:
        found.append(f"pages: none compared of {', '.join(missed)}")
    if report.load_failures:
        found.append(f"loads: {report.load_failures} failed")
    return found


def _coverage_failures(report: Report, expected: Mapping[str, int]) -> list[str]:
    """Too few pages compared: as many as the workload loads, but no more than `MIN_PAGES` are asked for."""
    least = min(MIN_PAGES, sum(expected.values()))
    if report.pages_compared < least:
        return [f"pages: {report.pages_compared:,} compared, {least:,} were to be: too few to prove anything"]
    compared = {group.name: group.pages_compared for group in report.groups}
    missed = [name for name, count in expected.items() if count and not compared[name]]
    return [f"pages: none compared of {', '.join(missed)}, which must be loaded"] if missed else []


def _control_failures(sensitivity: Mapping[str, int]) -> list[str]:
    if not sensitivity:
        return ["control: no group could be loaded as zeros, so equal outputs prove nothing"]
    dead = [name for name, changed in sensitivity.items() if not changed]
    if not dead:
        return []
    return [
        f"control: loading {', '.join(dead)} as zeros changes no output, so equal outputs prove nothing "
        "about what is loaded there"
    ]


def _hit_failures(phases: Mapping[str, PhaseReport], expected: Expectation) -> list[str]:
    found = []
    wanted = [
        ("engine_warm", phases["engine_warm"].local_hit_tokens, expected.best_warm, True),
        ("kvquilt_warm", phases["kvquilt_warm"].external_hit_tokens, expected.warm, expected.holds_warm),
        ("branch", phases["branch"].external_hit_tokens, expected.branch, expected.holds_branch),
    ]
    if expected.second_branch is not None:
        hit, least = phases["second_branch"].external_hit_tokens, expected.second_branch
        wanted.append(("second_branch", hit, least, expected.holds_branch))
    for name, tokens, least, applies in wanted:
        if applies and tokens < least:
            found.append(f"{name}: {tokens:,} tokens hit, {least:,} were to be")
    held = {name: phase.local_hit_tokens for name, phase in phases.items() if name != "engine_warm"}
    return found + [
        f"{name}: the engine itself held {tokens:,} tokens, so it is no test"
        for name, tokens in held.items()
        if tokens
    ]
