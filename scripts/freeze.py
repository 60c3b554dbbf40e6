"""Write requirements/*.lock.txt from the environment that runs this script.

    .venv/bin/python scripts/freeze.py

Three files, installed in this order: torch with its own requirements, everything else that the
engine and kvquilt need, and the tools for tests, types, lint and docs. A package is written into
the first file that needs it. Only names and release versions: no local versions, paths or indexes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# These ask for another torch build at import time and fail beside a plain CPU build. Text models
# need none of them. fastapi-cloud-cli is a deployment client that nothing here calls.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "fastapi-cloud-cli"}

HEADS = {
    "torch": "torch and what it requires. Install with dependencies: a GPU build has libraries of its own.",
    "engine": "What the engine and kvquilt require beside torch. Complete: install with --no-deps.\n"
    "# Without torchvision, torchaudio and torchcodec, which do not load beside a plain CPU torch.",
    "dev": "Tools for tests, types, lint, docs and the build. Complete: install with --no-deps.",
}


def closure(roots: Iterable[str]) -> dict[str, str]:
    """Name -> installed version of `roots` and everything that they require, extras included."""
    found: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(root) for root in roots]
    while todo:
        req = todo.pop()
        name, extras = canonicalize_name(req.name), frozenset(req.extras)
        if name in LEFT_OUT or (name, extras) in done:
            continue
        done.add((name, extras))
        dist = metadata.distribution(name)
        found[name] = dist.version.split("+")[0]
        for line in dist.requires or []:
            child = Requirement(line)
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in ("", *extras)):
                todo.append(child)
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {
        "torch": closure(["torch"]),
        "engine": closure([*extras["engine"], *project["dependencies"]]),
        "dev": closure([*extras["test"], *extras["docs"], *extras["dev"]]),
    }
    written: set[str] = set()
    for label, pins in wanted.items():
        lines = [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in written]
        written |= pins.keys()
        path = ROOT / "requirements" / f"{label}.lock.txt"
        path.write_text(f"# {HEADS[label]}\n# Written by scripts/freeze.py.\n" + "\n".join(lines) + "\n")
        print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
