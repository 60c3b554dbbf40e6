"""What scripts/setup.sh asks about a virtual environment. Standard library only.

check_env.py whole          exit 1 if an installed package lacks files (a killed or full-disk install)
check_env.py pins FILE...   exit 1 if a pinned requirement is not installed at its version
check_env.py needs-triton   exit 0 unless the installed torch brings its own triton
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")


def broken_packages() -> Iterator[str]:
    """Packages whose metadata is incomplete, or that lack a file which they recorded."""
    for dist in metadata.distributions():
        name = dist.metadata["Name"] if dist.metadata else None
        if name is None or dist.files is None:
            yield f"{name or 'a package without metadata'}: incomplete metadata"
            continue
        gone = next(
            (f for f in dist.files if _matters(f) and not Path(str(dist.locate_file(f))).exists()), None
        )
        if gone is not None:
            yield f"{name}: lacks {gone}"


def _matters(file: metadata.PackagePath) -> bool:
    # Compiled files come and go; everything else that was recorded must be there.
    return file.suffix != ".pyc"


def missing_pins(paths: list[str]) -> Iterator[str]:
    """Pinned requirements that are absent, or installed at another version."""
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            match = PIN.match(line)
            if match is None:
                continue
            name, wanted = match.groups()
            try:
                # A local version ("2.13.0+cpu") names the build, not another release.
                found = metadata.version(name).split("+")[0]
            except metadata.PackageNotFoundError:
                yield f"{name}: not installed, wanted {wanted}"
                continue
            if found != wanted.split(" ")[0]:
                yield f"{name}: {found} is installed, wanted {wanted}"


def torch_brings_triton() -> bool:
    """True if the installed torch (a GPU build) pins a triton of its own."""
    try:
        required = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r"triton\b", r) and "extra" not in r for r in required)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["whole"]:
            problems = list(broken_packages())
        case ["pins", *paths] if paths:
            problems = list(missing_pins(paths))
        case ["brings-triton"]:
            return int(not torch_brings_triton())
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
