"""Random traffic over a small host memory and a disk, through restarts, kills and resets.

Whatever comes back is checked token by token by the harness, as everywhere in this folder: what attention
reads must be what was computed for that place.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from harness.connector_support import KINDS, LAYOUTS, Quilt, engine_of, full, sliding, tokens
from harness.traffic import BASES, blocks_of_longest
from kvquilt.testing.copy_faults import CopyPlan

MORE = int(os.environ.get("KVQUILT_STRESS", "1"))
NAMES = sorted(LAYOUTS | KINDS)
LIVES = 2
DISK_BYTES = 6 << 20
GROUPS = [full(32), sliding(16, 64)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def new_life(draw: random.Random, name: str, disk: Path, fixed: dict[str, object]) -> Quilt:
    """An engine over the directory; what is not in `fixed` may differ from life to life."""
    groups, options = engine_of(name)
    recurrent = any(group.kind == "recurrent" for group in groups)
    rates = draw.choice([{}, {}, {"fail": 0.1, "late": 0.3}])
    return Quilt(
        groups,
        copies=CopyPlan(seed=draw.randrange(1 << 30), rates=rates),
        ram_bytes=draw.choice(["96KiB", "192KiB", "1MiB"]),
        disk_path=str(disk),
        disk_bytes=DISK_BYTES,
        disk_write=draw.choice(["through", "through", "evicted"]),
        retain_generated=draw.random() < 0.7,
        num_blocks=int(blocks_of_longest(name) * draw.choice([1.5, 6])),
        max_num_seqs=draw.choice([2, 8]),
        max_num_batched_tokens=draw.choice([128, 1024]) if recurrent else draw.choice([200, 1024]),
        retention_interval=draw.choice([0, None]),
        load_failure_policy="recompute",
        **fixed,
        **options,
    )


def live(draw: random.Random, quilt: Quilt, num_requests: int) -> int:
    """Requests, aborts, preemptions and resets at random; how many requests were served."""
    served, running = 0, []
    while served < num_requests:
        act = draw.random()
        if act < 0.4 and len(running) < 10:
            prompt = BASES[draw.randrange(3)][: draw.randrange(1, 400)]
            prompt = prompt + tokens(draw.randrange(1000), draw.choice([0, 0, 1, 40]))
            salt = draw.choice([None, None, None, "x"])
            running.append(quilt.add(prompt, draw.choice([1, 2, 12, 40]), cache_salt=salt))
            served += 1
        elif act < 0.46 and running:
            quilt.h.abort(draw.choice(running).id, mid_step=draw.random() < 0.5)
        elif act < 0.52 and running:
            quilt.h.preempt(draw.choice(running).id)
        elif act < 0.57:
            quilt.h.reset_prefix_cache()
        elif act < 0.575:
            quilt.h.reset_prefix_cache(reset_connector=True)
        elif act < 0.6:
            quilt.store.reset()
        quilt.step(draw.choice([1, 1, 2, 4]))
        running = [record for record in running if record.finish_reason is None]
    return served


def restarts(seed: int, name: str, folder: Path) -> Counter[str]:
    """Some lives of one namespace; what was counted."""
    draw, totals = random.Random(seed), Counter()
    fixed = {
        "retention": draw.choice(["dense", "prompt_end"]),
        "group_partition": draw.choice(["solved", "shared_rows"]),
        "num_ranks": draw.choice([1, 1, 2]),
    }
    disk = folder / "disk-0"
    for number in range(1, LIVES + 1):
        with new_life(draw, name, disk, fixed) as quilt:
            tier = quilt.side.below.tier
            assert tier.state == "on", tier.stats().why
            totals["found"] += sum(group.pages for group in tier.stats().groups)
            totals["requests"] += live(draw, quilt, 12)
            if draw.random() < 0.4:
                # What a kill at this moment leaves, or worse: files copied one after the other.
                killed = folder / f"disk-{number}"
                shutil.copytree(disk, killed)
                disk = killed
                totals["kills"] += 1
            quilt.settle()
            quilt.check_end()
            groups = tier.stats().groups
            for counter in ("reads", "writes", "evictions", "bad"):
                totals[counter] += sum(getattr(group, counter) for group in groups)
            totals["hit_tokens"] += int(quilt.count("hit_tokens"))
            totals |= {k: totals[k] + v for k, v in quilt.side.below.promoter.counts.items()}
    return totals


def test_restarts_kills_and_resets_never_bring_back_anything_wrong(tmp_path: Path) -> None:
    """Every layout once; KVQUILT_STRESS=N tries N times as many."""
    totals: Counter[str] = Counter()
    for seed in range(len(NAMES) * MORE):
        folder = tmp_path / str(seed)
        folder.mkdir()
        totals += restarts(seed, NAMES[seed % len(NAMES)], folder)
        shutil.rmtree(folder)
    for name in ("found", "kills", "reads", "writes", "hit_tokens", "started"):
        assert totals[name] > 0, totals


def test_a_hit_over_memory_and_disk_together(tmp_path: Path) -> None:
    """The head of a prompt is only on disk, its tail only in memory."""
    with Quilt(GROUPS, ram_bytes="8MiB", disk_path=str(tmp_path / "disk"), disk_bytes=DISK_BYTES) as quilt:
        quilt.start()
        quilt.serve(BASES[0][:200])
        quilt.check_disk()
        quilt.store.reset()
        quilt.forget()
        long = quilt.serve(BASES[0][:400])
        assert long.external_hit == 192
        quilt.check_disk()
        quilt.forget()
        reads = sum(group.reads for group in quilt.side.below.stats().groups)
        quilt.store.reset()
        again = quilt.serve(BASES[0][:400])
        assert again.external_hit == 384
        full_blocks, window_blocks = 384 // 32, 64 // 16
        more = sum(group.reads for group in quilt.side.below.stats().groups) - reads
        assert more == full_blocks + window_blocks
        quilt.check_end()


@pytest.mark.parametrize("disk_lora", [False, True])
def test_pages_of_an_adapter_stay_off_the_disk_unless_wanted(tmp_path: Path, disk_lora: bool) -> None:
    options = {"disk_path": str(tmp_path / "disk"), "disk_bytes": DISK_BYTES, "disk_lora": disk_lora}
    with Quilt(GROUPS, **options) as quilt:
        quilt.start()
        quilt.check_disk()
        tier = quilt.side.below.tier
        before = sum(group.pages for group in tier.stats().groups)
        in_memory = sum(quilt.pages().values())
        record = quilt.add(BASES[0][:200])
        quilt.h.scheduler.requests[record.id].lora_request = LoRARequest("a", 1, "/nowhere")
        quilt.run()
        quilt.check_disk()
        saved = sum(quilt.pages().values()) - in_memory
        assert saved > 0
        written = sum(group.pages for group in tier.stats().groups) - before
        assert (written, quilt.side.below.not_durable) == ((saved, 0) if disk_lora else (0, saved))
        quilt.check_end()


def test_rows_that_groups_share_are_given_up_by_the_prefix_for_its_windows(tmp_path: Path) -> None:
    """Twelve rows would hold a prefix of 384 tokens, but then nothing of its window."""
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": DISK_BYTES}
    options = {**disk, "group_partition": "shared_rows"}
    with Quilt(GROUPS, **options) as quilt:
        quilt.start()
        quilt.serve(BASES[0][:400])
        quilt.check_end()
    with Quilt(GROUPS, ram_bytes="48KiB", **options) as quilt:
        quilt.start()
        quilt.check_disk()
        rows = quilt.store.arenas[0].num_slots
        assert rows == 384 // 32
        assert quilt.serve(BASES[0][:400]).external_hit == (rows - 64 // 16) * 32
        assert quilt.connector.lookups(1)[0].why.startswith("host memory had no room")
        quilt.check_end()


def test_a_look_below_that_fails_leaves_nothing_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Quilt(GROUPS, disk_path=str(tmp_path / "disk"), disk_bytes=DISK_BYTES) as quilt:
        quilt.start()
        quilt.serve(BASES[0][:200])
        quilt.forget()

        def fail(*_: object, **__: object) -> bool:
            raise RuntimeError("a fault of the tier's")

        monkeypatch.setattr(quilt.side.below.promoter, "ask", fail)
        assert quilt.serve(BASES[0][:400]).finish_reason == "length"
        quilt.check_end(hook_errors=None)
