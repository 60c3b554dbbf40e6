"""Hooks that fail give a legal answer, are logged once per cause and counted."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

pytest.importorskip("vllm")

from kvquilt.vllm.guard import guarded


class Owner:
    def __init__(self) -> None:
        self.errors: Counter[tuple[str, str]] = Counter()
        self.error: BaseException | None = None

    def on_hook_error(self, hook: str, error: Exception) -> bool:
        self.errors[hook, type(error).__name__] += 1
        return self.errors[hook, type(error).__name__] == 1

    @guarded(lambda self, a, b=0: (a, -b))
    def hook(self, a: int, b: int = 0) -> tuple[int, int]:
        """What it does."""
        if self.error is not None:
            raise self.error
        return a, b


def test_hook_that_works_is_not_touched() -> None:
    owner = Owner()
    assert owner.hook(1, b=2) == (1, 2)
    assert not owner.errors
    assert (Owner.hook.__name__, Owner.hook.__doc__) == ("hook", "What it does.")


def test_fallback_gets_the_arguments() -> None:
    owner = Owner()
    owner.error = KeyError("x")
    assert owner.hook(1, b=2) == (1, -2)
    assert owner.errors == {("hook", "KeyError"): 1}


def test_logged_once_per_cause(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    with caplog.at_level(logging.ERROR, logger="kvquilt"):
        for error in (KeyError("x"), KeyError("y"), ValueError("z"), KeyError("x")):
            owner.error = error
            owner.hook(1)
    assert [r.getMessage().split(";")[0] for r in caplog.records] == ["kvquilt: hook failed"] * 2
    assert all(record.exc_info for record in caplog.records)
    assert owner.errors == {("hook", "KeyError"): 3, ("hook", "ValueError"): 1}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_what_ends_the_process_passes(error: BaseException) -> None:
    owner = Owner()
    owner.error = error
    with pytest.raises(type(error)):
        owner.hook(1)
    assert not owner.errors
