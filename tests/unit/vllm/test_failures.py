"""Several failed loads: the engine is to pass on to all of them."""

from __future__ import annotations

from kvquilt.vllm.failures import FailedLoads


def test_the_first_is_asked_again_until_the_others_were_reached() -> None:
    failed = FailedLoads()
    failed.add({"a", "b", "c", "gone"}, live={"a", "b", "c", "other"})
    assert [failed.ask_again(name) for name in ("a", "b", "c")] == [True, True, False]
    assert [failed.ask_again(name) for name in ("a", "b", "c", "other")] == [False] * 4


def test_nobody_is_asked_again_for_ever() -> None:
    """One of them is never reached: the others go on at their second turn."""
    failed = FailedLoads()
    failed.add({"a", "b"}, live={"a", "b"})
    assert [failed.ask_again("a"), failed.ask_again("a"), failed.ask_again("a")] == [True, False, False]
    failed.forget("b")
    assert failed.ask_again("a") is False


def test_without_failures_nothing_is_held_up() -> None:
    failed = FailedLoads()
    assert failed.ask_again("a") is False
    failed.add({"a"}, live={"a"})
    assert failed.ask_again("a") is False
