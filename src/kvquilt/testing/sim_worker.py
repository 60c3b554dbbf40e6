"""One rank's worker: the simulated model, and the connector's hooks in the engine's order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from kvquilt.testing.fake_device import FakeDevice, Span
from kvquilt.testing.sim_config import EngineConfig
from kvquilt.testing.sim_fingerprint import TokenHashes
from kvquilt.testing.sim_memory import SimMemory
from kvquilt.testing.sim_model import SimModel, SimRequest
from kvquilt.testing.sim_shapes import VOCAB_SIZE, GroupShape, HarnessError

__all__ = ["RunnerKind", "SimWorker"]

RunnerKind = Literal["v1", "v1-deferred", "v2"]
"""Whose order of hooks: "v1" and "v2" are the engine's model runners. "v1-deferred" is v1 with a
drafter, and what it is then: wait_for_save comes after the results were asked for."""


class SimWorker:
    """Executes scheduler outputs as a model runner does, on simulated memory.

    connector: made by the engine's factory, worker role; None without a connector.
    device: a `FakeDevice` on whose stream the model runs; None computes at once. errors: what went
    wrong there.
    salt_of: the salt of a request; the engine's workers do not get it, but KV made under another
    salt (or adapter) must never be taken for this one's.
    """

    def __init__(
        self,
        config: EngineConfig,
        shapes: Sequence[GroupShape],
        rank: int,
        runner: RunnerKind,
        salt_of: Callable[[str], str],
    ) -> None:
        self.rank = rank
        self.runner = runner
        self.vllm_config, kv_cache = config.for_rank(rank)
        self._num_draft_tokens = config.num_draft_tokens if config.speculation is not None else 0
        self.memory = SimMemory(kv_cache, shapes, rank)
        self.model = SimModel(self.memory, shapes, VOCAB_SIZE)
        self.connector: Any = None
        self._salt_of = salt_of
        self._sampling: list[str] = []
        self._drafts: dict[str, list[int]] = {}
        self._uncommitted: list[Callable[[], None]] = []
        self.device: FakeDevice | None = None
        self.errors: list[Exception] = []
        if self.vllm_config.kv_transfer_config is not None:
            from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
            from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

            self.connector = KVConnectorFactory.create_connector(
                self.vllm_config, KVConnectorRole.WORKER, kv_cache
            )

    def register(self) -> None:
        """Hand the memory to the connector, as the engine does once after allocating it."""
        if self.connector is None:
            return
        self.connector.register_kv_caches(self.memory.kv_caches)
        if self.runner == "v2":
            from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks

            self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def execute(self, scheduled: Any, recycle: Callable[[SimMemory], None]) -> Any:
        """Run one step; returns the ModelRunnerOutput.

        scheduled: the SchedulerOutput. recycle: overwrites the blocks that changed hands; called
        after `handle_preemptions`, which is a connector's last chance to read them.
        """
        if self.connector is not None:
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        self.launch("recycle", lambda: recycle(self.memory))
        zero, copies = (
            list(scheduled.new_block_ids_to_zero or ()),
            list(scheduled.kv_cache_block_copies or ()),
        )
        self.launch("prepare", lambda: self.memory.prepare(zero, copies))
        starts = self._update_requests(scheduled)
        if self.connector is None:
            sampled = self._forward(starts, scheduled)
            self._commit_states()
            return self._output(sampled, None)
        output = self._connector_output()
        with self._hooks(scheduled, output):
            sampled = self._forward(starts, scheduled)
            if self.runner != "v1-deferred":
                self._commit_states()
        return self._output(sampled, output)

    @contextmanager
    def _hooks(self, scheduled: Any, output: Any) -> Iterator[None]:
        """The connector's life in a step. Unlike the engine's, it stops at the first exception."""
        from vllm.forward_context import get_forward_context, set_forward_context

        connector = self.connector
        with set_forward_context(None, self.vllm_config):
            connector.bind_connector_metadata(scheduled.kv_connector_metadata)
            # Loads that this step reads come before the forward pass, others after its launch.
            if scheduled.has_sync_kv_loads:
                connector.start_load_kv(get_forward_context())
            yield
            if self.runner == "v2":
                connector.finish_forward()
            if not scheduled.has_sync_kv_loads:
                connector.start_load_kv(get_forward_context())
            if self.runner != "v1-deferred":
                connector.wait_for_save()
            results = connector.get_transfer_results(scheduled.finished_req_ids)
            output.finished_sending = results.finished_sending or None
            output.finished_recving = results.finished_recving or None
            output.failed_recving = results.failed_recving
            output.invalid_block_ids = connector.get_block_ids_with_load_errors()
            output.kv_connector_stats = connector.get_kv_connector_stats()
            output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
            output.kv_connector_worker_meta = connector.build_connector_worker_meta()
            if self.runner == "v1-deferred":
                self._commit_states()
                connector.wait_for_save()
            connector.clear_connector_metadata()

    def launch(self, name: str, work: Callable[[], None], spans: Sequence[Span] = ()) -> None:
        """Do some work of the model's, or give it to the device."""
        if self.device is None:
            work()
            return

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised by the engine, not by whoever lets time pass
                self.errors.append(error)

        self.device.work(self.device.current_stream(), name, [run], spans)

    def fence(self) -> Callable[[], None]:
        """Wait for what has been launched so far."""
        if self.device is None:
            return lambda: None
        return functools.partial(self.device.synchronize, self.device.record(self.device.current_stream()))

    def drafts(self) -> dict[str, list[int]]:
        """Drafts for the requests of the last step that sampled."""
        return {name: list(self._drafts[name]) for name in self._sampling}

    def _forward(self, starts: dict[str, tuple[int, int]], scheduled: Any) -> dict[str, list[int]]:
        self._sampling = []
        if not starts:
            return {}
        sampled = self.model.plan(starts, self._to_verify(scheduled))
        self._sampling = [name for name, tokens in sampled.items() if tokens]
        if count := self._num_draft_tokens:
            self._drafts |= {name: self.model.propose(name, count) for name in self._sampling}
        work = self.model.take_work()
        for layer in self.memory.layers:
            if self.connector is not None:
                self.connector.wait_for_layer_load(layer.name)
            spans = [Span(*span) for span in self.model.touched(layer, work)] if self.device else []
            self.launch(layer.name, functools.partial(self.model.forward, layer, work), spans)
            if any(state.after for item in work if (state := item.states.get(layer.group))):
                commit = functools.partial(self.model.commit_states, layer, work)
                self._uncommitted.append(
                    functools.partial(self.launch, f"{layer.name} states", commit, spans)
                )
            if self.connector is not None:
                self.connector.save_kv_layer(layer.name, layer.tensor, None)
        return sampled

    def _to_verify(self, scheduled: Any) -> dict[str, list[int]]:
        """Drafts of this step. With two steps in flight the scheduler knows no more than their number:
        the worker has kept them."""
        drafts: dict[str, list[int]] = scheduled.scheduled_spec_decode_tokens
        if not self.vllm_config.scheduler_config.async_scheduling:
            return drafts
        return {name: self._drafts.get(name, unknown)[: len(unknown)] for name, unknown in drafts.items()}

    def _commit_states(self) -> None:
        launches, self._uncommitted = self._uncommitted, []
        for launch in launches:
            launch()

    def _update_requests(self, scheduled: Any) -> dict[str, tuple[int, int]]:
        """Bring the worker's requests up to date; returns request -> (computed, to compute)."""
        for request_id in scheduled.finished_req_ids:
            self.model.requests.pop(request_id, None)
            self._drafts.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.model.requests[new.req_id] = SimRequest(
                new.req_id,
                TokenHashes(tokens, self._salt_of(new.req_id)),
                len(new.prompt_token_ids),
                tuple(list(ids) for ids in new.block_ids),
                new.num_computed_tokens,
            )
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self._update_cached(cached, index)
            starts[request_id] = self._start(cached, index)
        return {name: (starts[name], count) for name, count in scheduled.num_scheduled_tokens.items()}

    def _update_cached(self, cached: Any, index: int) -> None:
        request_id = cached.req_ids[index]
        request = self.model.requests[request_id]
        if request_id in cached.all_token_ids:
            request.hashes = TokenHashes(cached.all_token_ids[request_id], request.hashes.salt)
        # Tokens that the scheduler has dropped since.
        request.hashes.truncate(request.num_prompt_tokens + cached.num_output_tokens[index])
        new_ids = cached.new_block_ids[index]
        if request_id in cached.resumed_req_ids:
            request.tables = tuple(list(ids) for ids in new_ids)
            request.first = cached.num_computed_tokens[index]
            request.drafts = 0
            request.running.clear()
            self._drafts.pop(request_id, None)
        elif new_ids is not None:
            for table, ids in zip(request.tables, new_ids, strict=True):
                table.extend(ids)

    def _start(self, cached: Any, index: int) -> int:
        """Where computing goes on. A scheduler that plans ahead counts drafts as computed which the
        worker has rejected since."""
        told: int = cached.num_computed_tokens[index]
        request = self.model.requests[cached.req_ids[index]]
        if not request.drafts:
            return told
        if not 0 <= told - request.computed <= request.drafts:
            raise HarnessError(f"request {request.id}: told {told} computed tokens, not {request.computed}")
        return request.computed

    @staticmethod
    def _connector_output() -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        return KVConnectorOutput()

    @staticmethod
    def _output(sampled: dict[str, list[int]], connector_output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=connector_output,
        )
