"""Engines in processes of their own, and what is left of them afterwards."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Child", "engine_script", "left_behind", "wait_until"]

DEADLINE_SECONDS = 240.0
_POLL_SECONDS = 0.05

_ENGINE = """
import sys
from vllm import LLM, SamplingParams
from kvquilt.testing import make_model

if __name__ == "__main__":
    llm = LLM(
        make_model("gemma4-mini").as_posix(), dtype="float32", block_size=32, max_model_len=512,
        num_gpu_blocks_override=200, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
        skip_tokenizer_init=True, disable_hybrid_kv_cache_manager=False,
        kv_transfer_config={
            "kv_connector": "KVQuiltConnector", "kv_connector_module_path": "kvquilt.vllm",
            "kv_role": "kv_both", "engine_id": "ENGINE_ID",
            "kv_connector_extra_config": {"ram_bytes": "16MiB"},
        },
    )
    print("ready", flush=True)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        prompt = {"prompt_token_ids": [5 + i * i % 1999 for i in range(331)]}
        cached = []
        for _ in range(2):
            [answer] = llm.generate([prompt], params, use_tqdm=False)
            cached.append(answer.num_cached_tokens)
            llm.reset_prefix_cache()
        assert cached[1] == 320, cached
        print("answers", list(answer.outputs[0].token_ids), flush=True)
"""


def engine_script(engine_id: str = "one") -> list[str]:
    """A command that starts an engine core in a child of its own, says "ready", and answers each "run"
    with the tokens of a prompt that it has asked twice, the second time as a hit of kvquilt."""
    return [sys.executable, "-c", _ENGINE.replace("ENGINE_ID", engine_id)]


class Child:
    """A process in a session of its own, with `folder` for temporary files; a context manager that
    ends everything of that session."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        changes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TMPDIR": str(folder), "OMP_WAIT_POLICY": "passive"}
        self._log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **changes, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return "".join(self._log)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def expect(self, start: str) -> str:
        """Its next line that starts so."""
        line = self.next_line(start)
        assert line is not None, f"it ended without a line {start!r}:\n{self.log[-6000:]}"
        return line

    def next_line(self, start: str) -> str | None:
        """Its next line that starts so; None if it ends before."""
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no line {start!r} in {DEADLINE_SECONDS} s:\n{self.log[-6000:]}"
                ) from None
            if line is None or line.startswith(start):
                return line

    def members(self) -> list[int]:
        """Ids of all living processes of its session, itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                # Fields after the name, which may hold anything: state, parent, group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (OSError, ValueError):
                continue
            if entry.name.isdigit() and int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL for every process of its session, and wait until they are gone."""
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not self.members(), "killed processes are still there")

    def wait(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.append(line)
            self._lines.put(line)
        self._lines.put(None)


def left_behind(children: Sequence[Child], folder: Path) -> list[str]:
    """What ended processes have left: processes of theirs, files of ours, shared memory of ours."""
    members = [f"process {pid}" for child in children for pid in child.members()]
    files = [str(path) for path in (*folder.glob("*kvquilt*"), *Path("/dev/shm").glob("*kvquilt*"))]
    return members + files


def wait_until(condition: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(_POLL_SECONDS)
