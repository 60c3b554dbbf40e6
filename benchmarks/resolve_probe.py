"""Resolve + probe: how long one look-up holds up the engine's scheduler.

    python benchmarks/resolve_probe.py [--rounds 200] [--json]

A look-up of a long prompt in a store of about a million pages: probe, resolve, touch and lease,
as the connector calls it. Cases: the whole prompt is there (the common case); the engine holds
the first half itself; one window page is missing, so that the boundary has to be searched.
Limits: 0.3 ms for 65,536 tokens with 6 groups, 5 ms for 1,048,576 tokens. Beside it a plain
dict probe of the same keys in the same run, which is what the index replaces. The thread's own
processor time stands beside the wall time: where they differ, the machine was busy with others.
Exit status 1 if a median wall time is above its limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain, Store, Want, warm_up

LIMITS_MS = {65_536: 0.3, 1_048_576: 5.0}
BLOCK = 16


def layout_of_six(full_block: int) -> CacheLayout:
    """One full group and five sliding ones with windows of 512 to 4,096 tokens."""
    groups = [CacheGroup("full", kind="full", tokens_per_block=full_block, page_bytes=4096)]
    for window in (512, 1024, 1024, 2048, 4096):
        name = f"window{len(groups)}_{window}"
        groups.append(
            CacheGroup(name, kind="sliding", tokens_per_block=BLOCK, window=window, page_bytes=4096)
        )
    return CacheLayout(groups, tokens_per_hash=BLOCK)


def filled_store(layout: CacheLayout, num_tokens: int, total_pages: int) -> tuple[Store, Chain]:
    """A store filled with prompts of `num_tokens` tokens; the chain returned is from the middle."""
    rng = np.random.default_rng(0)
    per_prompt = sum(num_tokens // g.tokens_per_block for g in layout.groups)
    prompts = max(2, total_pages // per_prompt)
    slots = {g.name: prompts * (num_tokens // g.tokens_per_block) for g in layout.groups}
    plan = SimpleNamespace(
        slots=slots, slot_bytes=dict.fromkeys(slots, 4096), partition="solved", num_ranks=1
    )
    store = Store(layout, plan, prefault=False)
    chains = []
    for _ in range(prompts):
        digests = rng.bytes(32 * (num_tokens // BLOCK))
        chains.append(Chain(layout, [digests[i : i + 32] for i in range(0, len(digests), 32)]))
    step = 8192  # saved in the engine's steps, prompts in turn, so that slots are not in one run
    for start in range(0, num_tokens, step):
        for chain in chains:
            wants = [
                Want(chain, i, np.arange(start // g.tokens_per_block, (start + step) // g.tokens_per_block))
                for i, g in enumerate(layout.groups)
            ]
            ticket = store.reserve("bench", wants)
            assert ticket.ticket_id is not None
            store.commit(ticket.ticket_id, "bench")
    return store, chains[prompts // 2]


def timed(
    call: Callable[[], object], after: Callable[[object], None], rounds: int
) -> list[tuple[float, float]]:
    """Milliseconds of each call, wall and processor; `after` undoes it, outside the time."""
    times = []
    for _ in range(rounds):
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        result = call()
        cpu, wall = time.thread_time() - begin_cpu, time.perf_counter() - begin
        times.append((wall * 1e3, cpu * 1e3))
        after(result)
    return times


def measure(num_tokens: int, full_block: int, rounds: int) -> list[dict[str, object]]:
    """All cases of one prompt length and full block size."""
    layout = layout_of_six(full_block)
    store, chain = filled_store(layout, num_tokens, 1_000_000)
    entries = sum(g.pages for g in store.stats().groups)
    last_block = num_tokens // BLOCK - 1

    def release(found: object) -> None:
        assert found.tokens > num_tokens // 2, found  # type: ignore[attr-defined]
        store.release(found.lease_id, "bench")  # type: ignore[attr-defined]

    def lookup(local: int = 0) -> Callable[[], object]:
        return lambda: store.lookup("bench", chain, num_tokens + 1, local_tokens=local)

    results = {
        "whole prompt": timed(lookup(), release, rounds),
        "half held by the engine": timed(lookup(num_tokens // 2), release, rounds),
    }
    store.withdraw(chain, 3, np.array([last_block]))
    results["window page missing"] = timed(lookup(), release, rounds)
    digests = [bytes(row) for row in chain.hashes.view(np.uint8)]
    results["(chain from engine hashes)"] = timed(lambda: Chain(layout, digests), lambda _: None, rounds)
    keys = [bytes(row) for row in chain.keys(0).view(np.uint8)] if full_block == BLOCK else digests
    table = {key: i for i, key in enumerate(keys)}
    results["(plain dict, keys of one group)"] = timed(
        lambda: [table.get(key) for key in keys], lambda _: None, rounds
    )
    store.close()
    return [
        {
            "tokens": num_tokens,
            "full_block": full_block,
            "entries": entries,
            "case": case,
            "median_ms": statistics.median(wall for wall, _ in times),
            "p90_ms": sorted(wall for wall, _ in times)[int(0.9 * len(times))],
            "median_cpu_ms": statistics.median(cpu for _, cpu in times),
            "limit_ms": None if case.startswith("(") else LIMITS_MS[num_tokens],
        }
        for case, times in results.items()
    ]


def main() -> int:
    """Measure, print, and say whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm_up()
    rows = []
    for num_tokens in LIMITS_MS:
        for full_block in (16, 32):
            rows += measure(num_tokens, full_block, max(20, options.rounds * 65_536 // num_tokens))
    if options.json:
        print(json.dumps(rows))
    else:
        print(
            f"{'tokens':>9} {'full':>4} {'entries':>9}  {'case':<32} {'median':>9} {'cpu':>9} "
            f"{'p90':>10} {'limit':>8} ratio"
        )
        for row in rows:
            limit = row["limit_ms"]
            tail = f"{limit:5.1f} ms {row['median_ms'] / limit:5.2f}" if limit else ""  # type: ignore[operator]
            print(
                f"{row['tokens']:>9} {row['full_block']:>4} {row['entries']:>9}  {row['case']:<32} "
                f"{row['median_ms']:6.3f} ms {row['median_cpu_ms']:6.3f} ms {row['p90_ms']:7.3f} ms {tail}"
            )
    return int(any(row["limit_ms"] and row["median_ms"] > row["limit_ms"] for row in rows))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
