"""kvquilt beside vLLM's own offloading: same engine, same prompts, same host bytes, turns.

    python benchmarks/compare_native.py [--model gemma3-mini --model gemma4-mini] [--rounds 5]
        [--prompts 24] [--prompt-tokens 1500] [--host-mib 512] [--settings ...] [--markdown | --json]

The peer is vLLM's `OffloadingConnector` with its own scheduler part and its own CPU offload
manager; only the worker, which needs CUDA streams, is replaced by a memcpy (`_native_spec.py`).
Each setting has an engine of its own; they take turns. One turn: everything is emptied; the
prompts are computed and saved, one at a time; the engine's cache is emptied; the same prompts
again (warm); emptied; prompts that share the first two thirds (branch). The first round only
warms up. Figures are medians over the rounds; "times native" is the median of the ratios within
a round, with the least and the greatest. Outputs are compared, tokens and log-probabilities,
with those of an engine that has no connector.

Exit status 1 if an output differs, or if kvquilt's "prompt_end, no extras" holds more bytes
than the leanest native setting for no more hit tokens; times never decide it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from _engine_process import EngineProcess

OUTPUT_TOKENS = 8
LEAN = "prompt_end, no extras"


@dataclass(frozen=True)
class Setting:
    """What one engine runs with. options: arguments of `Engine`."""

    name: str
    connector: Mapping[str, Any] | None
    options: Mapping[str, Any] = field(default_factory=dict)


def _native(host_bytes: int, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "MemcpySpec",
            "spec_module_path": "_native_spec",
            "cpu_bytes_to_use": host_bytes,
            **extra,
        },
    }


def make_settings(host_bytes: int) -> dict[str, Setting]:
    """All settings by a short name."""

    def ours(**options: Any) -> dict[str, Any]:
        return {"ram_bytes": host_bytes, **options}

    def prompt_end(*, slack: bool, generated: bool) -> dict[str, Any]:
        return ours(retention="prompt_end", retain_slack=slack, retain_generated=generated)

    return {
        "none": Setting("no connector", None),
        "native": Setting("native", _native(host_bytes)),
        "native-all": Setting(
            "native, retention interval None", _native(host_bytes), {"retention_interval": None}
        ),
        "dense": Setting("kvquilt dense", ours(retention="dense")),
        "lean": Setting(f"kvquilt {LEAN}", prompt_end(slack=False, generated=False)),
        "slack": Setting("kvquilt prompt_end, slack only", prompt_end(slack=True, generated=False)),
        "generated": Setting("kvquilt prompt_end, generated only", prompt_end(slack=False, generated=True)),
        "default": Setting("kvquilt prompt_end (default)", prompt_end(slack=True, generated=True)),
    }


@dataclass
class Turns:
    """What one setting gave, round by round: medians of a pass in ms; hits and bytes of the last round."""

    computed: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    branch: list[float] = field(default_factory=list)
    warm_hits: int = 0
    branch_hits: int = 0
    held_bytes: int = 0
    equal: bool = True
    drift: float = 0.0


class Comparison:
    """All settings on one model. shape: how many prompts of how many tokens."""

    def __init__(self, model: str, settings: Mapping[str, Setting], prompts: int, tokens: int) -> None:
        self.model = model
        self._settings = settings
        self._shape = {"count": prompts, "tokens": tokens, "seed": 0, "max_tokens": OUTPUT_TOKENS}
        self.turns = {name: Turns() for name in settings}
        self._reference: dict[str, list[Any]] = {}

    def measure(self, rounds: int) -> None:
        """One round to warm up, then `rounds` that count; the order changes from round to round."""
        with contextlib.ExitStack() as stack:
            engines = {}
            for name, setting in self._settings.items():
                _note(f"{self.model}: starting the engine for {setting.name!r}")
                engine = EngineProcess(self.model, setting.connector, **setting.options)
                engines[name] = stack.enter_context(engine)
            names = list(engines)
            for turn in range(rounds + 1):
                _note(f"{self.model}: round {turn} of {rounds}, load average {os.getloadavg()[0]:.1f}")
                # The reference comes first in the first round; later each begins once in a while.
                shift = turn % len(names)
                for name in names[shift:] + names[:shift]:
                    self._turn(name, engines[name], counts=turn > 0)

    def _turn(self, name: str, engine: EngineProcess, *, counts: bool) -> None:
        turns = self.turns[name]
        _reset(engine, connector=True)
        computed = engine.ask("run", branch=False, **self._shape)
        if name != "none":  # without a connector, warm is the engine's own prefix hit
            _reset(engine, connector=False)
        warm = engine.ask("run", branch=False, **self._shape)
        held = engine.ask("held")
        _reset(engine, connector=False)
        branch = engine.ask("run", branch=True, **self._shape)
        for phase, results in (("prompts", computed), ("prompts", warm), ("branch", branch)):
            self._compare(turns, self._reference.setdefault(phase, results), results)
        turns.held_bytes = held["bytes"]
        turns.warm_hits, turns.branch_hits = _hits(warm), _hits(branch)
        if counts:
            turns.computed.append(_p50(computed))
            turns.warm.append(_p50(warm))
            turns.branch.append(_p50(branch))

    @staticmethod
    def _compare(turns: Turns, reference: list[Any], results: list[Any]) -> None:
        for wanted, result in zip(reference, results, strict=True):
            turns.equal &= wanted["tokens"] == result["tokens"]
            pairs = zip(wanted["logprobs"], result["logprobs"], strict=False)
            turns.drift = max([turns.drift, *(abs(a - b) for a, b in pairs)])

    def rows(self) -> list[dict[str, Any]]:
        """One row per setting."""
        return [self._row(name) for name in self._settings]

    def _row(self, name: str) -> dict[str, Any]:
        turns = self.turns[name]
        native = self.turns.get("native")
        ratios: list[float] = []
        if native is not None and name not in ("none", "native"):
            ratios = [round(a / b, 3) for a, b in zip(turns.warm, native.warm, strict=True)]
        return {
            "setting": self._settings[name].name,
            "computed_ms": round(statistics.median(turns.computed), 2),
            "warm_ms": round(statistics.median(turns.warm), 2),
            "warm_times_native": statistics.median(ratios) if ratios else None,
            "warm_times_native_by_round": ratios,
            "branch_ms": round(statistics.median(turns.branch), 2),
            "warm_hit_tokens": turns.warm_hits,
            "branch_hit_tokens": turns.branch_hits,
            "held_bytes": turns.held_bytes,
            "equal_outputs": turns.equal,
            "max_logprob_drift": turns.drift,
        }


def verdict(turns: Mapping[str, Turns]) -> list[str]:
    """What must hold and does not, as sentences."""
    wrong = [f"{name}: outputs differ" for name, turn in turns.items() if not turn.equal]
    ours = turns.get("lean")
    peers = [turns[name] for name in ("native", "native-all") if name in turns]
    if ours is None or not peers:
        return wrong
    fewest = min(peer.held_bytes for peer in peers)
    if ours.held_bytes > fewest:
        wrong.append(f"{LEAN}: holds {ours.held_bytes} bytes, native holds {fewest}")
    if ours.warm_hits < max(peer.warm_hits for peer in peers):
        wrong.append(f"{LEAN}: {ours.warm_hits} warm hit tokens, native has more")
    return wrong


def _hits(results: list[Any]) -> int:
    return sum(result["external"] for result in results)


def _p50(results: list[Any]) -> float:
    return statistics.median(result["ttft_ms"] for result in results)


def _reset(engine: EngineProcess, *, connector: bool) -> None:
    if not engine.ask("reset", connector=connector):
        raise RuntimeError("the engine refused to reset its prefix cache: blocks are still in use")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


HEADER = (
    "setting", "computed ms", "warm ms", "warm, times native", "branch ms",
    "warm hit tokens", "branch hit tokens", "held MB", "outputs",
)  # fmt: skip


def markdown(model: str, rows: list[dict[str, Any]]) -> str:
    """The table of one model."""
    lines = [f"### {model}", "", "| " + " | ".join(HEADER) + " |"]
    lines.append("|---|" + "--:|" * (len(HEADER) - 2) + "---|")
    for row in rows:
        ratio, spread = row["warm_times_native"], row["warm_times_native_by_round"]
        outputs = "equal" if row["equal_outputs"] else "DIFFERENT"
        if row["equal_outputs"] and row["max_logprob_drift"]:
            outputs += f", log-probabilities to {row['max_logprob_drift']:.1e}"
        cells = (
            row["setting"],
            f"{row['computed_ms']:.1f}",
            f"{row['warm_ms']:.2f}",
            "-" if ratio is None else f"{ratio:.2f} ({min(spread):.2f} to {max(spread):.2f})",
            f"{row['branch_ms']:.1f}",
            f"{row['warm_hit_tokens']:,}",
            f"{row['branch_hit_tokens']:,}",
            f"{row['held_bytes'] / 1e6:.1f}",
            outputs,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Compare on each model, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="repeat for several (default: both minis)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--host-mib", type=int, default=512)
    parser.add_argument("--settings", nargs="+", default=None, choices=list(make_settings(1)))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="only the tables, for the docs")
    form.add_argument("--json", action="store_true", help="JSON on stdout")
    options = parser.parse_args()
    settings = make_settings(options.host_mib << 20)
    chosen = {name: settings[name] for name in settings if name in (options.settings or settings)}
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/compare_native.py", *sys.argv[1:]]),
        "load_average": list(os.getloadavg()),
        "models": {},
        "wrong": [],
    }
    for model in options.model or ["gemma3-mini", "gemma4-mini"]:
        comparison = Comparison(model, chosen, options.prompts, options.prompt_tokens)
        comparison.measure(options.rounds)
        report["models"][model] = comparison.rows()
        report["wrong"] += [f"{model}: {sentence}" for sentence in verdict(comparison.turns)]
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n\n".join(markdown(model, rows) for model, rows in report["models"].items()))
        if not options.markdown:
            loads = ", ".join(f"{load:.1f}" for load in report["load_average"])
            print(f"\n{report['date']}, load averages at the start {loads}")
    for sentence in report["wrong"]:
        _note(sentence)
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
