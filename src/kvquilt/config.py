"""Options of the connector, validated before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from kvquilt.errors import ConfigError
from kvquilt.units import parse_bytes

__all__ = ["DEFAULT_CHECKPOINT_INTERVAL", "Options", "Retain", "parse_options"]

Retain = Literal["dense", "prompt_end"]
DEFAULT_CHECKPOINT_INTERVAL = 2048
MOST_DISK_THREADS = 64


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `kv_connector_extra_config` may hold.

    ram_bytes: host memory for pages, of one engine core: an integer or "8GiB".
    group_partition: "solved" gives each group slots of its own size; "shared_rows" makes every
        slot one row as wide as the widest group's.
    retention: "dense" keeps every page that some boundary can use; "prompt_end" keeps sliding
        pages only where a later prompt can resume.
    retain_slack: under "prompt_end", keep the boundary before the prompt's last one, too.
    retain_generated: keep the KV of generated tokens (under "prompt_end" with a checkpoint at
        the end of the generation).
    checkpoint_interval: tokens between checkpoints that the split of `ram_bytes` assumes;
        None: every block under "dense", 2,048 tokens under "prompt_end"; for recurrent groups what
        the engine keeps (its `prefix_cache_retention_interval`; at 0, 2,048 tokens are assumed).
    draft: "best_effort" takes a longer hit without the pages of a drafter's own groups, which
        costs accepted drafts, never right output; "required" does not.
    namespace_salt: text that sets apart stores which would otherwise share a namespace.
    load_timeout_seconds: a load that takes longer is reported failed and recomputed.
    mode: "read_write", or "save_only", which never looks up.
    disk_path: directory of the NVMe tier, absolute; None: no such tier.
    disk_bytes: the most that may lie in it, of all namespaces and data-parallel ranks together.
    disk_write: "through" writes each page soon after it was saved; "evicted" only pages that are about
        to leave host memory; "never" reads what another process writes.
    disk_threads: calls on the disk at a time, one less of them writes.
    disk_reclaim: "auto" removes the namespaces least recently used at start if room is needed;
        "refuse" does not start then.
    disk_lora: keep pages of LoRA requests on disk, too: only if an adapter's name always means the same
        weights.
    """

    ram_bytes: int | str = "8GiB"
    group_partition: Literal["solved", "shared_rows"] = "solved"
    retention: Retain = "dense"
    retain_slack: bool = True
    retain_generated: bool = True
    checkpoint_interval: int | None = None
    draft: Literal["best_effort", "required"] = "best_effort"
    namespace_salt: str = ""
    load_timeout_seconds: float = 30.0
    mode: Literal["read_write", "save_only"] = "read_write"
    disk_path: str | None = None
    disk_bytes: int | str | None = None
    disk_write: Literal["through", "evicted", "never"] = "through"
    disk_threads: int = 4
    disk_reclaim: Literal["auto", "refuse"] = "auto"
    disk_lora: bool = False

    @property
    def budget_bytes(self) -> int:
        """`ram_bytes` as an integer."""
        return parse_bytes(self.ram_bytes, "ram_bytes")

    @property
    def disk_budget_bytes(self) -> int:
        """`disk_bytes` as an integer; 0 if not given."""
        return 0 if self.disk_bytes is None else parse_bytes(self.disk_bytes, "disk_bytes")

    @property
    def planned_checkpoint_interval(self) -> int | None:
        """The interval for `plan_slots`: explicit, or the default of the retention."""
        if self.checkpoint_interval is not None or self.retention == "dense":
            return self.checkpoint_interval
        return DEFAULT_CHECKPOINT_INTERVAL

    def planned_state_interval(self, engine_interval: int | None) -> int | None:
        """The same for recurrent groups. engine_interval: as of the engine; 0: only where a prompt
        ends or forks, None: every block."""
        if self.checkpoint_interval is not None:
            return self.checkpoint_interval
        if engine_interval == 0 or (engine_interval is None and self.retention != "dense"):
            return DEFAULT_CHECKPOINT_INTERVAL
        return engine_interval


def parse_options(raw: Mapping[str, Any]) -> Options:
    """Check `raw` and make `Options` of it.

    Raises ConfigError naming the key and what is allowed; an unknown key with its nearest match.

    >>> parse_options({"ram_bytes": "1GiB", "retention": "prompt_end"}).planned_checkpoint_interval
    2048
    """
    for key in raw:
        if key not in Options.__struct_fields__:
            raise ConfigError(_unknown_key(str(key)))
    try:
        options = msgspec.convert(dict(raw), Options)
    except msgspec.ValidationError as error:
        _check_choices(raw)
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    if options.budget_bytes < 1:
        raise ConfigError(f"ram_bytes={options.ram_bytes!r}: must be at least 1 byte")
    if options.checkpoint_interval is not None and options.checkpoint_interval < 1:
        raise ConfigError(f"checkpoint_interval={options.checkpoint_interval}: must be at least 1 token")
    timeout = options.load_timeout_seconds
    if not 0 < timeout < float("inf"):
        raise ConfigError(f"load_timeout_seconds={timeout}: must be above 0 and finite")
    _check_disk(options, raw)
    return options


def _check_choices(raw: Mapping[str, Any]) -> None:
    for key, kind in get_type_hints(Options).items():
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if choices and key in raw and raw[key] not in choices:
            raise ConfigError(f"{key}={raw[key]!r}: must be one of {', '.join(map(repr, choices))}")


def _check_disk(options: Options, raw: Mapping[str, Any]) -> None:
    if options.disk_path is None:
        stray = sorted(key for key in raw if key.startswith("disk_") and raw[key] is not None)
        if stray:
            raise ConfigError(f"{stray[0]} is given, but disk_path is not: there is no disk tier")
        return
    if not options.disk_path.startswith("/") or "\0" in options.disk_path:
        raise ConfigError(f"disk_path={options.disk_path!r}: must be an absolute path")
    if options.disk_write != "never" and options.disk_budget_bytes < 1:
        raise ConfigError(
            f"disk_bytes={options.disk_bytes!r}: with disk_path, the most that may lie in it is needed, "
            'e.g. "200GiB"'
        )
    if not 1 <= options.disk_threads <= MOST_DISK_THREADS:
        raise ConfigError(f"disk_threads={options.disk_threads}: must be 1 to {MOST_DISK_THREADS}")


def _unknown_key(key: str) -> str:
    allowed = Options.__struct_fields__
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown option {key!r}{hint} (allowed: {', '.join(sorted(allowed))})"
