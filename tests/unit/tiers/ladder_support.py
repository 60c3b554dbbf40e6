"""A small RAM store with a tier below it that loads when it is told to, and pages whose bytes name them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import Chain, Store, Want
from kvquilt.tiers import Loaded, Pages, Promoter, RamMemory, TierStats, WriteBack

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
PAGE = 4096


def full(tokens: int = 16, name: str = "full", **more: object) -> CacheGroup:
    return CacheGroup(name, kind="full", tokens_per_block=tokens, page_bytes=PAGE, **more)  # type: ignore[arg-type]


def sliding(tokens: int = 16, window: int = 33, name: str = "win", **more: object) -> CacheGroup:
    return CacheGroup(
        name,
        kind="sliding",
        tokens_per_block=tokens,
        window=window,
        page_bytes=PAGE,
        **more,  # type: ignore[arg-type]
    )


def state(tokens: int = 16, name: str = "state") -> CacheGroup:
    return CacheGroup(name, kind="recurrent", tokens_per_block=tokens, page_bytes=PAGE)


def page_bytes_of(chain: Chain, group: int, block: int) -> bytes:
    """What a page holds in these tests: it follows from its name."""
    key = chain.keys(group)[block].tobytes()
    return hashlib.shake_128(bytes([group]) + key).digest(PAGE)


class SlowTier:
    """Keeps pages by name in a dict. Loads wait for `land`; what is in `lost` turns out to be bad, when
    other bytes stand in its place already."""

    name = "slow"

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.held: dict[tuple[int, bytes], bytes] = {}
        self.lost: set[tuple[int, int]] = set()
        self.waiting: list[tuple[Sequence[Pages], Loaded]] = []
        self.loaded: list[tuple[int, int]] = []
        self.saving: list[Callable[[], None]] = []
        self.on = True
        self.room = 1 << 30

    def put(self, chain: Chain, group: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            key = chain.keys(group)[block].tobytes()
            self.held[group, key] = page_bytes_of(chain, group, block)

    def present(self, chain: Chain, group: int, first: int, last: int) -> BoolArray:
        keys = chain.keys(group)
        return np.asarray(
            [
                self.on and i < len(keys) and (group, keys[i].tobytes()) in self.held
                for i in range(first, last)
            ],
            dtype=np.bool_,
        )

    def save(self, pages: Sequence[Pages], done: Callable[[], None]) -> int:
        count = 0
        for part in pages:
            for block, offset in zip(part.blocks.tolist(), part.offsets.tolist(), strict=True):
                key = part.chain.keys(part.group)[block].tobytes()
                self.held[part.group, key] = bytes(part.memory[offset : offset + PAGE])
                count += 1
        self.saving.append(done)
        return count

    def room_bytes(self) -> int:
        return self.room if self.on else 0

    def load(self, pages: Sequence[Pages], done: Loaded) -> None:
        self.waiting.append((pages, done))

    def land(self) -> None:
        """Let all loads end."""
        waiting, self.waiting = self.waiting, []
        for pages, done in waiting:
            results = []
            for part in pages:
                good = np.zeros(part.blocks.size, dtype=np.bool_)
                for i, (block, offset) in enumerate(
                    zip(part.blocks.tolist(), part.offsets.tolist(), strict=True)
                ):
                    key = part.chain.keys(part.group)[block].tobytes()
                    self.loaded.append((part.group, block))
                    if (part.group, block) in self.lost:
                        self.held.pop((part.group, key), None)
                        part.memory[offset : offset + PAGE] = b"\xee" * PAGE
                        continue
                    page = self.held.get((part.group, key))
                    if page is not None:
                        part.memory[offset : offset + PAGE] = page
                        good[i] = True
                results.append(good)
            done(results)

    def touch(self, chain: Chain, tokens: int) -> None:
        pass

    def withdraw(self, chain: Chain, group: int, blocks: IntArray) -> int:
        gone = 0
        for block in blocks.tolist():
            gone += self.held.pop((group, chain.keys(group)[block].tobytes()), None) is not None
        return gone

    def reset(self) -> bool:
        self.held.clear()
        return True

    def stats(self) -> TierStats:
        return TierStats(self.name, "on", "", [], len(self.waiting), len(self.saving))

    def wait_idle(self, timeout_seconds: float) -> bool:
        return not self.waiting

    def close(self) -> None:
        self.land()


class Ladder:
    """RAM with `slots` of each group, over a `SlowTier`; time stands still until it is told."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        slots: dict[str, int],
        *,
        when: str = "through",
        timeout: float = 30.0,
    ) -> None:
        self.layout = CacheLayout(list(groups))
        self.now = 0.0
        plan = SimpleNamespace(
            slots=slots,
            slot_bytes={group.name: PAGE for group in groups},
            partition="solved",
            num_ranks=1,
        )
        self.store = Store(self.layout, plan, prefault="sync", clock=lambda: self.now)
        self.tier = SlowTier(self.layout)
        self.memory = RamMemory(self.store)
        self.write_back = WriteBack(
            self.store,
            self.tier,
            self.layout,
            self.memory,
            partition="solved",
            when=when,  # type: ignore[arg-type]
        )
        self.promoter = Promoter(
            self.store,
            self.tier,
            self.layout,
            self.memory,
            timeout_seconds=timeout,
            clock=lambda: self.now,
            room_soon=self.write_back.holds_slots,
        )

    def chain(self, seed: int, tokens: int) -> Chain:
        unit = self.layout.tokens_per_hash
        return Chain(
            self.layout, [hashlib.sha256(b"%d %d" % (seed, i)).digest() for i in range(tokens // unit)]
        )

    def save(self, chain: Chain, *wants: tuple[int, Sequence[int]]) -> None:
        """Save blocks of groups to RAM, as the workers do, and tell the write-back."""
        ticket = self.store.reserve(
            "test", [Want(chain, group, np.asarray(blocks)) for group, blocks in wants]
        )
        if ticket.ticket_id is None:
            return
        for grant in ticket.grants:
            group = wants[grant.want][0]
            for block, slot in zip(grant.blocks.tolist(), grant.slots.tolist(), strict=True):
                self.memory.slot(self.store.arena_of[group], slot)[:PAGE] = page_bytes_of(chain, group, block)
        self.write_back.committed(self.store.commit(ticket.ticket_id, "test"))

    def ask(
        self, name: str, chain: Chain, tokens: int, *, local: int = 0, optional: Sequence[str] = ()
    ) -> int | None:
        """What the connector does: host RAM first, then the tier; None: ask again."""
        if self.promoter.waiting(name):
            return None
        found = self.store.lookup("ask", chain, tokens, local_tokens=local)
        if found.lease_id is not None:
            self.store.release(found.lease_id, "ask")
        if found.limited_by is not None and self.promoter.ask(
            name, chain, tokens, local_tokens=local, ram_tokens=found.tokens, optional=optional
        ):
            return None
        return found.tokens

    def hit(self, name: str, chain: Chain, tokens: int, **more: object) -> int:
        """Ask until there is an answer, every load landing at once."""
        for _ in range(100):
            answer = self.ask(name, chain, tokens, **more)  # type: ignore[arg-type]
            if answer is not None:
                return answer
            self.tier.land()
        raise AssertionError("no answer in 100 asks")

    def check_bytes(self, chain: Chain, tokens: int) -> None:
        """Every page that a hit of `tokens` would load holds what its name says."""
        found = self.store.lookup("check", chain, tokens + 1)
        assert found.tokens == tokens
        for part in found.pages:
            arena = self.store.arena_of[part.group]
            for i, slot in enumerate(part.slots.tolist()):
                held = bytes(self.memory.slot(arena, slot)[:PAGE])
                assert held == page_bytes_of(chain, part.group, part.first_block + i)
        if found.lease_id is not None:
            self.store.release(found.lease_id, "check")

    def written(self) -> None:
        """All writes have ended."""
        saving, self.tier.saving = self.tier.saving, []
        for done in saving:
            done()

    def end(self) -> None:
        """Everything is given back."""
        self.tier.land()
        self.written()
        self.promoter.close()
        audit = self.store.audit()
        assert (audit.leases, audit.tickets) == (0, 0)
        self.store.close()
