"""A connector that keeps blocks in a dict of this process: honest, or lying on request.

It exists to test the harness: an honest connector must pass it with real hits, and every lie must
be caught. Options in `kv_connector_extra_config`:

store: name of the dict (a new harness on the same name finds what the last one saved).
sync: load before the forward pass instead of asynchronously.
lie: None, or one of LIES. lie_group: tell lies about loads only for the group with this index.
fail_loads: this many loads report failure (after copying half of their blocks).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import MambaSpec

from kvquilt.hits import longest_hit
from kvquilt.layout import CacheGroup, CacheLayout, GroupKind, needed_blocks

LIES = (
    "wrong bytes",  # another block's bytes
    "no bytes",  # reports a load that it never did
    "hit too long",  # promises one boundary more than it has
    "wrong block",  # loads into the neighbour of the destination
    "null block",  # also writes to the null block
    "late load",  # reports before it copies
    "wrong rank",  # loads what rank 0 saved
    "early save",  # saves blocks that are not full yet
    "late save",  # reads a block a step after its request may have lost it
    "wrong key",  # names a block by the hash before the one that closes it
    "no peek",  # offers a draft group's blocks without the one that starts at the boundary
    "blocks kept",  # never gives the blocks of a finished request back
    "never reports",  # loads, and says nothing
)

Key = tuple[int, bytes]
STORES: defaultdict[str, dict[Key, dict[int, list[torch.Tensor]]]] = defaultdict(dict)


@dataclass
class Copy:
    group: int
    block: int
    key: Key


@dataclass
class Metadata(KVConnectorMetadata):
    loads: dict[str, list[Copy]] = field(default_factory=dict)
    saves: list[Copy] = field(default_factory=list)


def kind_of(spec: Any) -> GroupKind:
    if isinstance(spec, MambaSpec):
        return "recurrent"
    window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
    return "sliding" if window else "chunked" if chunk else "full"


def cache_layout(config: Any, *, peek: bool = True) -> CacheLayout:
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        chunk = getattr(spec, "attention_chunk_size", None)
        groups.append(
            CacheGroup(
                str(index),
                kind=kind_of(spec),
                tokens_per_block=spec.block_size,
                page_bytes=spec.page_size_bytes,
                window=window,
                chunk=chunk,
                draft=group.is_eagle_group and peek,
            )
        )
    return CacheLayout(groups, config.hash_block_size)


class DictConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self.options = options
        self.lie = options.get("lie")
        assert self.lie is None or self.lie in LIES
        self.store = STORES[options["store"]]
        self.layout = cache_layout(kv_cache_config, peek=self.lie != "no peek")
        self.rank = vllm_config.parallel_config.rank
        self.num_ranks = vllm_config.parallel_config.world_size
        self.shut = False
        self.requests: dict[str, Any] = {}
        self.offered: dict[str, int] = {}
        self.failed: set[str] = set()
        self.meta = Metadata()
        self.pages: list[list[torch.Tensor]] = []
        self.done: set[str] = set()
        self.failures: set[str] = set()
        self.fail_loads = int(options.get("fail_loads", 0))
        self.late_loads: list[list[Copy]] = []
        self.late_saves: list[Copy] = []

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.failed.discard(request.request_id)

    def key(self, request: Any, group: int, index: int) -> Key | None:
        span = self.layout.hashes_per_block(self.layout.groups[group])
        at = (index + 1) * span - 1 - (self.lie == "wrong key")
        return (group, request.block_hashes[max(at, 0)]) if at < len(request.block_hashes) else None

    def has(self, key: Key | None) -> bool:
        return key is not None and len(self.store.get(key, ())) == self.num_ranks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self.failed:
            return 0, False
        presence = {}
        for index, group in enumerate(self.layout.groups):
            blocks = range(request.num_tokens // group.tokens_per_block)
            presence[group.name] = {i for i in blocks if self.has(self.key(request, index, i))}
        hit = longest_hit(self.layout, presence, request.num_tokens, local_tokens=num_computed_tokens).tokens
        if self.lie == "hit too long" and hit:
            hit = min(hit + self.layout.lattice_tokens, self.layout.max_boundary(request.num_tokens))
        external = max(0, hit - num_computed_tokens)
        self.offered[request.request_id] = num_computed_tokens
        return external, external > 0 and not self.options.get("sync")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        local = self.offered[request.request_id]
        tables = blocks.get_block_ids()
        copies = []
        for index, group in enumerate(self.layout.groups):
            lo, hi = needed_blocks(group, local + num_external_tokens)
            for i in range(max(int(lo), local // group.tokens_per_block), int(hi)):
                key = self.key(request, index, i)
                assert key is not None
                copies.append(Copy(index, tables[index][i], key))
        self.meta.loads[request.request_id] = copies

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        state = scheduler_output.kv_connector_block_state
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            tables = state.get_block_ids(name)
            self.meta.saves += self.new_saves(request, tables, request.num_computed_tokens + count)
        for name, states in state.boundary_state_offloads.items():
            self.meta.saves += self.new_states(self.requests[name], states)
        meta, self.meta = self.meta, Metadata()
        return meta

    def new_saves(self, request: Any, tables: tuple[list[int], ...], num_tokens: int) -> Iterable[Copy]:
        pending = {copy.key for copy in self.meta.saves}
        for index, group in enumerate(self.layout.groups):
            if group.kind == "recurrent":
                continue
            end = num_tokens // group.tokens_per_block
            if self.lie == "early save":
                end += 1
            for i, block in enumerate(tables[index][:end]):
                key = self.key(request, index, i)
                if block and key is not None and key not in pending and not self.has(key):
                    pending.add(key)
                    yield Copy(index, block, key)

    def new_states(self, request: Any, states: list[tuple[int, int, int]]) -> Iterable[Copy]:
        for group, block, tokens in states:
            index, rest = divmod(tokens, self.layout.groups[group].tokens_per_block)
            key = self.key(request, group, index - 1)
            if not rest and key is not None and not self.has(key):
                yield Copy(group, block, key)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del self.requests[request.request_id]
        return self.lie == "blocks kept", None

    def update_connector_output(self, connector_output: Any) -> None:
        self.failed |= connector_output.failed_recving

    def reset_cache(self) -> bool:
        self.store.clear()
        return True

    def shutdown(self) -> None:
        self.shut = True

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        self.pages = [[kv_caches[name] for name in group.layer_names] for group in groups]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        late, self.late_loads = self.late_loads, []
        for copies in late:
            self.load(copies)
        for name, copies in self._get_connector_metadata().loads.items():
            if not self.options.get("sync"):
                self.done.add(name)
            if self.fail_loads:
                self.fail_loads -= 1
                self.failures.add(name)
                self.load(copies[: len(copies) // 2])
            elif self.lie == "late load":
                self.late_loads.append(copies)
            else:
                self.load(copies)

    def load(self, copies: list[Copy]) -> None:
        only = self.options.get("lie_group")
        for copy in copies:
            lie = self.lie if only is None or only == copy.group else None
            saved = self.store.get(copy.key)
            if saved is None or lie == "no bytes":  # None only after a promise that was a lie
                continue
            if lie == "wrong bytes":
                same_group = [pages for key, pages in self.store.items() if key[0] == copy.group]
                saved = next(pages for pages in same_group if pages is not saved)
            block = copy.block + (lie == "wrong block")
            rank = 0 if lie == "wrong rank" else self.rank
            for pages, data in zip(self.pages[copy.group], saved[rank], strict=True):
                pages[block].copy_(data)
                if lie == "null block":
                    pages[0].copy_(data)

    def wait_for_save(self) -> None:
        saves = self._get_connector_metadata().saves
        if self.lie == "late save":
            saves, self.late_saves = self.late_saves, saves
        for copy in saves:
            data = [pages[copy.block].clone() for pages in self.pages[copy.group]]
            self.store.setdefault(copy.key, {})[self.rank] = data

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        done, self.done = self.done, set()
        failures, self.failures = self.failures, set()
        if self.lie == "never reports":
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failures)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass
