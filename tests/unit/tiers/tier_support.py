"""A disk tier for the tests of tiers: its namespace, its options, its clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvquilt.layout.namespace import GroupFactors, LayerFactors, NamespaceFactors
from kvquilt.store import warm_up
from kvquilt.testing.tier_pages import PageSource
from kvquilt.tiers import DiskOptions, NVMeTier

LIMIT_SECONDS = 60.0
TICK_SECONDS = 0.005


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


def namespace_of(source: PageSource, **more: Any) -> NamespaceFactors:
    groups = tuple(
        GroupFactors(
            group.name,
            group.kind,
            group.tokens_per_block,
            group.page_bytes,
            "bfloat16",
            (LayerFactors(f"{group.name}.0"),),
            group.window,
        )
        for group in source.layout.groups
    )
    given = {
        "model": "some/model",
        "config": "c0",
        "weights": "w0",
        "groups": groups,
        "tokens_per_hash": source.layout.tokens_per_hash,
        "hash_algorithm": "sha256",
        "hash_seed": "0",
        "cache_layout": "LBHNC",
        "ranks": tuple(range(source.num_ranks)),
    }
    return NamespaceFactors(**{**given, **more})


@functools.cache
def _warm_up_once() -> None:
    """Threads that compile for seconds look like a medium that hangs."""
    warm_up()


def disk(
    path: Path, source: PageSource, num_bytes: int = 4 << 20, *, salt: str = "", **more: Any
) -> NVMeTier:
    """A disk tier in `path` for a source's pages."""
    _warm_up_once()
    options = {
        name: more.pop(name) for name in ("write", "threads", "reclaim", "queue_bytes") if name in more
    }
    more.setdefault("tick_seconds", TICK_SECONDS)
    return NVMeTier(
        source.layout,
        namespace_of(source, salt=salt),
        DiskOptions(path, num_bytes, **options),
        num_ranks=source.num_ranks,
        partition=source.partition,
        **more,
    )
