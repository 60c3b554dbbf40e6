"""Options: what is taken, and what is refused with the key's name and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from kvquilt.config import Options, parse_options
from kvquilt.errors import ConfigError, KVQuiltError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_defaults_are_those_of_the_docs() -> None:
    """Every option has a row with its default, and the docs name no other."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", DOCS.read_text(), re.MULTILINE)
    told = {name: msgspec.json.decode(default) for name, default in rows}
    assert told == msgspec.structs.asdict(parse_options({}))


def test_nothing_is_the_defaults() -> None:
    assert parse_options({}) == Options()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("ram_byte", "ram_bytes"),
        ("rambytes", "ram_bytes"),
        ("retain-slack", "retain_slack"),
        ("retention_policy", "retention"),
        ("load_timeout", "load_timeout_seconds"),
        ("Mode", "mode"),
    ],
)
def test_unknown_option_names_its_nearest_match_and_all_allowed(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({key: 1})
    assert f"unknown option {key!r}; did you mean {nearest!r}?" in str(caught.value)
    for name in Options.__struct_fields__:
        assert name in str(caught.value)


def test_unknown_option_unlike_any_has_no_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"zzz": 1})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("ram_bytes", 1.5, "int | str"),
        ("ram_bytes", None, "int | str"),
        ("ram_bytes", True, "int | str"),
        ("ram_bytes", "8 apples", "8GiB"),
        ("ram_bytes", "", "8GiB"),
        ("ram_bytes", -1, "negative"),
        ("ram_bytes", 0, "at least 1"),
        ("ram_bytes", "0.5B", "whole number"),
        ("retain_slack", "yes", "bool"),
        ("retain_slack", 1, "bool"),
        ("retain_generated", None, "bool"),
        ("retention", "sparse", "must be one of 'dense', 'prompt_end'"),
        ("retention", ["dense"], "retention"),
        ("group_partition", "elastic", "elastic"),
        ("mode", "read_only", "must be one of 'read_write', 'save_only'"),
        ("disk_write", "evict", "must be one of 'through', 'evicted', 'never'"),
        ("disk_path", "/a\0b", "absolute path"),
        ("checkpoint_interval", 0, "at least 1"),
        ("checkpoint_interval", -64, "at least 1"),
        ("checkpoint_interval", 0.5, "int"),
        ("checkpoint_interval", "2048", "int"),
        ("namespace_salt", 7, "str"),
        ("load_timeout_seconds", 0, "above 0"),
        ("load_timeout_seconds", -1.0, "above 0"),
        ("load_timeout_seconds", float("inf"), "finite"),
        ("load_timeout_seconds", float("nan"), "finite"),
        ("load_timeout_seconds", "30", "float"),
    ],
)
def test_wrong_values_are_refused_with_the_key(key: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({key: value})
    assert key in str(caught.value)
    assert told in str(caught.value)


def test_key_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="unknown option '7'"):
        parse_options({7: 1})  # type: ignore[dict-item]


def test_every_refusal_is_a_value_error_of_ours() -> None:
    with pytest.raises(KVQuiltError):
        parse_options({"mode": 1})
    with pytest.raises(ValueError, match="mode"):
        parse_options({"mode": 1})


def test_sizes_as_people_write_them() -> None:
    assert parse_options({"ram_bytes": "1.5GiB"}).budget_bytes == 3 << 29
    assert parse_options({"ram_bytes": 4096}).budget_bytes == 4096


def test_whole_seconds_are_seconds() -> None:
    assert parse_options({"load_timeout_seconds": 5}).load_timeout_seconds == 5.0


def test_planned_interval_follows_the_retention() -> None:
    assert parse_options({}).planned_checkpoint_interval is None
    assert parse_options({"retention": "prompt_end"}).planned_checkpoint_interval == 2048
    for retention in ("dense", "prompt_end"):
        options = parse_options({"retention": retention, "checkpoint_interval": 512})
        assert options.planned_checkpoint_interval == 512


def test_options_do_not_change() -> None:
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        parse_options({}).mode = "save_only"  # type: ignore[misc]
