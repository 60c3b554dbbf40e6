"""The result of a run with a restart for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvquilt.bench.report import drift_is_exact
from kvquilt.bench.restart import RestartOutcome
from kvquilt.bench.restart_report import RESTART_PHASES, RestartReport
from kvquilt.bench.table import print_result
from kvquilt.units import format_bytes

__all__ = ["print_restart", "restart_summary"]


def print_restart(outcome: RestartOutcome, console: Console) -> None:
    """Print the tables, the figures beside their bounds, and the verdict."""
    tables = (_phase_table(outcome), _group_table(outcome.report))
    print_result(console, tables, _figures(outcome), outcome.failures, restart_summary(outcome))


def _phase_table(outcome: RestartOutcome) -> Table:
    report = outcome.report
    table = Table(title=f"{report.model}: {report.requests} prompts per phase, killed after the first")
    table.add_column("phase", no_wrap=True)
    for heading in ("TTFT ms mean", "p50", "p99", "local hit tokens", "external hit tokens", "of", "equal"):
        table.add_column(heading, justify="right")
    most = {"engine_warm": report.best_hit_tokens, "restart_warm": report.expected_hit_tokens}
    for name in RESTART_PHASES:
        phase, ttft = report.phases[name], report.phases[name].ttft_ms
        table.add_row(
            name,
            *(f"{value:.1f}" for value in (ttft.mean, ttft.p50, ttft.p99)),
            f"{phase.local_hit_tokens:,}",
            f"{phase.external_hit_tokens:,}",
            f"{most[name]:,}" if name in most else "",
            f"{phase.equal_outputs}/{report.requests}",
        )
    return table


def _group_table(report: RestartReport) -> Table:
    table = Table(title="cache groups: tokens per block, bytes, pages")
    table.add_column("group", no_wrap=True)
    headings = ("tokens", "page B", "disk slots", "written", "dropped", "found", "read", "loaded", "compared")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for group in report.groups:
        numbers = (
            group.tokens_per_block,
            group.page_bytes,
            group.disk_slots,
            group.written_pages,
            group.dropped_pages,
            group.found_pages,
            group.read_pages,
            group.loaded_pages,
            group.pages_compared,
        )
        table.add_row(group.name, *(f"{n:,}" for n in numbers))
    return table


def _figures(outcome: RestartOutcome) -> list[str]:
    report, setup = outcome.report, outcome.setup
    exact = drift_is_exact(report.phases, setup.config.concurrency)
    bound = "must be 0 at concurrency 1" if exact else "must not be more, nor above 1e-05"
    promotions = ", ".join(f"{count:,} {name}" for name, count in report.promotions.items())
    lines = [
        f"log-probs: largest drift {report.max_logprob_drift:.3g}; the engine's own prefix hits "
        f"{report.engine_logprob_drift:.3g} ({bound})",
        f"pages: {report.pages_equal:,} of {report.pages_compared:,} equal to the digests taken before the "
        f"kill, of {report.pages_recorded:,} digests",
        f"loads: {report.loads} ({format_bytes(report.bytes_loaded)}), {report.load_failures} failed; "
        f"promotions: {promotions}",
        f"disk: {report.pages_written:,} pages written, {report.pages_dropped:,} dropped, "
        f"{report.pages_read:,} read, {report.pages_bad:,} bad; bound {format_bytes(outcome.disk_bytes)}; "
        f"the pages stay in {setup.config.disk}",
    ]
    if not outcome.expected.holds:
        lines.append("the disk or host memory does not hold the working set: hits may be missing")
    return lines


def restart_summary(outcome: RestartOutcome) -> str:
    """What this run shows, in one sentence."""
    report = outcome.report
    if outcome.failures:
        return f"This run does not show that pages outlive an engine: {len(outcome.failures)} checks failed."
    cold, bound, warm = (report.phases[name].ttft_ms.mean for name in RESTART_PHASES)
    share = report.external_hit_tokens / report.best_hit_tokens
    return (
        f"An engine was killed, and another one gave the same {report.requests} outputs from its pages on "
        f"disk: {share:.0%} of what can be put back ({report.external_hit_tokens:,} tokens, every page "
        f"compared byte for byte): the first token came after {warm:.1f} ms instead of {cold:.1f} ms, where "
        f"the engine's own cache takes {bound:.1f} ms."
    )
