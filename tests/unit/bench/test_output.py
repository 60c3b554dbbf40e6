"""What people and pipes see of a run."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvquilt.bench.config import make_config
from kvquilt.bench.quiet import stdout_to_stderr
from kvquilt.bench.run import Outcome
from kvquilt.bench.setup import set_up
from kvquilt.bench.table import print_outcome, summary
from unit.bench.test_report import GOOD


def outcome(*failures: str, **changes: Any) -> Outcome:
    setup = set_up(make_config(requests=4, prompt_tokens=100))
    drifts = {"cold": 0.0, "kvquilt_warm": 4e-7, "branch": 0.0}
    report = msgspec.structs.replace(GOOD, **changes)
    return Outcome(setup, report, failures, {"pin_cap": 3}, drifts)


def printed(result: Outcome) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    print_outcome(result, console)
    return console.export_text()


def test_the_tables_show_each_phase_and_each_group() -> None:
    text = printed(outcome())
    for name in ("cold", "engine_warm", "kvquilt_warm", "branch", "full", "4/4", "4e-07"):
        assert name in text
    assert "8 of 8 equal" in text
    assert "saves skipped, pages by reason: 3 pin_cap" in text
    assert "FAILED" not in text


def test_one_sentence_says_what_a_run_shows() -> None:
    sentence = summary(outcome())
    assert sentence.startswith("A real engine gave the same 4 outputs with kvquilt as without it")
    assert "100% of what can be put back (200 tokens" in sentence
    assert sentence.count(". ") == 0


def test_a_failed_run_claims_nothing() -> None:
    text = printed(outcome("outputs: 1 of 4 differ", "loads: 1 failed"))
    assert text.count("FAILED") == 2
    assert "does not show that kvquilt works: 2 of its checks failed" in text
    assert "the same 4 outputs" not in text


def test_stdout_is_kept_for_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_to_stderr():
        sys.stdout.write("from Python\n")
        os.write(1, b"from C\n")
    sys.stdout.write("the result\n")
    captured = capfd.readouterr()
    assert captured.out == "the result\n"
    assert "from Python" in captured.err
    assert "from C" in captured.err


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="stop"), stdout_to_stderr():
        raise ValueError("stop")
    os.write(1, b"back\n")
    assert capfd.readouterr().out == "back\n"
