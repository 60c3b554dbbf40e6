"""What `kvquilt plan` says of a model's config.json is what the connector finds in a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from vllm.model_executor.models import registry

from engine.tiny_configs import SERVED, VOCABULARY, TinyModel
from kvquilt.cli.main import app
from kvquilt.layout import CacheLayout
from kvquilt.testing import Engine, PageRecorder

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BUDGET = "24MiB"
PROMPT_TOKENS = 300
START_LINE = re.compile(
    r"group (?P<name>\S+): (?P<kind>[a-z]+)(?: (?P<window>\d+))?, (?P<layers>\d+) layers, "
    r"(?P<tokens_per_block>\d+) tokens per block, page (?P<page_bytes>\d+) B in a slot of "
    r"(?P<slot_bytes>\d+) B, (?P<slots>\d+) slots \(.*\), (?P<tokens_covered>\d+) tokens covered"
)


@pytest.fixture(autouse=True)
def inspect_models_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks at each model class in a new process, to keep CUDA out of this one: seconds each."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look(), raising=False)


def folder_of(model: TinyModel, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    return tmp_path


def plan(model: TinyModel, folder: Path, *more: object) -> dict[str, Any]:
    """What the command says, with the engine's options."""
    options: list[object] = [
        "--config",
        folder,
        "--budget",
        BUDGET,
        "--dtype",
        model.dtype,
        "--device",
        "cpu",
        "--json",
    ]
    if model.block_size is not None:
        options += ["--block-size", model.block_size]
    result = CliRunner().invoke(app, ["plan", *map(str, [*options, *more])])
    assert result.exit_code == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def start(model: TinyModel, folder: Path, **connector: object) -> Engine:
    options: dict[str, Any] = {} if model.block_size is None else {"block_size": model.block_size}
    return Engine(
        folder,
        connector={"ram_bytes": BUDGET, **connector},
        load_format="dummy",
        dtype=model.dtype,
        num_blocks=256,
        max_model_len=512,
        max_num_batched_tokens=model.batch_tokens,
        max_num_seqs=8,
        **options,
    )


def rows(told: dict[str, Any], *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(group[column] for column in columns) for group in told["groups"]]


def parsed(line: str) -> tuple[Any, ...]:
    """A start line's values, in the order of its words; numbers as numbers."""
    match = START_LINE.fullmatch(line)
    assert match, line
    return tuple(int(v) if v and v.isdigit() else v for v in match.groups())


def pages_of(config: Any) -> list[tuple[Any, ...]]:
    """Layers, tokens per block and bytes, padding included, of each group in the engine's own words."""
    return [
        (
            list(g.layer_names),
            g.kv_cache_spec.block_size,
            g.kv_cache_spec.page_size_bytes * len(g.layer_names),
        )
        for g in config.kv_cache_groups
    ]


@pytest.mark.parametrize("name", SERVED)
def test_start_lines_and_layout_are_what_plan_says(name: str, tmp_path: Path) -> None:
    model = SERVED[name]
    told = plan(model, folder_of(model, tmp_path))
    if model.groups:
        assert rows(told, "kind", "layers", "tokens_per_block") == list(model.groups)
    with start(model, tmp_path) as engine:
        side = engine.connector.scheduler_side
        assert [parsed(line) for line in side.start_lines] == rows(told, *START_LINE.groupindex)
        layout: CacheLayout = side.layout
        assert (layout.tokens_per_hash, layout.lattice_tokens) == (
            told["tokens_per_hash"],
            told["lattice_tokens"],
        )
        assert [(g.name, list(g.layers), g.window, g.page_bytes, g.extra_tokens) for g in layout.groups] == [
            (*row, 0) for row in rows(told, "name", "layer_names", "window", "page_bytes")
        ]
        assert side.plan.bytes_used == told["bytes_used"]
        assert pages_of(engine.kv_cache_config) == rows(
            told, "layer_names", "tokens_per_block", "engine_page_bytes"
        )
        if model.generates:
            saves_and_loads_again(engine, layout)


def test_start_lines_follow_the_options_that_plan_has_too(tmp_path: Path) -> None:
    model = SERVED["gemma4"]
    told = plan(model, folder_of(model, tmp_path), "--partition", "shared_rows", "--checkpoint-interval", 512)
    assert told["groups"] != plan(model, tmp_path)["groups"]
    with start(model, tmp_path, group_partition="shared_rows", checkpoint_interval=512) as engine:
        side = engine.connector.scheduler_side
        assert [parsed(line) for line in side.start_lines] == rows(told, *START_LINE.groupindex)
        saves_and_loads_again(engine, side.layout)


def saves_and_loads_again(engine: Engine, layout: CacheLayout) -> None:
    """One prompt twice, the engine's own cache emptied between: hit, pages and output are the same."""
    side = engine.connector.scheduler_side
    attach(engine)
    recorder = PageRecorder(engine.kv_caches, engine.kv_cache_config)
    side.saves.record_keys = side.loads.record_keys = True
    engine.worker_connector.worker_side.observer = recorder
    prompt = np.random.default_rng(1).integers(3, VOCABULARY, PROMPT_TOKENS).tolist()
    (cold,) = engine.run([prompt], max_tokens=4)
    engine.step_until_idle()
    assert engine.reset_prefix_cache()
    (warm,) = engine.run([prompt], max_tokens=4)
    engine.step_until_idle()
    boundary = layout.max_boundary(PROMPT_TOKENS)
    assert boundary > 0
    assert (cold.local_hit_tokens, cold.external_hit_tokens) == (0, 0)
    assert (warm.local_hit_tokens, warm.external_hit_tokens) == (0, boundary)
    assert warm.tokens == cold.tokens
    report = recorder.report()
    assert report.covers(1, range(len(layout.groups)))
    assert (report.equal, report.unknown) == (report.compared, 0), report.mismatches
    assert not engine.connector._hook_errors
    assert not engine.worker_connector._hook_errors
    assert side.meter.total("load_failures") == 0
    audit = side.store.audit()
    assert (audit.leases, audit.tickets, len(side.pins)) == (0, 0, 0)


def attach(engine: Engine) -> None:
    """Step until the worker has the pools: what runs before cannot hit."""
    side = engine.connector.scheduler_side
    while not side._attached:
        assert not side._broken
        engine.run([[5, 6, 7]], max_tokens=1)
    engine.step_until_idle()
