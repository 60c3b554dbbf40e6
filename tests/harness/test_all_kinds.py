"""What is saved, found and loaded for every kind of cache group."""

from __future__ import annotations

from typing import Any

import pytest

from harness.connector_support import KINDS, Quilt, engine_of, tokens

ENGINES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2 async, two ranks": {"runner": "v2", "async_scheduling": True, "num_ranks": 2},
    "v1 deferred, chunks": {"runner": "v1-deferred", "max_num_batched_tokens": 128},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", KINDS)
def test_every_layout_gets_its_whole_prefix_back(name: str, engine: str) -> None:
    groups, options = engine_of(name)
    options = {**ENGINES[engine], **options}
    if "speculation" in options:
        options["async_scheduling"] = False
    with Quilt(groups, **options) as q:
        prompt = tokens(1, 700)
        first = q.serve(prompt, max_tokens=5)
        q.forget()
        second = q.serve(prompt, max_tokens=5)
        assert second.external_hit == q.layout.max_boundary(700) > 0
        assert (first.external_hit, second.local_hit) == (0, 0)
        assert second.output == first.output
        q.check_end()
