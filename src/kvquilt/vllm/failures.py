"""Requests whose load failed, until the engine has taken their blocks back."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["FailedLoads"]


class FailedLoads:
    """Lets the engine pass on to all requests whose load failed before it gives any of them blocks.

    The engine takes a failed load's blocks back when that request's turn comes. If the first of
    several such requests finds no room, vLLM 0.32 goes no further: the others then keep the very
    blocks that the first one waits for, for ever. Being told "ask again" it does go further.
    """

    def __init__(self) -> None:
        self._holding: set[str] = set()
        self._asked: set[str] = set()

    def add(self, failed: Collection[str], live: Collection[str]) -> None:
        """The engine is being told that these loads failed; those of live requests hold blocks."""
        self._holding |= {request_id for request_id in failed if request_id in live}

    def ask_again(self, request_id: str) -> bool:
        """The engine asks about a request, whose blocks it has taken back. Should it ask again?"""
        self._holding.discard(request_id)
        if not self._holding:
            self._asked.clear()
            return False
        if request_id in self._asked:  # it came round: whoever is left was not within reach
            return False
        self._asked.add(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._holding.discard(request_id)
