"""A look-up finds exactly what `longest_hit` says of the same pages, on random layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquilt.hits import longest_hit
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain, lookup
from unit.store.store_support import digests, make_store, want


@st.composite
def groups(draw: st.DrawFn, name: str) -> CacheGroup:
    kind = draw(st.sampled_from(["full", "full", "sliding", "sliding", "chunked", "recurrent", "scratch"]))
    facts: dict[str, object] = {}
    if kind == "sliding":
        facts = {"window": draw(st.integers(1, 9)), "extra_tokens": draw(st.integers(0, 3))}
    if kind == "chunked":
        facts["chunk"] = draw(st.integers(1, 9))
    if kind in ("full", "sliding", "chunked"):
        facts["draft"] = draw(st.integers(0, 3)) == 0
    tokens = draw(st.sampled_from([1, 2, 2, 3, 4]))
    return CacheGroup(
        name, kind=kind, tokens_per_block=tokens, page_bytes=draw(st.sampled_from([0, 1, 1, 1])), **facts
    )  # type: ignore[arg-type]


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    made = [draw(groups(f"g{i}")) for i in range(draw(st.integers(1, 4)))]
    if not any(g.cacheable for g in made):
        made.append(CacheGroup("last", kind="full", tokens_per_block=2, page_bytes=1))
    return CacheLayout(made, tokens_per_hash=1)


@pytest.mark.parametrize("stretch", [1, 128])
@given(layout=layouts(), data=st.data())
def test_lookup_equals_longest_hit(stretch: int, layout: CacheLayout, data: st.DataObject) -> None:
    num_hashes = data.draw(st.integers(0, 40), label="hashes")
    num_tokens = data.draw(st.integers(0, 44), label="tokens")
    local = data.draw(st.one_of(st.just(0), st.integers(0, 44)), label="local")
    ignore = [g.name for g in layout.groups if g.draft] if data.draw(st.booleans(), label="ignore") else []
    chain = Chain(layout, digests("x" * num_hashes))
    with pytest.MonkeyPatch.context() as patch, make_store(layout, 64) as store:
        patch.setattr(lookup, "_FIRST_STRETCH", stretch)
        held: dict[str, set[int]] = {}
        wants = []
        for index, group in enumerate(layout.groups):
            if store.arena_of[index] >= 0:
                # Mostly there, so that long hits happen and single holes decide.
                size = chain.num_blocks(index)
                holes = data.draw(st.sets(st.integers(0, max(0, size - 1)), max_size=3), label=group.name)
                held[group.name] = set(range(size)) - holes
                wants.append(want(chain, index, sorted(held[group.name])))
        ticket = store.reserve("w", wants)
        if ticket.ticket_id is not None:
            store.commit(ticket.ticket_id, "w")
        found = store.lookup("r", chain, num_tokens, local_tokens=local, ignore=ignore)
        expected = longest_hit(layout, held, num_tokens, local_tokens=local, ignore=ignore)
        assert found.tokens == expected.tokens
        assert found.limited_by == limiting(layout, held, num_tokens, local, ignore, found.tokens)
        again = store.lease_at("r", chain, found.tokens, local_tokens=local, ignore=ignore)
        assert again is not None
        assert [(p.group, p.first_block, p.slots.tolist()) for p in again.pages] == [
            (p.group, p.first_block, p.slots.tolist()) for p in found.pages
        ]
        for lease_id in {found.lease_id, again.lease_id} - {None}:
            store.release(lease_id, "r")  # type: ignore[arg-type]
        assert store.audit().arenas == [] or max(arena.leased for arena in store.audit().arenas) == 0


def limiting(
    layout: CacheLayout, held: dict[str, set[int]], num_tokens: int, local: int, ignore: list[str], hit: int
) -> str | None:
    """The dense group that ends first if the hit reaches its end, else what limits the hit below it."""
    if hit == layout.max_boundary(num_tokens):
        return None
    reach = {}
    for group in layout.cacheable_groups:
        if group.dense and group.name not in ignore:
            others = [g.name for g in layout.groups if g.name != group.name]
            reach[group.name] = longest_hit(
                layout, held, num_tokens, local_tokens=local, ignore=others
            ).tokens
    dense = min(reach.values(), default=layout.max_boundary(num_tokens))
    if hit == dense:
        return min(reach, key=lambda name: reach[name])
    return longest_hit(layout, held, dense + 1, local_tokens=local, ignore=ignore).limited_by


def test_groups_past_the_dense_hit_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 12, by counting the blocks that the index is asked for."""
    full = CacheGroup("full", kind="full", tokens_per_block=2, page_bytes=1)
    window = CacheGroup("win", kind="sliding", tokens_per_block=1, window=3, page_bytes=1)
    layout = CacheLayout([window, full])
    chain = Chain(layout, digests("x" * 20))
    asked: list[tuple[int, int]] = []
    with make_store(layout, 30) as store:
        view = type(store._built.views[0])
        probe = view.probe
        monkeypatch.setattr(
            view, "probe", lambda self, c, lo, hi: asked.append((lo, hi)) or probe(self, c, lo, hi)
        )
        ticket = store.reserve("w", [want(chain, 0, range(20)), want(chain, 1, range(1, 10))])
        store.commit(ticket.ticket_id, "w")  # type: ignore[arg-type]
        assert store.lookup("r", chain, 21).tokens == 0
        assert asked == []
        save = store.reserve("w", [want(chain, 1, [0])])
        store.commit(save.ticket_id, "w")  # type: ignore[arg-type]
        store.withdraw(chain, 1, np.array([5]))
        assert store.lookup("r", chain, 21).tokens == 10
        assert asked == [(8, 10)]
