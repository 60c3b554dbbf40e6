"""The control: a cache group that is loaded as zeros must be noticed."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["ZeroingCopier"]


class ZeroingCopier:
    """A copier around another one that fills the blocks of one group with zeros instead of loading them.

    group: the group's index. zeroed: blocks filled so far.
    """

    def __init__(self, inner: Any, group: int) -> None:
        self._inner = inner
        self._group = group
        self.zeroed = 0

    def load(self, job_id: int, copies: Any, zero: Any = None) -> None:
        """Load what is not of the group; zero what is."""
        mine = copies.group == self._group
        if not mine.any():
            self._inner.load(job_id, copies, zero)
            return
        self.zeroed += int(mine.sum())
        blank = _part(copies, mine) if zero is None else _join(_part(copies, mine), zero)
        self._inner.load(job_id, _part(copies, ~mine), blank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _part(copies: Any, mask: Any) -> Any:
    return type(copies)(copies.group[mask], copies.block[mask], copies.slot[mask])


def _join(first: Any, second: Any) -> Any:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("group", "block", "slot"))
    return type(first)(*map(np.concatenate, pairs))
