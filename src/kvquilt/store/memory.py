"""Is there memory for a budget? A memfd takes any size and fails only when it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvquilt.errors import SizingError

__all__ = ["available_memory", "check_memory"]

# A v1 controller without a limit reports the largest page-aligned int64.
_NO_LIMIT = 1 << 62


def check_memory(
    budget_bytes: int,
    *,
    meminfo: Path | str = "/proc/meminfo",
    cgroup: Path | str = "/proc/self/cgroup",
    cgroup_root: Path | str = "/sys/fs/cgroup",
) -> None:
    """Refuse a budget that the machine or the control group can't hold.

    Raises SizingError with the budget, what is available and which limit says so. Says nothing
    where no limit can be read.
    """
    limits = available_memory(meminfo=meminfo, cgroup=cgroup, cgroup_root=cgroup_root)
    for source, available in sorted(limits.items(), key=lambda item: item[1])[:1]:
        if budget_bytes > available:
            raise SizingError(
                f"a budget of {budget_bytes} bytes ({budget_bytes / 2**30:.2f} GiB) is more than the "
                f"{available} bytes ({available / 2**30:.2f} GiB) that {source} leaves available: "
                "lower ram_bytes or raise the limit"
            )


def available_memory(
    *,
    meminfo: Path | str = "/proc/meminfo",
    cgroup: Path | str = "/proc/self/cgroup",
    cgroup_root: Path | str = "/sys/fs/cgroup",
) -> dict[str, int]:
    """Bytes that each limit still allows, by its source; limits that can't be read are left out.

    A control group's own use counts without its inactive page cache, which the kernel drops
    before it refuses anything; every ancestor's limit counts too.
    """
    found: dict[str, int] = {}
    physical = _fields(Path(meminfo)).get("MemAvailable:")
    if physical is not None:
        found[f"{meminfo} (MemAvailable)"] = physical * 1024
    for directory, v2 in _memory_groups(Path(cgroup), Path(cgroup_root)):
        limit = _number(directory / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _number(directory / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or limit >= _NO_LIMIT or used is None:
            continue
        cached = _fields(directory / "memory.stat").get("inactive_file" if v2 else "total_inactive_file", 0)
        found[f"the control group {directory}"] = max(0, limit - max(0, used - cached))
    return found


def _memory_groups(cgroup: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Directories of this process's memory groups, innermost first, and whether they are v2."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        v2 = not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        for base in (root, root / "unified") if v2 else (root / "memory",):
            # Inside a container the path may be the host's: then only the mount's own root is there.
            here = base / path.lstrip("/")
            while here != base and here.is_relative_to(base):
                yield here, v2
                here = here.parent
            yield base, v2


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """First number after each name, from a file of `name number ...` lines."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
