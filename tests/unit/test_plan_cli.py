"""`kvquilt plan`: the table, the JSON, and errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvquilt.cli.main import app
from kvquilt.layout.catalog import layout_from_config
from kvquilt.sizing import plan_slots

GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA))
    return path


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def told(*args: object) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_is_what_the_library_says(config: Path) -> None:
    report = told("--config", config, "--budget", "8GiB", "--device", "cuda", "--checkpoint-interval", 8192)
    layout = layout_from_config(GEMMA).layout
    plan = plan_slots(layout, 8 << 30, 8192)
    assert report["tokens"] == plan.tokens
    assert report["bytes_used"] == plan.bytes_used <= report["budget_bytes"] == 8 << 30
    assert [g["name"] for g in report["groups"]] == [g.name for g in layout.groups]
    for group in report["groups"]:
        assert group["slots"] == plan.slots[group["name"]]
        assert group["slot_bytes"] == plan.slot_bytes[group["name"]]
        assert group["budget_share"] == group["slots"] * group["slot_bytes"] / (8 << 30)
    cost = report["bytes_per_token"]
    assert cost["solved"] == plan.bytes_used / plan.tokens
    assert cost["ratio"] == cost["shared_rows"] / cost["solved"]


def test_keys_are_stable(config: Path) -> None:
    report = told("--config", config, "--budget", "1GiB")
    assert set(report) == {
        "model_type",
        "dtype",
        "kv_dtype",
        "tensor_parallel",
        "device",
        "partition",
        "checkpoint_interval",
        "state_interval",
        "budget_bytes",
        "bytes_used",
        "tokens",
        "tokens_per_hash",
        "lattice_tokens",
        "bytes_per_token",
        "groups",
        "notes",
    }
    assert set(report["groups"][0]) == {
        "name",
        "kind",
        "layers",
        "layer_names",
        "window",
        "chunk",
        "tokens_per_block",
        "page_bytes",
        "engine_page_bytes",
        "copies",
        "slot_bytes",
        "slots",
        "tokens_covered",
        "budget_share",
    }


def test_options_reach_the_plan(config: Path) -> None:
    base = told("--config", config.parent, "--budget", "1GiB", "--device", "cuda")
    assert base["groups"][0]["tokens_per_block"] == 16
    split = told("--config", config, "--budget", "1GiB", "--device", "cuda", "--tp", 4)
    assert split["groups"][0]["page_bytes"] * 4 == base["groups"][0]["page_bytes"]
    assert split["tokens"] == base["tokens"], "slots hold the pages of all ranks"
    half = told("--config", config, "--budget", "1GiB", "--device", "cuda", "--kv-dtype", "fp8")
    assert half["tokens"] > 1.9 * base["tokens"]
    large = told("--config", config, "--budget", "1GiB", "--device", "cuda", "--block-size", 64)
    assert large["groups"][0]["tokens_per_block"] == 64
    cpu = told("--config", config, "--budget", "1GiB", "--device", "cpu")
    assert cpu["groups"][0]["tokens_per_block"] == 128
    sparse = told("--config", config, "--budget", "1GiB", "--device", "cuda", "--checkpoint-interval", 65536)
    assert sparse["tokens"] > 3 * base["tokens"]


def test_shared_rows_cost_more_where_pages_differ(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    hybrid = {
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
        "mamba_d_head": 64,
        "dtype": "bfloat16",
    }
    config.write_text(json.dumps(hybrid))
    args = ("--config", config, "--budget", "64GiB", "--device", "cuda", "--state-dtype", "bfloat16")
    solved, rows = told(*args), told(*args, "--partition", "shared_rows")
    assert solved["partition"] == "solved"
    assert rows["partition"] == "shared_rows"
    assert solved["tokens"] > rows["tokens"]
    assert solved["bytes_per_token"] == rows["bytes_per_token"]
    assert solved["bytes_per_token"]["ratio"] > 1
    assert len({g["slot_bytes"] for g in rows["groups"]}) == 1


def test_the_table_shows_every_group(config: Path) -> None:
    result = run("--config", config, "--budget", "8GiB")
    assert result.exit_code == 0
    for text in ("gemma3_text: 8 GiB", "sliding.4", "full", "tokens covered", "share", "bytes per token"):
        assert text in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("args", "told_"),
    [
        (["--budget", "64 gigs"], "budget='64 gigs'"),
        (["--budget", "1"], "the least budget that works is"),
        (["--budget", "1GiB", "--partition", "rows"], "partition='rows': allowed are solved, shared_rows"),
        (["--budget", "1GiB", "--kv-dtype", "fp3"], "kv_dtype='fp3'"),
        (["--budget", "1GiB", "--tp", "3"], "tp=3"),
        (["--budget", "1GiB", "--device", "tpu"], "device='tpu'"),
        (["--budget", "1GiB", "--checkpoint-interval", "0"], "checkpoint_interval=0"),
        (["--budget", "1GiB", "--state-interval", "-1"], "state_interval=-1"),
    ],
)
def test_errors_are_one_line_and_status_2(config: Path, args: list[str], told_: str) -> None:
    result = run("--config", config, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvquilt: ")
    assert result.stderr.count("\n") == 1
    assert told_ in result.stderr


def test_configs_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, why in (
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        ('{"model_type": "martian"}', "unknown architecture"),
    ):
        if text is not None:
            path.write_text(text)
        result = run("--config", path, "--budget", "1GiB")
        assert (result.exit_code, result.stdout) == (2, "")
        assert why in result.stderr
        assert "Traceback" not in result.stderr


HYBRID = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("args", "interval"),
    [
        ([], 2048),  # the engine's default keeps states where prompts end or fork
        (["--state-interval", "8192"], 8192),
        (["--checkpoint-interval", "4096", "--state-interval", "8192"], 4096),
    ],
)
def test_states_are_planned_as_far_apart_as_the_engine_keeps_them(
    tmp_path: Path, args: list[str], interval: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    report = told("--config", tmp_path, "--budget", "1GiB", "--device", "cuda", *args)
    assert report["state_interval"] == interval
    by_kind = {group["kind"]: group for group in report["groups"]}
    assert by_kind["recurrent"]["slots"] == -(-report["tokens"] // interval)
    if "--checkpoint-interval" not in args:
        full = by_kind["full"]
        assert full["slots"] == -(-report["tokens"] // full["tokens_per_block"])


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("kvquilt ")


def test_planning_imports_no_engine(config: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvquilt.cli.main import app;"
        f"r = CliRunner().invoke(app, ['plan', '--config', {str(config)!r}, '--budget', '1GiB']);"
        "assert r.exit_code == 0, r.output;"
        "bad = {'torch', 'vllm', 'transformers', 'numba'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
