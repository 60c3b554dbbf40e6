"""Host gather and scatter beside a C memcpy loop over the same (source, destination, bytes) list.

Both run on one thread in interleaved rounds of the same run; the figure is the median of the
rounds, the ratio is ours over the limit. The C loop is compiled with gcc; without gcc there is
no limit to compare with and the benchmark says so.

    python benchmarks/copy_pages.py [--json] [--rounds 15] [--mib 256] [--threads 1]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvquilt.transfer import ArenaView, GroupPages, HostCopier, PageCopies, layer_pages

SHAPES = ((4, 32), (16, 32), (32, 32), (64, 64))
TARGET = 0.95
C_SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
void copy_all(const int64_t *dst, const int64_t *src, const int64_t *size, size_t n) {
    for (size_t i = 0; i < n; i++)
        memcpy((void *)dst[i], (const void *)src[i], (size_t)size[i]);
}
"""


def compile_limit(folder: str) -> Any | None:
    """The C memcpy loop as a ctypes function; None without gcc."""
    if shutil.which("gcc") is None:
        return None
    source, library = Path(folder, "limit.c"), Path(folder, "limit.so")
    source.write_text(C_SOURCE)
    subprocess.run(["gcc", "-O3", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    function = ctypes.CDLL(str(library)).copy_all
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    function.restype = None
    return function


class Case:
    """One page shape: layers apart from each other, as many blocks as fit in `mib`, in random order."""

    def __init__(self, fragment_kib: int, layers: int, mib: int, threads: int) -> None:
        self.name = f"{fragment_kib} KiB x {layers}"
        fragment, page = fragment_kib << 10, (fragment_kib << 10) * layers
        self.num_pages = max(2, (mib << 20) // page)
        blocks = self.num_pages + 1
        self.cache = torch.ones((layers, blocks, fragment), dtype=torch.uint8)
        pages = [layer_pages(f"layer{i}", self.cache[i], blocks) for i in range(layers)]
        self.arena = np.ones(self.num_pages * page, dtype=np.uint8)
        self.copier = HostCopier([GroupPages("group", tuple(pages), page)], [0], num_threads=threads)
        self.copier.attach([ArenaView.of(self.arena, page)])
        order = np.random.default_rng(0).permutation(self.num_pages)
        group = np.zeros(self.num_pages, dtype=np.int64)
        self.copies = PageCopies(group, order + 1, np.arange(self.num_pages))
        lanes = np.arange(layers)
        engine = self.cache.data_ptr() + (lanes * blocks + self.copies.block[:, None]) * fragment
        host = self.arena.ctypes.data + self.copies.slot[:, None] * page + lanes * fragment
        self.engine, self.host = np.ascontiguousarray(engine.ravel()), np.ascontiguousarray(host.ravel())
        self.size = np.full(self.engine.size, fragment, dtype=np.int64)
        self.num_bytes = page * self.num_pages

    def ours(self, save: bool) -> float:
        """Seconds of one job, from submission to completion."""
        begin = time.perf_counter()
        (self.copier.save if save else self.copier.load)(1, self.copies)
        self.copier.wait(1, None)
        seconds = time.perf_counter() - begin
        (done,) = self.copier.poll()
        assert done.ok, done.error
        return seconds

    def limit(self, function: Any, save: bool) -> float:
        """Seconds of the C loop over the same list."""
        dst, src = (self.host, self.engine) if save else (self.engine, self.host)
        begin = time.perf_counter()
        function(dst.ctypes.data, src.ctypes.data, self.size.ctypes.data, self.size.size)
        return time.perf_counter() - begin


def measure(case: Case, function: Any | None, rounds: int) -> list[dict[str, Any]]:
    """Medians over interleaved rounds, for save and load."""
    rows = []
    for save in (True, False):
        ours, limit = [], []
        for _ in range(rounds + 1):  # the first round only warms up
            ours.append(case.ours(save))
            if function is not None:
                limit.append(case.limit(function, save))
        figure = case.num_bytes / statistics.median(ours[1:]) / 1e9
        bound = case.num_bytes / statistics.median(limit[1:]) / 1e9 if limit else None
        rows.append(
            {
                "shape": case.name,
                "direction": "save" if save else "load",
                "gb_per_second": round(figure, 2),
                "limit_gb_per_second": round(bound, 2) if bound else None,
                "ratio": round(figure / bound, 3) if bound else None,
                "target": TARGET,
            }
        )
    return rows


def main() -> int:
    """Run all shapes; exit status 1 if a ratio misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=256, help="MiB copied per job")
    parser.add_argument("--threads", type=int, default=1, help="copy threads (the C loop has one)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        function = compile_limit(folder)
        if function is None:
            print("no gcc: the limit is not measured", file=sys.stderr)
        for fragment_kib, layers in SHAPES:
            case = Case(fragment_kib, layers, options.mib, options.threads)
            rows += measure(case, function, options.rounds)
            case.copier.close()
    if options.json:
        print(json.dumps({"threads": options.threads, "rows": rows}, indent=2))
    else:
        print(f"{'page':>14}  {'way':4}  {'GB/s':>6}  {'C memcpy loop':>13}  ratio (target {TARGET})")
        for row in rows:
            limit, ratio = row["limit_gb_per_second"] or "-", row["ratio"] or "-"
            print(f"{row['shape']:>14}  {row['direction']:4}  {row['gb_per_second']:6}  {limit:>13}  {ratio}")
    return int(any(row["ratio"] is not None and row["ratio"] < TARGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
