"""Names of cache groups: the same rule wherever groups come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["group_names"]


def group_names(kinds: Sequence[str], draft: Sequence[bool] = ()) -> list[str]:
    """Names for groups of these kinds, in the engine's order.

    A kind that occurs once is the name; several are numbered in order. draft: which groups belong
    to a drafter (those past its end do not); their names start with "draft.".

    >>> group_names(["sliding", "sliding", "full"])
    ['sliding.0', 'sliding.1', 'full']
    >>> group_names(["full", "recurrent", "full"], [False, False, True])
    ['full', 'recurrent', 'draft.full']
    """
    flags = [*draft, *[False] * (len(kinds) - len(draft))]
    bases = [f"draft.{kind}" if flag else kind for kind, flag in zip(kinds, flags, strict=True)]
    total = Counter(bases)
    seen: Counter[str] = Counter()
    names = []
    for base in bases:
        names.append(f"{base}.{seen[base]}" if total[base] > 1 else base)
        seen[base] += 1
    return names
