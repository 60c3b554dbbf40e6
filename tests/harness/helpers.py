"""Layouts, mostly such as no model small enough to run has, and harnesses over them."""

from __future__ import annotations

import itertools
import random
from typing import Any

from kvquilt.testing.scheduler_harness import SchedulerHarness
from kvquilt.testing.sim_shapes import GroupShape

LAYOUTS: dict[str, list[GroupShape]] = {
    "full": [GroupShape("full", 16, num_layers=2)],
    "sliding only": [GroupShape("sliding", 16, window=40)],
    "full 16 + sliding 16": [GroupShape("full", 16), GroupShape("sliding", 16, window=64)],
    "full 32 + sliding 16": [
        GroupShape("full", 32, num_layers=2),
        GroupShape("sliding", 16, window=64, num_layers=3),
    ],
    "full 16 + sliding 64": [GroupShape("full", 16), GroupShape("sliding", 64, window=100)],
    "window shorter than a block": [GroupShape("full", 32), GroupShape("sliding", 32, window=5)],
    "two windows": [
        GroupShape("full", 16),
        GroupShape("sliding", 16, window=33),
        GroupShape("sliding", 32, window=200),
    ],
    "three windows that do not divide": [
        GroupShape("sliding", 48, window=100),
        GroupShape("full", 32, bytes_per_token=24),
        GroupShape("sliding", 16, window=17, num_layers=2),
        GroupShape("sliding", 24, window=150),
    ],
    "five sliding, full last": [
        *[GroupShape("sliding", 32, window=64) for _ in range(5)],
        GroupShape("full", 32),
    ],
    "two full": [GroupShape("full", 16), GroupShape("full", 48, bytes_per_token=16)],
    "full + chunked": [GroupShape("full", 16), GroupShape("chunked", 16, chunk=64, num_layers=2)],
    "extra tokens": [GroupShape("full", 16), GroupShape("sliding", 16, window=48, extra_tokens=3)],
    "draft full": [
        GroupShape("sliding", 16, window=64),
        GroupShape("full", 16),
        GroupShape("full", 16, bytes_per_token=16, draft=True),
    ],
    "full + states": [
        GroupShape("full", 64, bytes_per_token=16),
        *[GroupShape("recurrent", 64, state_bytes=1024, num_layers=2) for _ in range(3)],
    ],
    "states, two windows, full last": [
        GroupShape("recurrent", 96, state_bytes=40, num_layers=2),
        GroupShape("sliding", 16, window=40),
        GroupShape("sliding", 32, window=100),
        GroupShape("full", 48, num_layers=2),
    ],
    "small blocks and states": [
        GroupShape("full", 16),
        GroupShape("recurrent", 64, state_bytes=128),
    ],
    "draft sliding": [GroupShape("full", 32), GroupShape("sliding", 16, window=40, draft=True)],
}

FULL_AND_SLIDING = LAYOUTS["full 32 + sliding 16"]
_names = itertools.count()


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(32_000), k=length)


def plain(groups: list[GroupShape], **options: Any) -> SchedulerHarness:
    return SchedulerHarness(groups, connector=None, **{"num_blocks": 300, **options})


def dict_harness(groups: list[GroupShape], lie: str | None = None, **options: Any) -> SchedulerHarness:
    extra = {"store": f"s{next(_names)}", "lie": lie, **options.pop("extra", {})}
    defaults: dict[str, Any] = {"num_blocks": 300, "load_failure_policy": "recompute"}
    return SchedulerHarness(
        groups,
        connector="DictConnector",
        module="harness.dict_connector",
        extra_config=extra,
        **{**defaults, **options},
    )
