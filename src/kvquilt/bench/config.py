"""What a benchmark run is asked to do, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from kvquilt.config import Options, Retain, parse_options
from kvquilt.errors import ConfigError
from kvquilt.sizing import Partition
from kvquilt.testing.specs import SPECS
from kvquilt.units import parse_bytes

__all__ = ["DEFAULT_MODEL", "PROFILES", "BenchConfig", "make_config"]

DEFAULT_MODEL = "gemma4-mini"
Order = Literal["same", "reversed"]
DiskWrite = Literal["through", "evicted"]

PROFILES: Mapping[str, Mapping[str, int]] = {
    "default": {"requests": 200, "prompt_tokens": 2000, "output_tokens": 8},
    "seed": {"requests": 200, "prompt_tokens": 9993, "output_tokens": 1},
}
"""Sizes of a run by name."""


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run. model: the name of a tiny model, or a directory with a model.

    ram_bytes: host memory for kvquilt's pages; None: what holds the working set.
    order: the order of the prompts in the two warm phases. seed: of the prompts and of a tiny
    model's weights. concurrency: requests that run at once. disk, disk_bytes, disk_write: of the run
    with a restart; disk_bytes None: what holds the working set.
    """

    model: str = DEFAULT_MODEL
    ram_bytes: int | str | None = None
    retention: Retain = "dense"
    group_partition: Partition = "solved"
    requests: int = 200
    concurrency: int = 8
    prompt_tokens: int = 2000
    output_tokens: int = 8
    order: Order = "same"
    seed: int = 0
    disk: str | None = None
    disk_bytes: int | str | None = None
    disk_write: DiskWrite = "through"
    restart: bool = False

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.output_tokens

    @property
    def options(self) -> dict[str, Any]:
        """The connector's options but for `ram_bytes`."""
        return {"retention": self.retention, "group_partition": self.group_partition}

    def parsed(self, ram_bytes: int | str) -> Options:
        """The connector's options as it will parse them. Raises ConfigError."""
        return parse_options({**self.options, "ram_bytes": ram_bytes})

    def with_disk(self, ram_bytes: int, disk_bytes: int) -> dict[str, Any]:
        """The connector's options of a run with a restart."""
        disk = {"disk_path": self.disk, "disk_bytes": disk_bytes, "disk_write": self.disk_write}
        return {**self.options, "ram_bytes": ram_bytes, **disk}


def make_config(*, profile: str = "default", **values: Any) -> BenchConfig:
    """A checked config: `profile`'s sizes, overridden by those `values` that are not None.

    The concurrency defaults to what the tiny model says of itself.

    Raises ConfigError with the option as it is written on the command line.

    >>> make_config(profile="seed", requests=8).prompt_tokens
    9993
    """
    if profile not in PROFILES:
        raise ConfigError(f"--profile={profile!r}: allowed are {', '.join(PROFILES)}")
    given = {name: value for name, value in values.items() if value is not None}
    spec = SPECS.get(given.get("model", DEFAULT_MODEL))
    if spec is not None:
        given.setdefault("concurrency", spec.concurrency)
    if "disk" in given:
        given["disk"] = os.path.abspath(given["disk"])
    config = BenchConfig(**{**PROFILES[profile], **given})
    _check(config)
    return config


def _check(config: BenchConfig) -> None:
    least = {"requests": 1, "concurrency": 1, "prompt_tokens": 2, "output_tokens": 1, "seed": 0}
    for name, low in least.items():
        value = getattr(config, name)
        if value < low:
            raise ConfigError(f"{_flag(name)}={value}: must be at least {low}")
    choices = {
        "order": Order,
        "retention": Retain,
        "group_partition": Partition,
        "disk_write": DiskWrite,
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in get_args(allowed):
            raise ConfigError(
                f"{_flag(name)}={getattr(config, name)!r}: allowed are {', '.join(get_args(allowed))}"
            )
    if config.ram_bytes is not None:
        _ = config.parsed(config.ram_bytes).budget_bytes
    _check_disk(config)


def _check_disk(config: BenchConfig) -> None:
    if config.restart and config.disk is None:
        raise ConfigError("--restart: needs --disk DIR, where the pages outlive the engine")
    if config.disk is not None and not config.restart:
        raise ConfigError(
            "--disk: needs --restart. The phases of an ordinary run take their pages from host memory, so "
            "they would prove nothing about a disk"
        )
    if config.disk is None:
        for name in ("disk_bytes", "disk_write"):
            if getattr(config, name) != getattr(BenchConfig(), name):
                raise ConfigError(f"{_flag(name)}: needs --disk DIR and --restart")
    elif config.disk_bytes is not None:
        parse_bytes(config.disk_bytes, "--disk-bytes")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
