"""Check the CUDA copier on a real device: round trips byte for byte, then GB/s beside a limit.

For each size of the contiguous piece, pages of several layers are saved and loaded, once by the
path that the copier chooses and once by copy engines alone; the limit is one torch copy of the
same bytes between pinned host memory and the device. Needs torch, numpy, numba and kvquilt, and
no engine. Exit status: 0 all bytes equal, 1 a difference or a failed job, 2 no CUDA device.

    python benchmarks/gpu_check.py [--json] [--mib 512] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from kvquilt.transfer import ArenaView, CudaCopier, GroupPages, PageCopies, cuda, layer_pages

PIECES_KIB = (4, 8, 16, 24, 32, 64, 256, 1024)
LAYERS = 16
ODD_BYTES = 1001
WAIT_SECONDS = 120.0


class Case:
    """Pages of `LAYERS` pieces, in random block order, with an arena in host memory."""

    def __init__(self, piece_bytes: int, mib: int) -> None:
        page = piece_bytes * LAYERS
        self.num_pages = max(4, (mib << 20) // page)
        blocks = 2 * self.num_pages + 1  # saved from the lower half, loaded into the upper one
        self.cache = torch.randint(0, 255, (LAYERS, blocks, piece_bytes), dtype=torch.uint8, device="cuda")
        layers = [layer_pages(f"layer{i}", self.cache[i], blocks) for i in range(LAYERS)]
        self.arena = np.zeros((self.num_pages, page), dtype=np.uint8)
        self.copier = CudaCopier([GroupPages("group", tuple(layers), page)], [0])
        begin = time.perf_counter()
        self.copier.attach([ArenaView.of(self.arena, page)])
        self.pin_seconds = time.perf_counter() - begin
        order = np.random.default_rng(0).permutation(self.num_pages)
        group = np.zeros(self.num_pages, dtype=np.int64)
        self.saves = PageCopies(group, order + 1, np.arange(self.num_pages))
        self.loads = PageCopies(group, order + 1 + self.num_pages, np.arange(self.num_pages))
        self.num_bytes = page * self.num_pages

    def seconds(self, way: str) -> float:
        """One job, from submission until it is reported. Raises RuntimeError if it failed."""
        begin = time.perf_counter()
        getattr(self.copier, way)(1, self.saves if way == "save" else self.loads)
        if not self.copier.wait(1, WAIT_SECONDS):
            raise RuntimeError(f"{way} did not end in {WAIT_SECONDS} s")
        seconds = time.perf_counter() - begin
        (done,) = self.copier.poll()
        if not done.ok:
            raise RuntimeError(f"{way}: {done.error}")
        return seconds

    def check(self) -> list[str]:
        """Byte for byte: the slots hold the blocks, the other blocks get them, ordered after a
        forward pass that has only just been launched."""
        half = 1 + self.num_pages
        self.cache.random_(0, 255)  # not waited for: the save must
        self.seconds("save")
        order = torch.from_numpy(self.saves.block).cuda()
        want = self.cache[:, order].permute(1, 0, 2).reshape(self.num_pages, -1).cpu().numpy()
        wrong = [] if np.array_equal(self.arena, want) else ["the slots differ from the blocks"]
        self.seconds("load")
        if not torch.equal(self.cache[:, half:], self.cache[:, 1:half]):
            wrong.append("the loaded blocks differ from the saved ones")
        return wrong


def torch_limit(num_bytes: int, way: str, rounds: int) -> float:
    """Median seconds of one contiguous torch copy between pinned memory and the device."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    dst, src = (host, device) if way == "save" else (device, host)
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dst.copy_(src, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(piece_kib: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows for both ways and both paths of one piece size, and what was wrong."""
    rows: list[dict[str, Any]] = []
    case = Case(piece_kib << 10, options.mib)
    wrong = case.check()
    chosen = case.copier.paths()[0]
    for way in ("save", "load"):
        limit = torch_limit(case.num_bytes, way, options.rounds)
        for path, below in (("kernel", 1 << 40), ("engines", 0)):
            cuda.KERNEL_BELOW_BYTES, kept = below, cuda.KERNEL_BELOW_BYTES
            median = statistics.median([case.seconds(way) for _ in range(options.rounds + 1)][1:])
            cuda.KERNEL_BELOW_BYTES = kept
            rows.append(
                {
                    "piece_kib": piece_kib,
                    "direction": way,
                    "path": path,
                    "chosen": (chosen.kernel_pieces > 0) == (path == "kernel"),
                    "gb_per_second": round(case.num_bytes / median / 1e9, 2),
                    "limit_gb_per_second": round(case.num_bytes / limit / 1e9, 2),
                    "ratio": round(limit / median, 3),
                }
            )
    case.copier.close()
    return rows, [f"{piece_kib} KiB: {reason}" for reason in wrong]


def main() -> int:
    """Run all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    parser.add_argument("--mib", type=int, default=512, help="MiB copied per job")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device; torch finds none here. Nothing was checked.", file=sys.stderr)
        return 2
    odd = Case(ODD_BYTES, 8)
    wrong = [f"{ODD_BYTES} bytes: {reason}" for reason in odd.check()]
    odd.copier.close()
    rows: list[dict[str, Any]] = []
    for piece_kib in PIECES_KIB:
        more, reasons = measure(piece_kib, options)
        rows += more
        wrong += reasons
    name = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps({"device": name, "equal": not wrong, "wrong": wrong, "rows": rows}, indent=2))
    else:
        print(f"{name}: {'all bytes equal' if not wrong else '; '.join(wrong)}")
        print(f"{'piece':>9}  {'way':4}  {'path':7}  {'GB/s':>6}  {'limit':>6}  ratio  (*: in use)")
        for row in rows:
            print(
                f"{row['piece_kib']:>5} KiB  {row['direction']:4}  {row['path']:7}  "
                f"{row['gb_per_second']:6}  "
                f"{row['limit_gb_per_second']:6}  {row['ratio']:5}  {'*' if row['chosen'] else ''}"
            )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
