"""Engines in processes of their own, so that several can be measured in turns, pass by pass.

Each process starts one engine and then does what it is told, one JSON line at a time; while it
waits it uses no CPU. Turns of a second or two, in a changing order, let noise of the machine
fall on all of them alike, which one engine after another would not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

VOCABULARY = (3, 2048)


class EngineProcess:
    """One engine elsewhere; a context manager. Raises RuntimeError if the process ends early.

    model, connector: as `kvquilt.testing.engine.Engine` takes them; options: its other arguments.
    """

    def __init__(self, model: str, connector: Mapping[str, Any] | None, **options: Any) -> None:
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(writing,),
            # Threads that spin between parallel regions would starve all others of a small machine.
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
            text=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self.ask("start", model=model, connector=connector, options=options)

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have `command` done and return its answer."""
        pipe = self._process.stdin
        if pipe is None:
            raise RuntimeError("the engine's process has no input")
        pipe.write(json.dumps({"command": command, **arguments}) + "\n")
        pipe.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with status {self._process.wait()}; see its log")
        return json.loads(line)

    def kill(self) -> dict[str, int]:
        """End the process with SIGKILL, as a crash or the system would. Returns name -> bytes of what
        it has left in shared memory; that is removed."""
        maps = Path(f"/proc/{self._process.pid}/maps").read_text(encoding="utf-8")
        shared = set(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))
        self._process.kill()
        self._process.wait()
        left = {}
        for path in sorted(map(Path, shared)):
            with contextlib.suppress(FileNotFoundError):
                left[path.name] = path.stat().st_blocks * 512
                path.unlink()
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def make_prompts(count: int, tokens: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """`count` random prompts, and as many that keep the first two thirds and then differ."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(*VOCABULARY, (count, tokens))
    branches = prompts.copy()
    kept = 2 * tokens // 3
    branches[:, kept:] = rng.integers(*VOCABULARY, (count, tokens - kept))
    return prompts.tolist(), branches.tolist()


class _Server:
    """The process's side: holds the engine and answers commands."""

    def __init__(self, model: str, connector: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        from kvquilt.testing.engine import Engine

        self.engine = Engine(model, connector=connector, **options)
        self.connector = connector
        self._warnings = _Warnings()
        self._failures: Counter[str] = Counter()

    def run(
        self, *, count: int, tokens: int, seed: int, branch: bool, max_tokens: int, order: str = "same"
    ) -> list[Any]:
        """One request after another; then step until every save has ended."""
        prompts = make_prompts(count, tokens, seed)[int(branch)]
        results = self.engine.run(prompts, max_tokens=max_tokens, concurrency=1, order=order)
        self.engine.step_until_idle()
        return [
            {
                "ttft_ms": result.ttft_seconds * 1e3 if result.ttft_seconds is not None else None,
                "local": result.local_hit_tokens,
                "external": result.external_hit_tokens,
                "tokens": list(result.tokens),
                "logprobs": list(result.logprobs),
            }
            for result in results
        ]

    def reset(self, *, connector: bool) -> bool:
        """Empty the engine's prefix cache, and with `connector` what lies outside, too."""
        return self.engine.reset_prefix_cache(reset_connector=connector)

    def held(self) -> dict[str, int]:
        """Pages outside the engine, and the bytes of the slots or rows that they take."""
        connector = self.engine.connector
        if connector is None:
            return {"pages": 0, "bytes": 0}
        if hasattr(connector, "scheduler_side"):
            groups = connector.scheduler_side.store.stats().groups
            return {"pages": sum(g.pages for g in groups), "bytes": sum(g.bytes_used for g in groups)}
        manager = connector.connector_scheduler.manager
        rows = manager._num_allocated_chunks - len(manager._free_list)
        return {"pages": rows, "bytes": rows * self.engine.worker_connector.connector_worker.worker.row_bytes}

    # -- with a tier on disk --

    def open_tier(self) -> bool:
        """Step until pages can be saved, and begin to count what goes wrong."""
        connector = self.engine.connector
        side = getattr(connector, "scheduler_side", None)
        self.engine.run([[5, 6, 7]], max_tokens=1)
        while side is not None and not side._attached:
            self.engine.run([[5, 6, 7]], max_tokens=1)
        self.engine.step_until_idle()
        for name in ("vllm", "kvquilt"):
            logging.getLogger(name).addHandler(self._warnings)
        if side is None:
            self._tap(connector.connector_scheduler.manager)
        return True

    def _tap(self, manager: Any) -> None:
        """Sum the peer's own counters of failures on their way to the engine's metrics."""
        take = manager.get_stats

        def tapped() -> Any:
            stats = take()
            for name, values in (stats._values if stats is not None else {}).items():
                if "failures" in name:
                    self._failures[name] += int(sum(values.values()))
            return stats

        manager.get_stats = tapped

    def settle(self) -> bool:
        """Wait until everything that was saved is on disk."""
        connector = self.engine.connector
        self.engine.step_until_idle()
        if hasattr(connector, "scheduler_side"):
            return bool(connector.scheduler_side.below.tier.wait_idle(60))
        for tier in connector.connector_scheduler.manager.secondary_tiers:
            tier.drain_jobs()
        return True

    def wrong(self) -> dict[str, Any]:
        """What the system itself has noticed and counted, and lines in its log from warnings upwards."""
        connector = self.engine.connector
        if hasattr(connector, "scheduler_side"):
            counted = sum(group.bad for group in connector.scheduler_side.below.stats().groups)
        else:
            self.engine.run([[5, 6, 7]], max_tokens=1)  # counters travel with a step
            counted = sum(self._failures.values())
        return {"counted": counted, "lines": self._warnings.lines}

    def groups(self) -> list[dict[str, Any]]:
        """Per cache group: whether it is dense, and where its bytes lie in a stored page."""
        specs = [group.kv_cache_spec for group in self.engine.kv_cache_config.kv_cache_groups]
        connector = self.engine.connector
        if hasattr(connector, "scheduler_side"):
            layout = connector.scheduler_side.layout.groups
            content = [[(0, group.slot_content_bytes(1))] for group in layout]
        else:
            content = self.engine.worker_connector.connector_worker.worker.content()
        return [
            {"dense": type(spec).__name__ == "FullAttentionSpec", "content": parts}
            for spec, parts in zip(specs, content, strict=True)
        ]

    def block_hash(self, *, count: int, tokens: int, seed: int, prompt: int, end: int) -> str:
        """The engine's hash that closes the first `end` tokens of a prompt, in hex."""
        tokens_of = make_prompts(count, tokens, seed)[0][prompt]
        key = self.engine.add(tokens_of, max_tokens=1)
        hashes = self.engine.scheduler.requests[key].block_hashes
        unit = tokens // len(hashes)
        wanted = bytes(hashes[end // unit - 1]).hex()
        while not self.engine.finished(key):
            self.engine.step()
        self.engine.take_result(key)
        return wanted


class _Warnings(logging.Handler):
    """Keeps what is logged from warnings upwards."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _serve(answers: Any) -> None:
    server: _Server | None = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        answer: Any = True
        if command == "start":
            server = _Server(**request)
        else:
            answer = getattr(server, command)(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if server is not None:
        server.engine.close()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as channel:
        _serve(channel)
