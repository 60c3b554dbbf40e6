"""What a router makes of the KV events that it gets from the engine's own publisher."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from kvquilt.store import kernels

__all__ = ["Router", "in_store", "mirror", "ours"]

DEADLINE_SECONDS = 20.0


class Router:
    """A subscriber that joins late: it asks the publisher's replay socket for all batches."""

    def __init__(self, folder: Path) -> None:
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        }

    def replay(self) -> list[Any]:
        """All events published so far."""
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect(self.config["replay_endpoint"])
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            events: list[Any] = []
            while True:
                assert socket.poll(DEADLINE_SECONDS * 1000), "the publisher does not answer"
                _, number, payload = socket.recv_multipart()[-3:]
                if int.from_bytes(number, "big", signed=True) < 0:
                    return events
                events += msgspec.msgpack.decode(payload, type=KVEventBatch).events

    def wait_for(self, expected: set[tuple[int, bytes]]) -> list[Any]:
        """Replay until the events say just this of medium "CPU"; the publisher has a thread of its own."""
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            events = self.replay()
            known = mirror(events)
            if known == expected:
                return events
            assert time.monotonic() < end, (
                f"{len(known - expected)} too many, {len(expected - known)} missing"
            )
            time.sleep(0.02)


def mirror(events: list[Any], medium: str = "CPU") -> set[tuple[int, bytes]]:
    """What somebody who applies the events holds; nothing may come or go twice."""
    known: set[tuple[int, bytes]] = set()
    for event in events:
        if getattr(event, "medium", None) != medium:
            continue
        names = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        assert len(names) == len(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not names & known
            known |= names
        else:
            assert isinstance(event, BlockRemoved)
            assert names <= known
            known -= names
    return known


def ours(events: list[Any]) -> list[Any]:
    """What was told of pages that became visible in the store."""
    return [event for event in events if isinstance(event, BlockStored) and event.medium == "CPU"]


def in_store(store: Any) -> set[tuple[int, bytes]]:
    """(group, hash) of every page that a look-up could find."""
    found: set[tuple[int, bytes]] = set()
    for index, view in store._built.views.items():
        slots = view.slots
        which = np.flatnonzero((slots.state == kernels.RESIDENT) & (slots.group == index))
        found |= {(index, slots.keys[slot].tobytes()) for slot in which}
    return found
