"""KV events: what the store holds, told in the engine's own events, so that a router can index it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvquilt.layout import CacheLayout
from kvquilt.store import Chain, Change

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["KVEvents", "events_wanted"]


def events_wanted(vllm_config: VllmConfig) -> bool:
    """Does the engine publish KV events? Without them nothing of this costs anything."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


@dataclass(frozen=True)
class _Group:
    index: int
    tokens_per_block: int
    kind: str
    window: int | None


class KVEvents:
    """Turns the store's changes into the engine's events, with medium "CPU".

    A stored event has one run of consecutive blocks of one group: their hashes, all their tokens,
    and the hash that closes the token before them, which may name a block that is not stored
    itself (a window's, a state's). A block's hash covers the whole prefix, as the engine's do, so
    equal hashes of two groups are two blocks. All groups take part, drafters too.

    A reset is told as removals: the engine's own "all cleared" has no medium, and would wipe what a
    router knows of the engine's blocks.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, layout: CacheLayout) -> None:
        self._groups = [
            _Group(
                index,
                layout.groups[index].tokens_per_block,
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        self._hash_bytes = 0

    @staticmethod
    def remember(chain: Chain, request: Request) -> None:
        """Tokens and adapter of the chain's pages: they may become visible after the request's end."""
        chain.source = request

    def translate(self, changes: Iterable[Change]) -> list[KVCacheEvent]:
        """The events for these changes, in their order. Chains without a request give none."""
        events: list[KVCacheEvent] = []
        for change in changes:
            group = self._groups[change.group]
            if change.chain is None or change.blocks is None:
                events.append(
                    BlockRemoved(
                        block_hashes=self._hashes(change.keys), medium=MEDIUM_CPU, group_idx=group.index
                    )
                )
                continue
            self._hash_bytes = change.chain.hash_bytes
            request: Any = change.chain.source
            if request is None:
                continue
            ends = np.flatnonzero(np.diff(change.blocks) != 1) + 1
            runs = np.split(change.blocks, ends)
            events += [self._stored(group, change.chain, request, int(r[0]), int(r[-1]) + 1) for r in runs]
        return events

    def _stored(self, group: _Group, chain: Chain, request: Request, first: int, last: int) -> BlockStored:
        """The event of blocks first..last-1."""
        tokens = group.tokens_per_block
        lora = request.lora_request
        extra = [
            generate_block_hash_extra_keys(request, i * tokens, (i + 1) * tokens, 0)[0]
            for i in range(first, last)
        ]
        return BlockStored(
            block_hashes=self._hashes(chain.keys(group.index)[first:last]),
            parent_block_hash=_external(chain.hash_at(first * tokens)) if first else None,
            token_ids=list(request.all_token_ids[first * tokens : last * tokens]),
            block_size=tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            session_id=request.session_id,
        )

    def _hashes(self, keys: NDArray[np.uint64]) -> list[bytes | int]:
        """The engine's hashes: keys without their padding, in the form that its events have."""
        return [_external(key.tobytes()[: self._hash_bytes]) for key in keys]


def _external(hash_bytes: bytes) -> bytes | int:
    external: bytes | int = maybe_convert_block_hash(BlockHash(hash_bytes))
    return external
