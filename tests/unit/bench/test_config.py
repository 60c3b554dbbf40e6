"""Arguments of the bench: what is taken, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.bench.config import PROFILES, BenchConfig, make_config
from kvquilt.bench.model import bench_model
from kvquilt.bench.setup import set_up
from kvquilt.errors import ConfigError, SizingError


def test_defaults_are_the_documented_ones() -> None:
    assert make_config() == BenchConfig()
    assert {name: getattr(BenchConfig(), name) for name in PROFILES["default"]} == PROFILES["default"]


def test_a_profile_sets_sizes_and_explicit_values_win() -> None:
    seed = make_config(profile="seed", requests=3, concurrency=None)
    assert (seed.requests, seed.prompt_tokens, seed.output_tokens) == (3, 9993, 1)
    assert seed.concurrency == 8


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"profile": "huge"}, "--profile='huge': allowed are default, seed"),
        ({"requests": 0}, "--requests=0: must be at least 1"),
        ({"concurrency": 0}, "--concurrency=0"),
        ({"prompt_tokens": 1}, "--prompt-tokens=1"),
        ({"output_tokens": 0}, "--output-tokens=0"),
        ({"seed": -1}, "--seed=-1"),
        ({"order": "random"}, "--order='random': allowed are same, reversed"),
        ({"retention": "all"}, "--retention='all': allowed are dense, prompt_end"),
        ({"group_partition": "rows"}, "--group-partition='rows': allowed are solved, shared_rows"),
        ({"ram_bytes": "much"}, "ram_bytes='much'"),
        ({"ram_bytes": "0"}, "at least 1 byte"),
    ],
)
def test_impossible_arguments_are_refused_with_their_names(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(**values)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "gemma9-mini"}, "neither a tiny model"),
        ({"prompt_tokens": 64}, "nothing can be reused below 65"),
        ({"prompt_tokens": 40_000}, "takes at most 32768 tokens"),
        ({"ram_bytes": "10TiB"}, "lower --requests, --prompt-tokens or --ram-bytes"),
    ],
)
def test_what_the_model_or_the_machine_cannot_do_is_refused(values: dict[str, Any], words: str) -> None:
    config = make_config(**{"requests": 2, **values})
    with pytest.raises(ConfigError) as refused:
        set_up(config)
    assert words in str(refused.value)


def test_a_budget_below_one_boundary_is_refused() -> None:
    with pytest.raises(SizingError, match="the least budget that works"):
        set_up(make_config(ram_bytes="100"))


def test_a_directory_without_a_config_is_no_model(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="nor a directory with"):
        bench_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no object"):
        bench_model(str(tmp_path))


def test_the_concurrency_is_what_the_tiny_model_asks_for() -> None:
    assert make_config().concurrency == 8
    assert make_config(model="mla-mini").concurrency == 1
    assert make_config(model="mla-mini", concurrency=4).concurrency == 4
