"""Tiny models and pool sizes, without an engine."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from kvquilt import CacheGroup, CacheLayout
from kvquilt.errors import ConfigError
from kvquilt.testing import kv_cache_memory_for, make_model, model_names, model_spec, pool_blocks_for
from kvquilt.testing.engine import connector_config
from kvquilt.testing.models import cache_root, make_drafter
from kvquilt.testing.results import in_order

FULL = CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=100)
WINDOW = CacheGroup("win", kind="sliding", tokens_per_block=16, window=33, page_bytes=300)
LAYOUT = CacheLayout([FULL, WINDOW])


def test_importing_the_package_loads_no_torch_and_no_engine() -> None:
    code = "import kvquilt.testing, sys; print(*{'torch', 'vllm', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_unknown_name_and_negative_seed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gemma9-mini' is unknown; known are gemma3-mini"):
        make_model("gemma9-mini", tmp_path)
    with pytest.raises(ConfigError, match="must not be negative"):
        make_model("plain-mini", tmp_path, seed=-1)
    assert list(tmp_path.iterdir()) == []


def test_cache_follows_the_user_s_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "kvquilt" / "models"


@pytest.mark.parametrize("name", model_names())
def test_specs_allow_long_prompts(name: str) -> None:
    config = model_spec(name).config
    assert config["max_position_embeddings"] >= 16384
    assert config["vocab_size"] == 2048
    layers = [layer for group in model_spec(name).groups for layer in group.layers]
    assert len(set(layers)) == len(layers) > 0


def test_every_kind_of_group_has_a_tiny_model() -> None:
    kinds = {group.kind for name in model_names() for group in model_spec(name).groups}
    assert kinds == {"full", "sliding", "chunked", "recurrent"}


def test_a_drafter_has_groups_and_a_model_of_its_own(tmp_path: Path) -> None:
    spec = model_spec("gemma4-draft-mini")
    assert spec.draft_groups == {"draft.full"}
    assert {group.kind: group.tokens_per_block for group in spec.groups[:-1]} == {"sliding": 64, "full": 32}
    assert spec.groups[-1].tokens_per_block == spec.layout.lattice_tokens == 128
    pytest.importorskip("transformers")
    drafter, target = make_drafter("gemma4-draft-mini", tmp_path), make_model("gemma4-draft-mini", tmp_path)
    assert drafter is not None
    assert drafter != target
    assert (drafter / "model.safetensors").is_file()
    assert make_drafter("gemma4-mini", tmp_path) is None


def test_experts_are_written_one_by_one_where_the_engine_wants_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from safetensors import safe_open

    path = make_model("qwen3-next-mini", tmp_path) / "model.safetensors"
    with safe_open(path, "np") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118 - no mapping
    assert len(names) == 4 * 3
    assert "model.layers.3.mlp.experts.3.gate_proj.weight" in names


def test_pool_holds_every_prefix_and_what_is_in_transit() -> None:
    # 100 tokens: 4 full blocks each. The window needs 2 blocks at 96; three tails of at most 3.
    kept, transit = 10 * (4 + 7), 2 * (4 + 7)
    assert pool_blocks_for(LAYOUT, [100] * 10, concurrency=2) == math.floor((kept + transit) * 1.02) + 2
    long = pool_blocks_for(LAYOUT, [10_000] * 10, concurrency=1)
    assert long == math.floor((10 * (313 + 9) + 313 + 625) * 1.02) + 2


def test_pool_for_all_blocks_grows_with_windows_too() -> None:
    few = pool_blocks_for(LAYOUT, [10_000] * 10, concurrency=1)
    every = pool_blocks_for(LAYOUT, [10_000] * 10, concurrency=1, retention="all")
    assert every == math.floor(11 * (313 + 625) * 1.02) + 2
    assert few < every


def test_pool_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="retention='some'"):
        pool_blocks_for(LAYOUT, [100], retention="some")
    with pytest.raises(ValueError, match="no workload"):
        pool_blocks_for(LAYOUT, [])


def test_pool_bytes_follow_the_widest_group() -> None:
    assert kv_cache_memory_for(LAYOUT, 10) == 3000


def test_order_of_submission() -> None:
    assert in_order("abc", "same") == [0, 1, 2]
    assert in_order("abc", "reversed") == [2, 1, 0]
    with pytest.raises(ValueError, match="order='random'"):
        in_order("abc", "random")


def test_connector_options_become_the_engine_s_config() -> None:
    assert connector_config(None) is None
    whole = {"kv_connector": "Other", "kv_role": "kv_both"}
    assert connector_config(whole) == whole
    assert connector_config({"ram_bytes": "1GiB"}) == {
        "kv_connector": "KVQuiltConnector",
        "kv_connector_module_path": "kvquilt.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram_bytes": "1GiB"},
    }


def test_pool_holds_every_block_of_a_chunked_group_at_either_retention() -> None:
    chunked = CacheGroup("chunked", kind="chunked", tokens_per_block=16, chunk=256, page_bytes=1)
    few, every = (
        pool_blocks_for(CacheLayout([chunked]), [10_000], retention=r) for r in ("boundaries", "all")
    )
    assert few == every
