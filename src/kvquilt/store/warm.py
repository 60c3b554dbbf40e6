"""Compile the kernels before the first look-up needs them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.store import kernels
from kvquilt.store.chain import Chain
from kvquilt.store.records import Want
from kvquilt.store.store import Store

__all__ = ["warm_up"]


def warm_up() -> None:
    """Run every kernel once on a store of a few pages.

    Takes seconds where the machine code is not on disk yet, and well under a second after
    that. Safe to call from any thread, any number of times.
    """
    full = CacheGroup("full", kind="full", tokens_per_block=2, page_bytes=1)
    window = CacheGroup("window", kind="sliding", tokens_per_block=1, window=2, page_bytes=1)
    layout = CacheLayout([full, window])
    plan = SimpleNamespace(
        slots={"full": 3, "window": 3},
        slot_bytes={"full": 4096, "window": 4096},
        partition="solved",
        num_ranks=1,
    )
    now = [0.0]
    with Store(layout, plan, prefault=False, clock=lambda: now[0], ticket_seconds=1.0) as store:
        chain = Chain(layout, [bytes([i]) * 32 for i in range(8)])
        other = Chain(layout, [bytes([i + 100]) * 32 for i in range(8)])
        _save(store, chain)
        store.missing(chain, 0, np.arange(4))
        found = store.lookup("warm", chain, 8)
        store.touch(chain, 6)
        _save(store, other)
        if found.lease_id is not None:
            store.release(found.lease_id, "warm")
        _save(store, other)
        store.lookup("warm", other, 9, local_tokens=2)
        store.gather("warm", other, 4)
        store.oldest(0, 1, before=store.oldest_until(0, 1) + 1)
        store.release_owner("warm")
        store.withdraw(other, 0, np.arange(1))
        store.reset()
        store.reserve("warm", [Want(chain, 0, np.arange(2))])
        now[0] = 2.0
        store.expire()
        store.release_owner("warm")
        store.audit()
        # What a well-behaved store of this size may not reach.
        view = store._built.views[1]
        view.all_visible(chain, np.arange(2), np.arange(1, 3), 0)
        nothing = np.zeros(0, dtype=np.int64)
        keys = np.zeros((0, 4), dtype=np.uint64)
        kernels.adopt(
            view.slots, nothing, keys, nothing.astype(np.int32), keys.reshape(0, 1, 4)[:, :0], nothing
        )
        kernels.probe(view.slots, 1, chain.hashes, 1, 0, 4, np.empty(4, dtype=np.int64))


def _save(store: Store, chain: Chain) -> None:
    ticket = store.reserve("warm", [Want(chain, 0, np.arange(3)), Want(chain, 1, np.arange(3, 6))])
    if ticket.ticket_id is not None:
        store.commit(ticket.ticket_id, "warm")
