"""Reading what `/metrics` shows."""

from __future__ import annotations

import re

__all__ = ["value_of"]


def value_of(text: str, name: str) -> float:
    """One metric's sum over its labels; 0 if it has no row."""
    rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, rows))
