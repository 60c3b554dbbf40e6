"""The bench with a real engine: it passes where all is well, and fails where something is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.disk import flip, namespaces, used_slots
from kvquilt.bench import make_config, run_bench
from kvquilt.bench.phases import Reference, run_reference
from kvquilt.bench.progress import SilentProgress
from kvquilt.bench.restart import RestartOutcome, run_restart
from kvquilt.bench.setup import set_up
from kvquilt.cli.main import app
from kvquilt.testing.models import make_model

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs the engine")
pytestmark = pytest.mark.engine

SMALL = {"requests": 8, "prompt_tokens": 400, "output_tokens": 4, "concurrency": 4}
FLAGS = [text for name, value in SMALL.items() for text in ("--" + name.replace("_", "-"), str(value))]


def bench(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command."""
    run = CliRunner().invoke(app, ["bench", *FLAGS, "--json", *arguments])
    assert run.exception is None or isinstance(run.exception, SystemExit), run.exception
    return run.exit_code, json.loads(run.stdout)


def test_dense_hits_everything_and_changes_nothing() -> None:
    status, report = bench()
    assert status == 0
    assert report["external_hit_tokens"] == report["best_hit_tokens"] == 8 * 384
    assert report["phases"]["branch"]["external_hit_tokens"] == 8 * 256
    assert report["phases"]["engine_warm"]["local_hit_tokens"] == 8 * 384
    assert report["equal_outputs"] == report["requests"] == 8
    assert report["max_logprob_drift"] <= report["engine_logprob_drift"] <= 1e-5
    # Each prompt: 12 full blocks and one block of each window; each branch: 8 and one each.
    assert report["hit_blocks"] == 8 * (12 + 5)
    assert report["pages_compared"] == report["pages_equal"] == 8 * (12 + 5) + 8 * (8 + 5)
    assert report["loads"] == 8
    assert report["load_failures"] == report["evictions"] == 0
    assert all(report["sensitivity"].values())
    assert len(report["groups"]) == len(report["sensitivity"]) == 6


def test_prompt_end_hits_the_same_from_fewer_bytes() -> None:
    dense_bytes = 8 * (12 * 32768 + 6 * 5 * 32768)
    status, report = bench("--retention", "prompt_end")
    assert status == 0
    assert report["external_hit_tokens"] == 8 * 384
    assert report["phases"]["branch"]["external_hit_tokens"] == 0
    assert report["bytes_resident"] == 8 * (12 + 2 * 5) * 32768 < dense_bytes


def test_half_of_the_memory_evicts_and_stays_equal() -> None:
    status, report = bench("--ram-bytes", "5MiB", "--order", "reversed")
    assert status == 0
    assert report["evictions"] > 0
    assert 0 < report["external_hit_tokens"] < report["best_hit_tokens"]
    assert report["equal_outputs"] == 8


def test_no_drift_at_all_at_concurrency_1() -> None:
    status, report = bench("--concurrency", "1", "--model", "gemma3-mini", "--group-partition", "shared_rows")
    assert status == 0
    assert report["max_logprob_drift"] == 0.0
    assert report["external_hit_tokens"] == report["best_hit_tokens"]


class Damage:
    """A copier that flips the top byte of every loaded value of one block, after the copy has ended."""

    def __init__(self, engine: Any, group: int) -> None:
        self._worker = engine.worker_connector.worker_side
        self._inner = self._worker.copier
        self._group = group
        names = engine.kv_cache_config.kv_cache_groups[group].layer_names
        self._layers = [engine.kv_caches[name] for name in names]
        self._blocks: dict[int, int] = {}
        self.damaged = 0
        self._worker.copier = self

    def load(self, job_id: int, copies: Any, zero: Any = None) -> None:
        mine = copies.block[copies.group == self._group]
        if mine.size:
            self._blocks[job_id] = int(mine[-1])
        self._inner.load(job_id, copies, zero)

    def poll(self) -> Any:
        done = self._inner.poll()
        for job in done:
            if job.job_id in self._blocks:
                block = self._blocks.pop(job.job_id)
                for layer in self._layers:
                    layer[block].view(dtype=torch.uint8)[..., 3::4] ^= 0x40
                self.damaged += 1
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_damaged_pages_are_found_in_pages_and_in_outputs() -> None:
    made: list[Damage] = []
    outcome = run_bench(make_config(**SMALL), prepare=lambda engine: made.append(Damage(engine, group=5)))
    assert made[0].damaged > 0
    found = "\n".join(outcome.failures)
    assert "came back different" in found
    assert "outputs:" in found
    assert outcome.report.pages_equal < outcome.report.pages_compared


class OneByte(Damage):
    """Flips the lowest byte of a single value, once: too little for any output to change."""

    def poll(self) -> Any:
        done = self._inner.poll()
        for job in done:
            if job.job_id in self._blocks and not self.damaged:
                page = self._layers[0][self._blocks[job.job_id]].view(dtype=torch.uint8)
                page[(0,) * page.dim()] ^= 1
                self.damaged += 1
        return done


def test_one_flipped_bit_in_one_page_is_found() -> None:
    made: list[Damage] = []
    outcome = run_bench(make_config(**SMALL), prepare=lambda engine: made.append(OneByte(engine, group=0)))
    assert made[0].damaged == 1
    assert outcome.report.pages_equal == outcome.report.pages_compared - 1
    assert any("pages: 1 of" in failure for failure in outcome.failures)


@pytest.fixture
def deaf_model(tmp_path: Path) -> str:
    """gemma3-mini whose third layer adds nothing: its group is one that no output depends on."""
    from safetensors.numpy import load_file, save_file

    target = tmp_path / "deaf"
    shutil.copytree(make_model("gemma3-mini"), target)
    weights = load_file(target / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.2.self_attn.o_proj.weight"))
    weights[name] = np.zeros_like(weights[name])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_a_group_that_no_output_depends_on_proves_nothing(deaf_model: str) -> None:
    status, report = bench("--model", deaf_model)
    assert status == 1
    assert [name for name, changed in report["sensitivity"].items() if not changed] == ["sliding.2"]
    assert report["equal_outputs"] == 8


@pytest.fixture(scope="module")
def restart_reference() -> Reference:
    """What the engine says without kvquilt, for both runs with a restart."""
    return run_reference(set_up(make_config(**SMALL)), SilentProgress(), branches=False)


def restart(
    reference: Reference, disk: Path, between: Callable[[], None] | None = None, **more: Any
) -> RestartOutcome:
    config = make_config(**SMALL, disk=str(disk), restart=True, **more)
    return run_restart(config, reference=reference, between=between)


@pytest.mark.slow
def test_pages_outlive_a_killed_engine(restart_reference: Reference, tmp_path: Path) -> None:
    outcome = restart(restart_reference, tmp_path / "disk")
    report = outcome.report
    assert outcome.failures == ()
    assert outcome.expected.holds
    assert report.external_hit_tokens == report.expected_hit_tokens == report.best_hit_tokens == 8 * 384
    assert report.exact_hits == report.equal_outputs == report.loads == 8
    assert report.phases["cold"].external_hit_tokens == 0
    # Each prompt: 12 full blocks and 6 of each window are written; of each window one comes back.
    assert report.pages_written == report.pages_recorded == 8 * (12 + 5 * 6)
    assert report.pages_read == report.pages_compared == report.pages_equal == 8 * (12 + 5)
    assert {g.name: (g.found_pages, g.read_pages) for g in report.groups}["full"] == (96, 96)
    assert report.pages_dropped == report.pages_bad == report.load_failures == 0


@pytest.mark.slow
def test_a_damaged_disk_between_two_lives_is_found(restart_reference: Reference, tmp_path: Path) -> None:
    """One bit in each page of one group: nothing of it is served, and the run says so."""
    disk = tmp_path / "disk"

    def damage() -> None:
        [directory] = namespaces(disk)
        slab, slot_bytes, slots = used_slots(directory, "sliding.3")
        flip(slab, slot_bytes, slots)

    outcome = restart(restart_reference, disk, damage)
    found = "\n".join(outcome.failures)
    assert "pages did not pass their check" in found
    assert "restart_warm: 0 tokens hit, 3,072 were to be" in found
    assert outcome.report.equal_outputs == 8
    assert outcome.report.pages_equal == outcome.report.pages_compared == 0


def test_arguments_that_cannot_be_run_end_with_status_2() -> None:
    run = CliRunner().invoke(app, ["bench", "--prompt-tokens", "10"])
    assert run.exit_code == 2
    assert "nothing can be reused below 65" in run.stderr
