"""The verdict, the JSON and the sentences, from figures alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvquilt.bench.expect import Expectation
from kvquilt.bench.report import (
    GroupReport,
    PhaseReport,
    Report,
    Ttft,
    equal_outputs,
    failures,
    logprob_drift,
    phase_report,
)
from kvquilt.testing.results import Result

KEYS = [
    "model",
    "requests",
    "equal_outputs",
    "max_logprob_drift",
    "engine_logprob_drift",
    "external_hit_tokens",
    "best_hit_tokens",
    "hit_blocks",
    "loads",
    "load_failures",
    "bytes_loaded",
    "bytes_resident",
    "tokens_covered",
    "evictions",
    "pages_compared",
    "pages_equal",
    "sensitivity",
    "phases",
    "groups",
]
EXPECTED = Expectation(
    best_warm=200, best_branch=100, warm=200, branch=100, holds_warm=True, holds_branch=True
)


def phase(local: int = 0, external: int = 0, equal: int = 4) -> PhaseReport:
    return PhaseReport(Ttft(1.0, 1.0, 1.0), local, external, equal)


GROUP = GroupReport(
    name="full",
    kind="full",
    window=None,
    layers=1,
    tokens_per_block=32,
    page_bytes=64,
    slot_bytes=4096,
    slots=10,
    pages=8,
    bytes_resident=8 * 4096,
    saved_pages=8,
    loaded_pages=8,
    loaded_bytes=512,
    evictions=0,
    pages_compared=8,
    sensitivity=4,
)
GOOD = Report(
    model="gemma4-mini",
    requests=4,
    equal_outputs=4,
    max_logprob_drift=0.0,
    engine_logprob_drift=0.0,
    external_hit_tokens=200,
    best_hit_tokens=200,
    hit_blocks=8,
    loads=4,
    load_failures=0,
    bytes_loaded=512,
    bytes_resident=8 * 4096,
    tokens_covered=320,
    evictions=0,
    pages_compared=8,
    pages_equal=8,
    sensitivity={"full": 4},
    phases={
        "cold": phase(),
        "engine_warm": phase(local=200),
        "kvquilt_warm": phase(external=200),
        "branch": phase(external=100),
    },
    groups=[GROUP],
)


def verdict(
    concurrency: int = 8, unknown_pages: int = 0, expected: Expectation = EXPECTED, **changes: Any
) -> str:
    report = msgspec.structs.replace(GOOD, **changes)
    return "\n".join(failures(report, expected, concurrency=concurrency, unknown_pages=unknown_pages))


def phases(**changes: PhaseReport) -> dict[str, PhaseReport]:
    return {**GOOD.phases, **changes}


def test_a_run_in_which_all_holds_has_no_failures() -> None:
    assert verdict() == ""
    assert verdict(concurrency=1) == ""


def test_the_json_has_the_documented_keys_and_no_others() -> None:
    plain = GOOD.to_dict()
    assert list(plain) == KEYS
    assert list(plain["phases"]) == ["cold", "engine_warm", "kvquilt_warm", "branch"]
    for part in plain["phases"].values():
        assert list(part) == [
            "ttft_ms",
            "local_hit_tokens",
            "external_hit_tokens",
            "equal_outputs",
            "drafted_tokens",
            "accepted_tokens",
        ]
        assert list(part["ttft_ms"]) == ["mean", "p50", "p99"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"equal_outputs": 3}, "outputs: 1 of 4 differ"),
        ({"pages_equal": 7}, "pages: 1 of 8 came back different"),
        ({"unknown_pages": 2}, "pages: 2 were loaded that no save had shown"),
        ({"load_failures": 1}, "loads: 1 failed"),
        ({"sensitivity": {"full": 4, "win": 0}}, "loading win as zeros changes no output"),
        ({"sensitivity": {}}, "no group could be loaded as zeros"),
        ({"groups": [msgspec.structs.replace(GROUP, pages_compared=0)]}, "none compared of full"),
        (
            {"phases": phases(kvquilt_warm=phase(external=199))},
            "kvquilt_warm: 199 tokens hit, 200 were to be",
        ),
        ({"phases": phases(branch=phase(external=0))}, "branch: 0 tokens hit, 100 were to be"),
        ({"phases": phases(engine_warm=phase(local=0))}, "engine_warm: 0 tokens hit"),
        ({"phases": phases(kvquilt_warm=phase(local=64, external=200))}, "the engine itself held 64 tokens"),
    ],
)
def test_whatever_does_not_hold_is_said(changes: dict[str, Any], words: str) -> None:
    assert words in verdict(**changes)


def test_a_small_budget_excuses_missing_hits_and_nothing_else() -> None:
    small = msgspec.convert(
        {**msgspec.to_builtins(EXPECTED), "holds_warm": False, "holds_branch": False}, Expectation
    )
    missing = phases(kvquilt_warm=phase(external=10), branch=phase(external=0))
    assert verdict(expected=small, phases=missing) == ""
    assert "outputs" in verdict(expected=small, phases=missing, equal_outputs=3)


def test_drift_must_be_exactly_zero_at_concurrency_1() -> None:
    tiny = {"max_logprob_drift": 1e-9, "engine_logprob_drift": 1e-6}
    assert "must be 0 at concurrency 1" in verdict(concurrency=1, **tiny)
    assert verdict(concurrency=8, **tiny) == ""


def test_with_a_drafter_batches_differ_also_at_concurrency_1() -> None:
    drafted = {"phases": phases(cold=msgspec.structs.replace(phase(), drafted_tokens=3))}
    own = {"engine_logprob_drift": 1e-6}
    assert verdict(concurrency=1, max_logprob_drift=1e-6, **own, **drafted) == ""
    assert "above 1e-06" in verdict(concurrency=1, max_logprob_drift=2e-6, **own, **drafted)
    assert "must be 0" in verdict(concurrency=1, max_logprob_drift=1e-6, **own)


def test_drift_is_bounded_by_the_engines_own_and_by_a_constant() -> None:
    assert "above 1e-06" in verdict(max_logprob_drift=2e-6, engine_logprob_drift=1e-6)
    assert "above 1e-05" in verdict(max_logprob_drift=2e-5, engine_logprob_drift=1e-3)
    assert "above" in verdict(max_logprob_drift=float("inf"), engine_logprob_drift=float("inf"))


def test_outputs_that_batching_decides_are_said_to_be_so_and_still_fail() -> None:
    both = verdict(equal_outputs=3, phases=phases(engine_warm=phase(local=200, equal=2)))
    assert "the engine's own prefix hits change 2 of them without kvquilt" in both


def result(
    tokens: tuple[int, ...] = (1, 2), logprobs: tuple[float, ...] = (-1.0, -2.0), **more: Any
) -> Result:
    values: dict[str, Any] = {
        "ttft_seconds": 0.5,
        "finish_reason": "length",
        "local_hit_tokens": 0,
        "external_hit_tokens": 0,
        "request_id": "r",
    }
    return Result(tokens=tokens, logprobs=logprobs, **{**values, **more})


def test_outputs_are_equal_if_all_tokens_are_and_none_is_missing() -> None:
    good = result()
    assert equal_outputs([good], [result()]) == [True]
    assert equal_outputs([good], [result(tokens=(1, 3))]) == [False]
    assert equal_outputs([result(tokens=(1,))], [good]) == [False]
    assert equal_outputs([result(finish_reason="error")], [result(finish_reason="error")]) == [False]


def test_drift_is_the_largest_difference_up_to_the_first_other_token() -> None:
    assert logprob_drift([result()], [result()]) == 0.0
    assert logprob_drift([result(logprobs=(-1.0, -2.5))], [result()]) == 0.5
    assert logprob_drift([result(tokens=(1, 9), logprobs=(-1.25, -9.0))], [result()]) == 0.25
    assert logprob_drift([result(logprobs=(float("nan"), -2.0))], [result()]) == float("inf")


def test_a_phase_sums_its_requests() -> None:
    results = [result(ttft_seconds=s, external_hit_tokens=64, local_hit_tokens=1) for s in (0.1, 0.2, 0.6)]
    found = phase_report(results, [result(), result(), result(tokens=(0, 0))])
    assert found.ttft_ms == Ttft(mean=300.0, p50=200.0, p99=592.0)
    assert (found.local_hit_tokens, found.external_hit_tokens, found.equal_outputs) == (3, 192, 2)


@pytest.mark.parametrize(
    ("loaded", "compared", "found"),
    [
        ({"full": 8}, 8, []),
        ({"full": 9}, 8, ["pages: 8 compared, 9 were to be: too few to prove anything"]),
        ({"full": 5000}, 999, ["pages: 999 compared, 1,000 were to be: too few to prove anything"]),
        ({"full": 5000}, 1000, []),
        ({"full": 0}, 0, []),
    ],
)
def test_enough_pages_must_be_compared(loaded: dict[str, int], compared: int, found: list[str]) -> None:
    group = msgspec.structs.replace(GROUP, pages_compared=compared, loaded_pages=compared)
    report = msgspec.structs.replace(GOOD, pages_compared=compared, pages_equal=compared, groups=[group])
    expected = replace(EXPECTED, pages=loaded)
    assert failures(report, expected, concurrency=8) == found


def test_each_group_that_is_loaded_must_be_compared() -> None:
    groups = [GROUP, msgspec.structs.replace(GROUP, name="win", pages_compared=0, loaded_pages=0)]
    report = msgspec.structs.replace(GOOD, pages_compared=8, pages_equal=8, groups=groups)
    expected = replace(EXPECTED, pages={"full": 4, "win": 4})
    assert failures(report, expected, concurrency=8) == ["pages: none compared of win, which must be loaded"]


def test_a_second_branch_must_hit_what_the_first_left_at_the_fork() -> None:
    expected = replace(EXPECTED, branch=0, second_branch=100)
    phases = {**GOOD.phases, "second_branch": phase(external=99)}
    report = msgspec.structs.replace(GOOD, phases=phases)
    assert failures(report, expected, concurrency=8) == ["second_branch: 99 tokens hit, 100 were to be"]
