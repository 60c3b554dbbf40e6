"""The result for people: two tables, what did not hold, and one sentence of what a run shows."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from kvquilt.bench.report import PHASES, Report, drift_is_exact
from kvquilt.bench.run import Outcome
from kvquilt.units import format_bytes

__all__ = ["print_outcome", "print_result", "summary"]


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the tables, the figures beside their bounds, and the verdict."""
    tables = (_phase_table(outcome), _group_table(outcome.report))
    print_result(console, tables, _figures(outcome), outcome.failures, summary(outcome))


def print_result(
    console: Console, tables: Iterable[Table], figures: Iterable[str], failures: Iterable[str], verdict: str
) -> None:
    """Print what a run has shown, and what did not hold."""
    for table in tables:
        console.print(table)
    for line in figures:
        console.print(line, highlight=False, markup=False)
    console.print()
    for failure in failures:
        console.print(f"FAILED  {failure}", style="bold red", highlight=False, markup=False)
    console.print(verdict, style="bold", highlight=False, markup=False)


def _phase_table(outcome: Outcome) -> Table:
    report, expected = outcome.report, outcome.setup.expected
    table = Table(title=f"{report.model}: {report.requests} prompts per phase")
    table.add_column("phase", no_wrap=True)
    for heading in (
        "TTFT ms mean",
        "p50",
        "p99",
        "local hit tokens",
        "external hit tokens",
        "of",
        "drift",
        "equal",
    ):
        table.add_column(heading, justify="right")
    best = {
        "engine_warm": expected.best_warm,
        "kvquilt_warm": expected.best_warm,
        "branch": expected.best_branch,
        "second_branch": expected.best_branch,
    }
    drifts = {**outcome.drifts, "engine_warm": report.engine_logprob_drift}
    for name in filter(report.phases.__contains__, PHASES):
        phase, ttft = report.phases[name], report.phases[name].ttft_ms
        table.add_row(
            name,
            *(f"{value:.1f}" for value in (ttft.mean, ttft.p50, ttft.p99)),
            f"{phase.local_hit_tokens:,}",
            f"{phase.external_hit_tokens:,}",
            f"{best[name]:,}" if name in best else "",
            f"{drifts[name]:.2g}",
            f"{phase.equal_outputs}/{report.requests}",
        )
    return table


def _group_table(report: Report) -> Table:
    table = Table(title="cache groups: tokens per block, bytes, pages")
    table.add_column("group", no_wrap=True)
    headings = (
        "tokens",
        "page B",
        "slots",
        "held",
        "pages",
        "loaded",
        "evicted",
        "compared",
        "zeros noticed",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for group in report.groups:
        numbers = (group.tokens_per_block, group.page_bytes, group.slots)
        counts = (group.pages, group.loaded_pages, group.evictions, group.pages_compared)
        table.add_row(
            group.name,
            *(f"{n:,}" for n in numbers),
            format_bytes(group.bytes_resident),
            *(f"{n:,}" for n in counts),
            "" if group.sensitivity is None else str(group.sensitivity),
        )
    return table


def _figures(outcome: Outcome) -> list[str]:
    report, setup = outcome.report, outcome.setup
    other = "prompt_end" if setup.config.retention == "dense" else "dense"
    exact = drift_is_exact(report.phases, setup.config.concurrency)
    bound = "must be 0 at concurrency 1" if exact else "must not be more, nor above 1e-05"
    lines = [
        f"log-probs: largest drift {report.max_logprob_drift:.3g}; the engine's own prefix hits "
        f"{report.engine_logprob_drift:.3g} ({bound})",
        f"pages: {report.pages_equal:,} of {report.pages_compared:,} equal, digested at save and after load",
        f"loads: {report.loads} in kvquilt_warm ({report.hit_blocks:,} blocks, "
        f"{format_bytes(report.bytes_loaded)}), {report.load_failures} failed in all; "
        f"{report.evictions:,} pages evicted",
        f"memory: {format_bytes(report.bytes_resident)} held of {format_bytes(setup.ram_bytes)}; the slots "
        f"cover {report.tokens_covered:,} tokens ({setup.tokens_covered(other):,} with --retention {other})",
    ]
    lines += _notes(outcome)
    if outcome.saves_skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(outcome.saves_skipped.items()))
        lines.append(f"saves skipped, pages by reason: {reasons}")
    return lines


def _notes(outcome: Outcome) -> list[str]:
    report, lines = outcome.report, []
    if outcome.setup.expected.second_branch is not None:
        lines.append(
            "states: the engine keeps one per prompt, so a branch finds none at its fork; it leaves one "
            "there, which the second branch resumes from"
        )
    shares = {
        name: f"{phase.accepted_tokens / phase.drafted_tokens:.1%} of {phase.drafted_tokens:,} ({name})"
        for name, phase in report.phases.items()
        if phase.drafted_tokens
    }
    if shares:
        lines.append(f"drafts accepted: {', '.join(shares.values())}")
    return lines


def summary(outcome: Outcome) -> str:
    """What this run shows, in one sentence."""
    report = outcome.report
    if outcome.failures:
        return f"This run does not show that kvquilt works: {len(outcome.failures)} of its checks failed."
    cold, bound, warm = (report.phases[name].ttft_ms.mean for name in ("cold", "engine_warm", "kvquilt_warm"))
    share = report.external_hit_tokens / report.best_hit_tokens
    return (
        f"A real engine gave the same {report.requests} outputs with kvquilt as without it, while kvquilt "
        f"put back {share:.0%} of what can be put back ({report.external_hit_tokens:,} tokens, every page "
        f"compared byte for byte) from {format_bytes(report.bytes_resident)} of host memory: the first token "
        f"came after {warm:.1f} ms instead of {cold:.1f} ms, where the engine's own cache takes {bound:.1f} "
        f"ms; zeros in any of the {len(report.sensitivity)} groups would have been noticed."
    )
