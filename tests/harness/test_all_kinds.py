"""What is saved, found and loaded for every kind of cache group."""

from __future__ import annotations

from typing import Any

import pytest

from harness.brute_force import HitCheck
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
        check = HitCheck(q, groups)
        prompt = tokens(1, 700)
        first = q.serve(prompt, max_tokens=5)
        q.forget()
        expected = check.expected(q.request(prompt), 0)
        second = q.serve(prompt, max_tokens=5)
        # All that the last hash covers, but for what is needed beyond it by a group that peeks.
        longest = q.layout.max_boundary(700)
        assert expected == (longest - 32 if name == "eagle, no group flagged" else longest)
        assert second.external_hit == expected
        assert (first.external_hit, second.local_hit) == (0, 0)
        assert second.output == first.output
        assert check.wrong == []
        q.check_end()
