"""Runs all tests in two processes at once; with arguments, pytest in one process with those.

    python scripts/run_tests.py [PYTEST_ARGUMENT ...]

The second half has most of the engines in processes of their own, one test of each kind of group,
and the tests without an engine but for the tiers'; the first has the rest. What the second half says
is shown once the first has ended. Exit status 1 if a test of either fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "tests/engine"
TIERS = "tests/unit/tiers"
SECOND = [
    f"{ENGINE}/test_connector_life.py",
    f"{ENGINE}/test_tensor_parallel.py",
    f"{ENGINE}/test_data_parallel.py",
    f"{ENGINE}/test_kinds.py",
]


def without_engine() -> list[str]:
    """Everything that pytest would collect by itself, less the engine's tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    paths = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    folders = sorted({path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")})
    return [f"tests/{name}" for name in folders if f"tests/{name}" != ENGINE] + [
        path for path in paths if path != "tests"
    ]


def start(name: str, arguments: list[str], output: int | None = None) -> subprocess.Popen[bytes]:
    """Start pytest, with a cache of its own."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir=.cache/pytest-{name}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)


def both_halves() -> int:
    """Run the two halves side by side; 0 if all passed."""
    missing = [path for path in [*SECOND, TIERS] if not (ROOT / path).exists()]
    if missing:
        print(f"run_tests: no such file: {', '.join(missing)}", file=sys.stderr)
        return 2
    ignored = [f"--ignore={path}" for path in SECOND]
    with tempfile.TemporaryFile() as told:
        second = start("b", [*SECOND, *without_engine(), f"--ignore={TIERS}"], told.fileno())
        first = start("a", [ENGINE, TIERS, *ignored])
        try:
            failed = first.wait() != 0
            print("\n== the second half", flush=True)
            failed = second.wait() != 0 or failed
        finally:
            for half in (first, second):
                if half.poll() is None:
                    half.terminate()
                    half.wait()
        told.seek(0)
        sys.stdout.buffer.write(told.read())
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=ROOT))
    sys.exit(both_halves())
