"""Another connector beside kvquilt under the engine's MultiConnector: it claims whole prompts and ends
its loads only when told to. It never brings a byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

__all__ = ["SIBLING", "ClaimingSibling", "Wishes"]


@dataclass
class Wishes:
    """What the sibling is to do: claim prompts; end its loads, well or failed."""

    claim: bool = False
    end: bool = False
    fail: bool = False


SIBLING = {
    "kv_connector": "ClaimingSibling",
    "kv_connector_module_path": "harness.sibling_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {},
}


@dataclass
class Loads(KVConnectorMetadata):
    requests: list[str] = field(default_factory=list)


class ClaimingSibling(KVConnectorBase_V1, SupportsHMA):
    wishes = Wishes()
    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._new: list[str] = []
        self._loading: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self.wishes.claim:
            return 0, False
        unit = self._kv_cache_config.cache_hit_alignment_tokens
        tokens = max(0, (request.num_tokens - 1) // unit * unit - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._new.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        new, self._new = self._new, []
        return Loads(new)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        self._loading |= set(metadata.requests)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not self.wishes.end:
            return KVConnectorTransferResults()
        ended, self._loading = self._loading, set()
        failed = set(ended) if self.wishes.fail else set()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
