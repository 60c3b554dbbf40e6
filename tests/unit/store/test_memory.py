"""Budgets against the machine's memory and the control groups' limits, all from files of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvquilt.errors import SizingError
from kvquilt.store import check_memory
from kvquilt.store.memory import available_memory

GIB = 1 << 30


def machine(
    tmp_path: Path, files: dict[str, str], cgroup: str = "0::/a/b\n", available_kib: int = 8 << 20
) -> dict[str, Path]:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    (tmp_path / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {
        "meminfo": tmp_path / "meminfo",
        "cgroup": tmp_path / "cgroup",
        "cgroup_root": tmp_path / "fs",
    }


def test_physical_memory_limits(tmp_path: Path) -> None:
    paths = machine(tmp_path, {})
    check_memory(8 * GIB, **paths)
    with pytest.raises(SizingError, match=rf"{8 * GIB + 1} bytes.*{8 * GIB} bytes.*MemAvailable"):
        check_memory(8 * GIB + 1, **paths)


@pytest.mark.parametrize("directory", ["a/b", "a", "."])
def test_the_tightest_v2_group_or_ancestor_limits_without_its_page_cache(
    tmp_path: Path, directory: str
) -> None:
    files = {
        f"{directory}/memory.max": str(4 * GIB),
        f"{directory}/memory.current": str(3 * GIB),
        f"{directory}/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    paths = machine(tmp_path, files)
    check_memory(3 * GIB, **paths)
    with pytest.raises(SizingError, match=rf"{3 * GIB} bytes.*control group"):
        check_memory(3 * GIB + 1, **paths)


def test_v1_limit(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": str(2 * GIB),
        "memory/a/memory.usage_in_bytes": str(GIB),
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "0",
    }
    paths = machine(tmp_path, files, cgroup="5:cpu,cpuacct:/a\n4:memory:/a\n")
    assert sorted(available_memory(**paths).values()) == [GIB, 8 * GIB]


def test_a_container_whose_path_is_the_hosts_uses_the_mounts_root(tmp_path: Path) -> None:
    files = {"memory.max": str(GIB), "memory.current": "0"}
    paths = machine(tmp_path, files, cgroup="0::/kubepods/pod1/../../x\n")
    with pytest.raises(SizingError, match="control group"):
        check_memory(2 * GIB, **paths)


def test_max_and_unreadable_files_are_no_limit(tmp_path: Path) -> None:
    paths = machine(tmp_path, {"a/b/memory.max": "max\n", "a/b/memory.current": "1"})
    check_memory(8 * GIB, **paths)
    check_memory(1 << 60, meminfo=tmp_path / "no", cgroup=tmp_path / "no", cgroup_root=tmp_path / "no")


def test_ten_tebibytes_are_refused_on_this_machine() -> None:
    with pytest.raises(SizingError, match=r"10240\.00 GiB"):
        check_memory(10 << 40)
