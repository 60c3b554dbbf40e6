"""Hits by brute force: token by token, over what the store holds at that moment.

Deliberately nothing of the product's own rule: what attention reads is the simulated model's, the
groups with a peek block are the engine's, keys are looked up one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from harness.connector_support import Quilt
from kvquilt.store import kernels
from kvquilt.testing.sim_shapes import GroupShape

__all__ = ["HitCheck", "brute_force_hit", "visible_keys"]


def visible_keys(store: Any) -> list[set[bytes]]:
    """Per group of the layout, the keys of its visible pages."""
    out: list[set[bytes]] = []
    views = store._built.views
    for index in range(len(store.layout.groups)):
        if index not in views:
            out.append(set())
            continue
        slots = views[index].slots
        mine = (slots.state == kernels.RESIDENT) & (slots.group == index)
        out.append({key.tobytes() for key in np.asarray(slots.keys)[mine]})
    return out


def _needed_tokens(shape: GroupShape, length: int) -> Sequence[int]:
    if shape.kind == "recurrent":
        return (length - 1,)
    return range(max(0, shape.first_read(length) - shape.extra_tokens), length)


def brute_force_hit(
    shapes: Sequence[GroupShape],
    peeks: set[int],
    unit: int,
    hashes: Sequence[bytes],
    visible: Sequence[set[bytes]],
    num_tokens: int,
    local_tokens: int,
    ignored: Set[int] = frozenset(),
) -> int:
    """The longest length above `local_tokens` that every group can resume from; else `local_tokens`.

    hashes: the request's, one for each `unit` tokens. peeks: groups that also need the next block.
    ignored: groups that are not asked.
    """

    def present(index: int, block: int) -> bool:
        size = shapes[index].tokens_per_block
        last = (block + 1) * size // unit - 1
        return (block + 1) * size <= local_tokens or (last < len(hashes) and hashes[last] in visible[index])

    cacheable = [i for i, shape in enumerate(shapes) if shape.cacheable]
    asked = [i for i in cacheable if i not in ignored]
    held = {
        i: [present(i, token // shapes[i].tokens_per_block) for token in range(num_tokens)] for i in asked
    }
    lattice = math.lcm(*(shapes[i].tokens_per_block for i in cacheable))
    for length in range((num_tokens - 1) // lattice * lattice, local_tokens, -lattice):
        if all(
            all(held[i][token] for token in _needed_tokens(shapes[i], length))
            and (i not in peeks or present(i, length // shapes[i].tokens_per_block))
            for i in asked
        ):
            return length
    return local_tokens


class HitCheck:
    """Compares each look-up that an engine's connector resolves with brute force, from now on.

    num_checked, num_hits, num_without: look-ups, those with a hit, those without a drafter's pages.
    wrong: what differed; a test has to look at it.
    """

    def __init__(self, quilt: Quilt, shapes: Sequence[GroupShape]) -> None:
        self.num_checked = self.num_hits = self.num_without = 0
        self.wrong: list[str] = []
        self._quilt = quilt
        self._shapes = shapes
        coordinator = quilt.h.scheduler.kv_cache_manager.coordinator
        self._peeks = {i for i in coordinator.eagle_group_ids if shapes[i].kind != "recurrent"}
        self._drafters = {i for i, shape in enumerate(shapes) if shape.drafter is not None}
        self._look = quilt.side.finder._look
        quilt.side.finder._look = self._checked
        self._match = quilt.side.match
        quilt.side.match = self._answered

    def expected(self, request: Any, local_tokens: int) -> int:
        """The right answer for a request at this moment."""
        visible = visible_keys(self._quilt.store)
        unit = self._quilt.h.config.hash_block_size

        def hit(ignored: Set[int]) -> int:
            asked = (self._shapes, self._peeks, unit, request.block_hashes, visible)
            return brute_force_hit(*asked, request.num_tokens, local_tokens, ignored)

        may_lack = self._drafters and self._quilt.side.options.draft == "best_effort"
        return max(hit(frozenset()), hit(self._drafters) if may_lack else 0)

    def _checked(self, state: Any, local_tokens: int) -> Any:
        found, without = self._look(state, local_tokens)
        expected = self.expected(state.request, local_tokens)
        if max(found.tokens, local_tokens) != expected:
            # Kept, not raised: the connector survives whatever its hooks raise.
            self.wrong.append(
                f"{state.request.request_id}: hit of {found.tokens} tokens with {local_tokens} local ones, "
                f"brute force says {expected}"
            )
        self.num_checked += 1
        self.num_hits += found.tokens > local_tokens
        self.num_without += bool(without)
        return found, without

    def _answered(self, request: Any, local_tokens: int) -> Any:
        """What the engine is told is what was found, or nothing."""
        tokens, asynchronous = self._match(request, local_tokens)
        found = self._quilt.side._states[request.request_id].found if tokens else None
        if found is not None and (tokens != found.tokens - local_tokens or not asynchronous):
            self.wrong.append(f"{request.request_id}: the engine is told {tokens}, found are {found.tokens}")
        return tokens, asynchronous
