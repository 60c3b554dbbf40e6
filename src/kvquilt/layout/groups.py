"""Kinds of cache groups, and the one rule that says which blocks a boundary needs.

Every other part (what to save, what to look up, what to load, which destinations to
expect) asks `needed_blocks`; nobody writes the rule again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import LayoutError

__all__ = ["CacheGroup", "GroupKind", "first_needed_token", "needed_blocks"]

GroupKind = Literal["full", "sliding", "chunked", "recurrent", "scratch"]
_KINDS: tuple[str, ...] = get_args(GroupKind)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one cache spec, and so one block table in the engine.

    tokens_per_block: tokens that one block covers; block i covers [i*t, (i+1)*t).
    page_bytes: bytes of one block over all layers of the group, on one rank. May be 0.
    window: sliding groups: tokens that a token attends to, itself included.
    chunk: chunked groups: tokens per attention chunk.
    extra_tokens: sliding groups: tokens that the engine retains beyond the window.
    draft: an engine "eagle" group: the block that starts at a boundary must be present too.
    cacheable: False for groups that take no part in hits (kind "scratch" never does).
    replicated: every rank holds the same bytes (latent KV), so a slot holds them once.
    layers: names of the layers, in the engine's order.

    >>> CacheGroup("win", kind="sliding", tokens_per_block=16, window=32, page_bytes=4096).dense
    False

    Raises LayoutError with the group's name, the value and the reason.
    """

    name: str
    kind: GroupKind
    tokens_per_block: int
    page_bytes: int
    window: int | None = None
    chunk: int | None = None
    extra_tokens: int = 0
    draft: bool = False
    cacheable: bool = True
    layers: tuple[str, ...] = ()
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise self._refuse("kind", self.kind, f"allowed are {', '.join(_KINDS)}")
        for field, low in (("tokens_per_block", 1), ("page_bytes", 0), ("extra_tokens", 0)):
            self._check_int(field, low)
        for field, kind in (("window", "sliding"), ("chunk", "chunked")):
            if self.kind == kind:
                if getattr(self, field) is None:
                    raise self._refuse(field, None, f"a {kind} group needs its {field}")
                self._check_int(field, 1)
            elif getattr(self, field) is not None:
                raise self._refuse(field, getattr(self, field), f"only a {kind} group has one")
        if self.extra_tokens and self.kind != "sliding":
            raise self._refuse("extra_tokens", self.extra_tokens, "only a sliding group retains extra tokens")
        if self.draft and self.kind in ("recurrent", "scratch"):
            raise self._refuse("draft", True, f"a {self.kind} group has no block that starts at a boundary")
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.kind == "scratch":
            object.__setattr__(self, "cacheable", False)

    @property
    def dense(self) -> bool:
        """True if every block before a boundary is needed at it."""
        return self.kind == "full"

    def slot_content_bytes(self, num_ranks: int) -> int:
        """Bytes of one block over all local ranks: what a slot has to hold."""
        return self.page_bytes * (1 if self.replicated else num_ranks)

    def _check_int(self, field: str, low: int) -> None:
        value = getattr(self, field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._refuse(field, value, "must be an integer")
        if value < low:
            raise self._refuse(field, value, f"must be at least {low}")

    def _refuse(self, field: str, value: object, reason: str) -> LayoutError:
        return LayoutError(f"cache group {self.name!r}: {field}={value!r}: {reason}")


Boundaries = int | NDArray[np.int64]
_SCALARS = (int, np.integer)


def first_needed_token(group: CacheGroup, tokens: int) -> int:
    """First token whose KV is needed to resume after `tokens` tokens (DESIGN.md section 2)."""
    return max(0, int(_first_needed(group, tokens)))


@overload
def needed_blocks(group: CacheGroup, tokens: int) -> tuple[int, int]: ...
@overload
def needed_blocks(
    group: CacheGroup, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
def needed_blocks(group: CacheGroup, tokens: Boundaries) -> tuple[Boundaries, Boundaries]:
    """Blocks [lo, hi) of `group` that must be restored to resume after `tokens` tokens.

    tokens: one boundary, or an int64 array of boundaries, each a multiple of the group's
    block. Returns lo and hi in the shape of `tokens`. The *peek* block of a draft group is
    block `hi`: it must be present (and is saved) but is not part of the range, since it is
    never restored. Groups that are not cacheable need nothing.
    """
    # A single boundary stays a Python integer: look-ups ask for one per group, and arrays cost more.
    single = isinstance(tokens, _SCALARS)
    boundary: Any = int(tokens) if single else np.asarray(tokens, dtype=np.int64)
    least, most = (min, max) if single else (np.minimum, np.maximum)
    if not group.cacheable:
        return boundary * 0, boundary * 0
    hi = boundary // group.tokens_per_block
    lo = least(most(_first_needed(group, boundary), 0) // group.tokens_per_block, hi)
    return lo, hi


def _first_needed(group: CacheGroup, tokens: Any) -> Any:
    """First needed token at `tokens`, an integer or an array; below 0 stands for 0."""
    if group.kind == "full":
        return tokens * 0
    if group.kind == "sliding":
        return tokens - ((group.window or 0) - 1 + group.extra_tokens)
    if group.kind == "chunked":
        chunk = group.chunk or 1
        return tokens // chunk * chunk
    if group.kind == "recurrent":
        return tokens - group.tokens_per_block
    return tokens
