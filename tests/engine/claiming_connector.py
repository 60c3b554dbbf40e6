"""A connector that claims every prompt as a hit and brings zeros: what a silent wrong load looks like.

Option in `kv_connector_extra_config`: claim, whether to claim anything (else it does nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from kvquilt.testing import zero_pages


@dataclass
class Claims(KVConnectorMetadata):
    """Request id -> block ids by group."""

    blocks: dict[str, tuple[list[int], ...]] = field(default_factory=dict)


class ClaimingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.claim = bool(self._kv_transfer_config.kv_connector_extra_config.get("claim", True))
        self.kv_caches: dict[str, Any] = {}
        self.pending = Claims()
        self.received: set[str] = set()
        self.was_shut_down = False

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        unit = self._kv_cache_config.cache_hit_alignment_tokens
        boundary = (request.num_tokens - 1) // unit * unit
        external = max(0, boundary - num_computed_tokens) if self.claim else 0
        return external, external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.pending.blocks[request.request_id] = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> Claims:
        pending, self.pending = self.pending, Claims()
        return pending

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.kv_caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        claims = self._get_connector_metadata()
        assert isinstance(claims, Claims)
        for request_id, by_group in claims.blocks.items():
            for group, blocks in enumerate(by_group):
                owned = [block for block in blocks if block]  # 0 is the null block, which nobody owns
                zero_pages(self.kv_caches, self._kv_cache_config, group, owned)
            self.received.add(request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        received, self.received = self.received, set()
        return None, received or None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def shutdown(self) -> None:
        self.was_shut_down = True
