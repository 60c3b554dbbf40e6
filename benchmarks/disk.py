"""The disk tier: rates beside fio, start-up, bytes written per token, and a warm start from disk.

    python benchmarks/disk.py DIR [--json] [--parts rates start tokens ttft] [--rounds 5] [--mib 1024]
        [--kib 64 256 1024 4096]

DIR must be on the file system to be measured and have a few GiB free (14 GiB for `start`); everything
is removed afterwards. `rates` needs fio. All rates are of payload; the page's header is our cost. fio
moves every page through one buffer per thread, which stays in the processor's caches; left alone it writes
the same bytes again and again, which nobody does who has something to keep. So there are two more limits:
fio with fresh data in each write (--refill_buffers), and the plain system calls on the tier's memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.layout.namespace import NamespaceFactors
from kvquilt.store import Arena, Chain, map_memory, populate_all, warm_up
from kvquilt.tiers import DiskOptions, NVMeTier, Pages
from kvquilt.tiers.format import entry_dtype, seal_entries

PAGE_KIB = (64, 256, 1024, 4096)
RATE_TARGET = 0.95
START_SLOTS = 1_600_000
THREADS = 4
BLOCK = 16


def namespace() -> NamespaceFactors:
    return NamespaceFactors(
        model="bench",
        config="",
        weights="",
        groups=(),
        tokens_per_hash=BLOCK,
        hash_algorithm="sha256",
        hash_seed="0",
        cache_layout="",
    )


def one_group(page_bytes: int) -> CacheLayout:
    return CacheLayout([CacheGroup("full", kind="full", tokens_per_block=BLOCK, page_bytes=page_bytes)])


def a_chain(layout: CacheLayout, seed: int, blocks: int) -> Chain:
    return Chain(layout, [hashlib.sha256(b"%d %d" % (seed, i)).digest() for i in range(blocks)])


@contextmanager
def scratch(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvquilt-disk-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def host_ram(num_bytes: int) -> memoryview:
    """Memory as the pools in host RAM have it."""
    arena = Arena(0, "bench", num_bytes >> 16, 1 << 16)
    populate_all(arena.fd, num_bytes)
    memory = map_memory(arena.fd, num_bytes)
    arena.close()
    return memory


# ---- rates ----


class TierUnderTest:
    """A tier full of pages of one size, written and read as the connector does it."""

    def __init__(self, folder: Path, page_bytes: int, total_bytes: int) -> None:
        self.layout = one_group(page_bytes)
        self.count = total_bytes // page_bytes
        self.page_bytes = page_bytes
        budget = int(total_bytes * 1.01) + self.count * 8192 + (8 << 20)
        options = DiskOptions(folder, budget, threads=THREADS, queue_bytes=2 * total_bytes)
        self.tier = NVMeTier(self.layout, namespace(), options)
        self.memory = host_ram(total_bytes)
        np.frombuffer(self.memory, dtype=np.uint64)[:] = np.random.default_rng(0).integers(
            0, 2**63, total_bytes // 8, dtype=np.uint64
        )
        self.order = np.random.default_rng(1).permutation(self.count)
        self.seed = 0

    def write(self) -> float:
        """Write every page under new keys, over the slots of older ones; bytes per second."""
        self.seed += 1
        chain = a_chain(self.layout, self.seed, self.count)
        blocks = np.arange(self.count, dtype=np.int64)
        started = time.perf_counter()
        accepted = self.tier.save(
            [Pages(chain, 0, blocks, self.memory, blocks * self.page_bytes)], lambda: None
        )
        assert self.tier.wait_idle(600)
        took = time.perf_counter() - started
        assert accepted == self.count, f"{accepted} of {self.count} pages were accepted"
        return self.count * self.page_bytes / took

    def read(self) -> float:
        """Read every page in random order, each checked; bytes per second."""
        chain = a_chain(self.layout, self.seed, self.count)
        ended: list[Any] = []
        blocks = self.order.astype(np.int64)
        started = time.perf_counter()
        self.tier.load(
            [Pages(chain, 0, np.sort(blocks), self.memory, blocks * self.page_bytes)], ended.append
        )
        assert self.tier.wait_idle(600)
        took = time.perf_counter() - started
        assert ended[0][0].all(), "a page did not come back"
        return self.count * self.page_bytes / took


class PlainCalls:
    """The system calls alone: as many threads move the same pages between the same memory and a plain file
    with direct I/O, one call a page, no headers, no checks, no index."""

    def __init__(self, folder: Path, subject: TierUnderTest) -> None:
        self.subject = subject
        self.fd = os.open(folder / "plain.data", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, subject.count * subject.page_bytes)

    def run(self, kind: str) -> float:
        subject, page = self.subject, self.subject.page_bytes
        call = os.pwritev if kind == "write" else os.preadv
        places = range(subject.count) if kind == "write" else subject.order.tolist()
        todo = iter([(subject.memory[i * page : (i + 1) * page], i * page) for i in places])

        def work() -> None:
            for piece, offset in todo:  # one shared iterator: each page is taken once
                assert call(self.fd, [piece], offset) == page

        jobs = THREADS - 1 if kind == "write" else THREADS
        threads = [threading.Thread(target=work) for _ in range(jobs)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return subject.count * page / (time.perf_counter() - started)


def fio(folder: Path, kind: str, page_bytes: int, total_bytes: int, *, fresh: bool = False) -> float:
    """fio's rate with direct I/O in bytes per second: as many threads, one call at a time each. The tier
    leaves one of its calls to reads while it writes. fresh: new data in each write."""
    jobs = THREADS - 1 if kind == "write" else THREADS
    share = total_bytes // jobs // page_bytes * page_bytes
    command = [
        "fio", "--name=limit", f"--filename={folder / 'fio.data'}", f"--rw={kind}", f"--bs={page_bytes}",
        f"--size={share}", "--direct=1", "--ioengine=psync", "--thread", f"--numjobs={jobs}",
        f"--io_size={share}", f"--offset_increment={share}",
        "--group_reporting", "--output-format=json", "--randrepeat=0", "--fallocate=none",
        f"--refill_buffers={fresh:d}", "--overwrite=1",
    ]  # fmt: skip
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(out[out.index("{") :])["jobs"][0]
    return float(job["write" if "write" in kind else "read"]["bw_bytes"])


def rates(root: Path, rounds: int, mib: int, sizes: list[int]) -> list[dict[str, Any]]:
    if shutil.which("fio") is None:
        print("fio is not installed: no rates", file=sys.stderr)
        return []
    rows = []
    for kib in sizes:
        with scratch(root) as folder:
            page, total = kib << 10, mib << 20
            subject = TierUnderTest(folder / "tier", page, total)
            subject.write()
            fio(folder, "write", page, total)
            plain = PlainCalls(folder, subject)
            plain.run("write")
            # Each reads what it has just written: what the host keeps of a virtual disk is the same for all.
            sides: list[dict[str, Callable[[], float]]] = [
                {"write": subject.write, "read": subject.read},
                {
                    "fio write": lambda f=folder, p=page, t=total: fio(f, "write", p, t),
                    "fio read": lambda f=folder, p=page, t=total: fio(f, "randread", p, t),
                },
                {"plain write": lambda p=plain: p.run("write"), "plain read": lambda p=plain: p.run("read")},
                {"fresh write": lambda f=folder, p=page, t=total: fio(f, "write", p, t, fresh=True)},
            ]
            seen: dict[str, list[float]] = {name: [] for side in sides for name in side}
            order = random.Random(0)
            for _ in range(rounds):
                for side in order.sample(sides, len(sides)):
                    for name, run in side.items():
                        seen[name].append(run())
            subject.tier.close()
            for kind in ("write", "read"):
                row: dict[str, Any] = {"page_kib": kib, "kind": kind}
                row["mb_per_s"] = round(statistics.median(seen[kind]) / 1e6)
                row["target"] = RATE_TARGET if kib <= 1024 else None
                for limit in ("fio", "fresh", "plain"):
                    if of_limit := seen.get(f"{limit} {kind}"):
                        ratios = [a / b for a, b in zip(seen[kind], of_limit, strict=True)]
                        row[limit] = {
                            "mb_per_s": round(statistics.median(of_limit) / 1e6),
                            "ratio": round(statistics.median(ratios), 3),
                            "least": round(min(ratios), 3),
                            "most": round(max(ratios), 3),
                        }
                rows.append(row)
                print(row, file=sys.stderr)
    return rows


# ---- start-up ----


def start(root: Path, rounds: int) -> dict[str, Any]:
    """Seconds until a tier of 1.6 million full slots serves, by its table; and per slot by headers."""
    layout = one_group(4096)
    with scratch(root) as folder:
        options = DiskOptions(folder, START_SLOTS * (8192 + 72) + (1 << 20))
        tier = NVMeTier(layout, namespace(), options)
        slots = tier.plan.slots["full"]
        while tier._opened.slabs[0].usable_slots < slots:  # type: ignore[union-attr]
            time.sleep(0.05)
        slab = tier._opened.slabs[0]  # type: ignore[union-attr]
        entries = np.zeros(slots, dtype=entry_dtype(slab.facts.span_keys))
        entries["key"] = np.random.default_rng(0).integers(0, 2**63, (slots, 4), dtype=np.uint64)
        entries["generation"] = 1
        entries["stamp"] = np.arange(slots)
        seal_entries(entries, np.arange(slots, dtype=np.int64))
        slab.table.write(np.arange(slots), entries)
        tier.close()
        took = []
        for _ in range(rounds):
            started = time.perf_counter()
            tier = NVMeTier(layout, namespace(), options)
            assert tier.state == "on"
            took.append(time.perf_counter() - started)
            found = tier.stats().groups[0].pages
            assert found == slots, f"{found} of {slots} pages were found"
            tier.close()
    with scratch(root) as folder:
        subject = TierUnderTest(folder, 64 << 10, 512 << 20)
        subject.write()
        subject.tier.close()
        for table in folder.rglob("*.table"):
            table.unlink()
        started = time.perf_counter()
        subject.tier = NVMeTier(subject.layout, namespace(), subject.tier.options)
        scan = time.perf_counter() - started
        assert subject.tier.stats().groups[0].pages == subject.count
        subject.tier.close()
    return {
        "slots": slots,
        "seconds_by_table": round(statistics.median(took), 3),
        "seconds_by_headers_of_8192_slots": round(scan, 3),
    }


# ---- in the engine ----


def in_engine(root: Path, rounds: int, parts: list[str]) -> dict[str, Any]:
    from kvquilt.testing import Engine

    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    if "tokens" in parts:
        prompts = [rng.integers(5, 1000, 2000).tolist() for _ in range(12)]
        for retention in ("dense", "prompt_end"):
            with scratch(root) as folder:
                options = {"ram_bytes": "512MiB", "disk_path": str(folder), "disk_bytes": "1GiB"}
                with Engine(
                    "gemma4-mini", connector=options | {"retention": retention}, max_model_len=4096
                ) as e:
                    serve(e, prompts)
                    below = e.connector.scheduler_side.below
                    assert below.tier.wait_idle(60)
                    written = sum(group.written_bytes for group in below.stats().groups)
                found[f"written_bytes_per_token_{retention}"] = round(written / (12 * 2000))
    if "ttft" in parts:
        found |= warm_from_disk(root, rounds, rng)
    return found


def serve(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """The prompts one by one, after all ranks have attached."""
    side = engine.connector.scheduler_side
    while not side._attached:
        engine.run([[5, 6, 7]], max_tokens=1)
    engine.step_until_idle()
    results = engine.run(prompts, max_tokens=2, concurrency=1)
    engine.step_until_idle()
    return list(results)


def warm_from_disk(root: Path, rounds: int, rng: np.random.Generator) -> dict[str, Any]:
    """Time to the first token of 8,000-token prompts: computed, from disk in a new engine, from RAM."""
    from kvquilt.testing import Engine

    prompts = [rng.integers(5, 1000, 8000).tolist() for _ in range(rounds)]
    with scratch(root) as folder:
        options = {"ram_bytes": "512MiB", "disk_path": str(folder), "disk_bytes": "1GiB"}
        arguments: dict[str, Any] = {"connector": options, "max_model_len": 8192, "max_num_seqs": 1}
        with Engine("gemma4-mini", **arguments) as e:
            cold = serve(e, prompts)
            assert e.connector.scheduler_side.below.tier.wait_idle(60)
        with Engine("gemma4-mini", **arguments) as e:
            disk = serve(e, prompts)
            below = e.connector.scheduler_side.below
            read = sum(group.read_bytes for group in below.stats().groups) / len(prompts)
            assert e.reset_prefix_cache()
            ram = serve(e, prompts)
        assert [r.tokens for r in cold] == [r.tokens for r in disk] == [r.tokens for r in ram]

    def ms(results: list[Any]) -> float:
        return round(statistics.median(r.ttft_seconds for r in results) * 1e3, 1)

    return {
        "ttft_ms_computed": ms(cold),
        "ttft_ms_from_disk": ms(disk),
        "ttft_ms_from_ram": ms(ram),
        "read_mib_per_prompt": round(read / 2**20, 2),
        "hit_tokens": disk[0].external_hit_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["rates", "start", "tokens", "ttft"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--kib", type=int, nargs="+", default=PAGE_KIB, help="page sizes of `rates`")
    given = parser.parse_args()
    warm_up()
    found: dict[str, Any] = {}
    if "rates" in given.parts:
        found["rates"] = rates(given.directory.resolve(), given.rounds, given.mib, given.kib)
    if "start" in given.parts:
        found["start"] = start(given.directory.resolve(), given.rounds)
    if {"tokens", "ttft"} & set(given.parts):
        found["engine"] = in_engine(given.directory.resolve(), given.rounds, given.parts)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for row in found.get("rates", []):
        print(f"{row['page_kib']:>5} KiB {row['kind']:<5} {row['mb_per_s']:>6} MB/s", end="")
        for name, label in (("fio", "fio"), ("fresh", "fio, fresh data"), ("plain", "plain calls")):
            if limit := row.get(name):
                least, most = limit["least"], limit["most"]
                print(
                    f"; {label} {limit['mb_per_s']}: {limit['ratio']:.2f} ({least:.2f} to {most:.2f})", end=""
                )
        print(f"; target {row['target']} of fio" if row["target"] else "")
    for part in ("start", "engine"):
        for name, value in found.get(part, {}).items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
