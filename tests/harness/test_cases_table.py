"""docs/regressions.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS.parent / "docs" / "regressions.md").read_text(encoding="utf-8")


def test_every_test_in_the_table_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`: `(test_\w+)`", TABLE)
    assert len(named) > 100
    texts = {path: (TESTS / path).read_text(encoding="utf-8") for path, _ in named}
    assert [(path, name) for path, name in named if f"def {name}(" not in texts[path]] == []


def test_every_invariant_and_case_has_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (B?\d+) \| .+ \| (.+) \| (.*) \|$", TABLE, re.MULTILINE)
    assert {name for name, _, _ in rows} >= {str(number) for number in range(1, 43)}
    assert [name for name, tests, reason in rows if tests == "-" and not reason] == []
