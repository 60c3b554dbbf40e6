"""The run with a restart: its verdict from figures alone, its sizes, and children that do not answer."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvquilt.bench import lives
from kvquilt.bench.config import make_config
from kvquilt.bench.expect import RestartExpectation, default_disk_bytes, expect_restart, holds, plan_for
from kvquilt.bench.lives import Task, run_life
from kvquilt.bench.report import PhaseReport, Ttft
from kvquilt.bench.restart import RestartOutcome
from kvquilt.bench.restart_report import RestartGroup, RestartReport, restart_failures
from kvquilt.bench.restart_table import print_restart, restart_summary
from kvquilt.bench.setup import set_up
from kvquilt.cli.main import app
from kvquilt.errors import BenchError, ConfigError

EXPECTED = RestartExpectation(hit_tokens=50, holds=True, pages={"full": 8})


def phase(local: int = 0, external: int = 0, equal: int = 4) -> PhaseReport:
    return PhaseReport(Ttft(1.0, 1.0, 1.0), local, external, equal)


GROUP = RestartGroup(
    name="full",
    kind="full",
    window=None,
    tokens_per_block=32,
    page_bytes=64,
    ram_slots=10,
    disk_slots=12,
    written_pages=9,
    dropped_pages=0,
    killed_pages=9,
    found_pages=9,
    read_pages=8,
    bad_pages=0,
    evictions=0,
    loaded_pages=8,
    expected_pages=8,
    pages_compared=8,
)
GOOD = RestartReport(
    model="gemma4-mini",
    requests=4,
    equal_outputs=4,
    max_logprob_drift=0.0,
    engine_logprob_drift=0.0,
    external_hit_tokens=200,
    expected_hit_tokens=200,
    best_hit_tokens=200,
    exact_hits=4,
    loads=4,
    load_failures=0,
    bytes_loaded=512,
    disk_bytes=1 << 20,
    pages_written=9,
    pages_dropped=0,
    pages_read=8,
    pages_bad=0,
    promotions={"started": 4},
    pages_recorded=9,
    pages_compared=8,
    pages_equal=8,
    pages_unknown=0,
    phases={"cold": phase(), "engine_warm": phase(local=200), "restart_warm": phase(external=200)},
    groups=[GROUP],
)
SHORT = {
    "exact_hits": 3,
    "external_hit_tokens": 199,
    "phases": GOOD.phases | {"restart_warm": phase(external=199)},
}


def verdict(expected: RestartExpectation = EXPECTED, write: Any = "through", **changes: Any) -> str:
    report = msgspec.structs.replace(GOOD, **changes)
    return "\n".join(restart_failures(report, expected, concurrency=8, write=write))


def group(**changes: Any) -> dict[str, Any]:
    return {"groups": [msgspec.structs.replace(GROUP, **changes)]}


def test_a_run_in_which_all_holds_has_no_failures() -> None:
    assert verdict() == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"equal_outputs": 3}, "outputs: 1 of 4 differ"),
        ({"max_logprob_drift": 1e-9}, "log-probs: drift"),
        (SHORT, "199 tokens hit, 200 were to be, 3 of 4 requests as long as expected"),
        (SHORT | {"pages_dropped": 7}, "7 pages were not written"),
        # Hits that are too long or too short can add up to the right sum.
        ({"exact_hits": 2}, "2 of 4 requests as long as expected"),
        ({"phases": GOOD.phases | {"cold": phase(external=64)}}, "cold: 64 tokens hit, so it was not cold"),
        ({"phases": GOOD.phases | {"restart_warm": phase(local=64)}}, "the engine itself held 64 tokens"),
        (group(read_pages=0), "disk: no page of full was read"),
        (group(read_pages=0, loaded_pages=0, pages_compared=0), "disk: no page of full was read"),
        (group(found_pages=8), "pages lost by the restart: found full 8 of 9"),
        ({"pages_bad": 2}, "2 pages did not pass their check"),
        ({"load_failures": 1}, "loads: 1 failed"),
        ({"pages_equal": 7}, "pages: 1 of 8 came back different"),
        ({"pages_unknown": 3}, "3 were loaded that the first life had not shown"),
        (group(pages_compared=7), "not all compared of full"),
    ],
)
def test_whatever_does_not_hold_is_said(changes: dict[str, Any], words: str) -> None:
    assert words in verdict(**changes)


def test_a_small_budget_and_evicted_pages_excuse_missing_hits_and_nothing_else() -> None:
    small = RestartExpectation(hit_tokens=50, holds=False, pages={"full": 8})
    for excuse in ({"expected": small}, {"write": "evicted"}):
        assert verdict(**excuse, **SHORT) == ""
        assert "outputs" in verdict(**excuse, **SHORT, equal_outputs=3)
        nothing = {"exact_hits": 0, "external_hit_tokens": 0}
        assert "no token hit, so it proves nothing" in verdict(**excuse, **nothing)


# ---- sizes ----


@pytest.mark.parametrize("model", ["gemma4-mini", "granite-hybrid-mini", "gemma4-draft-mini"])
def test_the_default_disk_holds_all_that_is_saved_and_the_other_sizes_are_told_apart(model: str) -> None:
    config = make_config(model=model, requests=6, prompt_tokens=600)
    setup = set_up(config)
    layout = setup.model.layout
    plan = plan_for(layout, setup.options, default_disk_bytes(layout, config), slot_overhead_bytes=8192)
    common = (layout, config, setup.options, setup.expected.warm)
    enough = expect_restart(*common, ram=setup.plan, disk_slots=plan.slots)
    assert enough.holds
    assert enough.hit_tokens * config.requests == setup.expected.warm
    assert all(enough.pages[g.name] > 0 for g in layout.cacheable_groups)
    less = {name: slots // 2 for name, slots in plan.slots.items()}
    assert not expect_restart(*common, ram=setup.plan, disk_slots=less).holds
    tight = plan_for(layout, setup.options, setup.ram_bytes // 12)
    assert not holds(tight, {name: 3 * slots for name, slots in tight.slots.items()})
    assert not expect_restart(*common, ram=tight, disk_slots=plan.slots).holds


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"restart": True}, "--restart: needs --disk"),
        ({"disk": "/x"}, "--disk: needs --restart"),
        ({"disk_bytes": "1GiB"}, "--disk-bytes: needs --disk"),
        ({"disk_write": "evicted"}, "--disk-write: needs --disk"),
        ({"disk": "/x", "restart": True, "disk_write": "never"}, "allowed are through, evicted"),
        ({"disk": "/x", "restart": True, "disk_bytes": "some"}, "--disk-bytes='some'"),
    ],
)
def test_impossible_arguments_are_refused_with_their_names(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(**values)
    assert words in str(refused.value)


def test_the_directory_may_be_relative() -> None:
    assert make_config(disk="x", restart=True).disk == str(Path.cwd() / "x")


# ---- the children ----


def test_a_child_that_ends_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="first life ended with status 1"):
        run_life(Task(make_config(), "first", 1 << 30), kill=True)


def test_what_a_child_refuses_is_refused_here() -> None:
    config = msgspec.structs.replace(make_config(), model="no-such-model")
    with pytest.raises(ConfigError, match="neither a tiny model"):
        run_life(Task(config, "second", 1 << 30), kill=False)


@pytest.mark.parametrize("cut", [0, 3, 8, 12])
def test_half_a_message_is_none(cut: int) -> None:
    pipe = io.BytesIO()
    lives._send(pipe, b"12345")
    assert lives._receive(io.BytesIO(pipe.getvalue())) == b"12345"
    assert lives._receive(io.BytesIO(pipe.getvalue()[:cut])) is None


# ---- what people see ----


def outcome(*failures: str) -> RestartOutcome:
    setup = set_up(make_config(requests=4, prompt_tokens=100, disk="/x", restart=True))
    return RestartOutcome(setup, 1 << 20, EXPECTED, GOOD, failures)


def test_the_tables_show_each_phase_and_each_group() -> None:
    console = Console(width=140, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    print_restart(outcome(), console)
    text = console.export_text()
    for words in ("cold", "engine_warm", "restart_warm", "full", "4/4", "8 of 8 equal", "9 pages written"):
        assert words in text
    assert "FAILED" not in text
    assert "100% of what can be put back (200 tokens" in restart_summary(outcome())
    assert "does not show that pages outlive an engine: 1 checks" in restart_summary(outcome("x"))


@pytest.mark.parametrize("failures", [(), ("outputs: 1 of 4 differ",)])
def test_the_command_prints_the_result_and_ends_by_the_verdict(
    monkeypatch: pytest.MonkeyPatch, failures: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kvquilt.bench.restart.run_restart", lambda config, progress: outcome(*failures))
    run = CliRunner().invoke(app, ["bench", "--disk", "/x", "--restart", "--json"])
    assert run.exit_code == len(failures)
    assert json.loads(run.stdout) == GOOD.to_dict()
    assert ("FAILED" in run.stderr) == bool(failures)
