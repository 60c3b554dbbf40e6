"""`CacheLayout`: the cache groups of one model, validated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvquilt.errors import LayoutError
from kvquilt.layout.groups import CacheGroup

__all__ = ["CacheLayout"]


@dataclass(frozen=True)
class CacheLayout:
    """Groups in the engine's order (a group's index is the engine's), the hash unit, the lattice.

    tokens_per_hash: tokens covered by one engine block hash; defaults to the gcd of the
    cacheable groups' blocks.

    >>> full = CacheGroup("full", kind="full", tokens_per_block=32, page_bytes=1 << 20)
    >>> win = CacheGroup("win", kind="sliding", tokens_per_block=48, window=32, page_bytes=1 << 19)
    >>> layout = CacheLayout([full, win])
    >>> layout.tokens_per_hash, layout.lattice_tokens
    (16, 96)

    Raises LayoutError with the group, the value and the reason.
    """

    groups: tuple[CacheGroup, ...]
    tokens_per_hash: int = 0
    lattice_tokens: int = field(init=False)

    def __init__(self, groups: Sequence[CacheGroup], tokens_per_hash: int | None = None) -> None:
        groups = tuple(groups)
        object.__setattr__(self, "groups", groups)
        blocks = [g.tokens_per_block for g in groups if g.cacheable]
        _check_names(groups)
        if not blocks:
            raise LayoutError("no cacheable cache group: there is nothing to keep")
        unit = math.gcd(*blocks) if tokens_per_hash is None else tokens_per_hash
        if not isinstance(unit, int) or isinstance(unit, bool) or unit < 1:
            raise LayoutError(f"tokens_per_hash={unit!r}: must be a positive integer")
        for group in groups:
            if group.cacheable and group.tokens_per_block % unit:
                raise LayoutError(
                    f"cache group {group.name!r}: tokens_per_block={group.tokens_per_block}: "
                    f"not a multiple of the hash unit of {unit} tokens"
                )
        object.__setattr__(self, "tokens_per_hash", unit)
        object.__setattr__(self, "lattice_tokens", math.lcm(*blocks))

    @property
    def cacheable_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that take part in hits, in order."""
        return tuple(g for g in self.groups if g.cacheable)

    def index(self, name: str) -> int:
        """Index of the group called `name`; KeyError if there is none."""
        for i, group in enumerate(self.groups):
            if group.name == name:
                return i
        raise KeyError(name)

    def hashes_per_block(self, group: CacheGroup) -> int:
        """Engine block hashes that one block of `group` spans."""
        return group.tokens_per_block // self.tokens_per_hash

    def max_boundary(self, num_tokens: int) -> int:
        """Longest lattice boundary that leaves a prompt of `num_tokens` one token to compute."""
        return max(0, num_tokens - 1) // self.lattice_tokens * self.lattice_tokens


def _check_names(groups: tuple[CacheGroup, ...]) -> None:
    seen: set[str] = set()
    owner: dict[str, str] = {}
    for group in groups:
        if group.name in seen:
            raise LayoutError(f"cache group {group.name!r}: the name is used twice")
        seen.add(group.name)
        for layer in group.layers:
            if layer in owner:
                raise LayoutError(
                    f"cache group {group.name!r}: layer {layer!r} already belongs to group {owner[layer]!r}"
                )
            owner[layer] = group.name
