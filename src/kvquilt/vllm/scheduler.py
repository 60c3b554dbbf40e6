"""The scheduler side: look-ups, and what the workers are to copy in each engine step."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvquilt.config import Options
from kvquilt.errors import ConfigError
from kvquilt.layout.namespace import NamespaceFactors
from kvquilt.retention import prompt_boundaries
from kvquilt.sizing import plan_slots
from kvquilt.store import Store, check_memory, warm_up
from kvquilt.vllm.below import Below, DataParallelRank
from kvquilt.vllm.divergent import DivergentHits
from kvquilt.vllm.events import KVEvents
from kvquilt.vllm.failures import FailedLoads
from kvquilt.vllm.handover import PoolServer, layout_fingerprint
from kvquilt.vllm.layout import EngineGroups
from kvquilt.vllm.loads import LoadBook
from kvquilt.vllm.lookups import Finder
from kvquilt.vllm.metadata import StepPlan, decode_reports, encode_plan
from kvquilt.vllm.metrics import DiskLevels, KVQuiltStats, Levels, Meter
from kvquilt.vllm.pins import PinBook
from kvquilt.vllm.requests import NEVER, RequestState
from kvquilt.vllm.saves import BlockTables, Progress, SaveBook
from kvquilt.vllm.start import disk_line, start_lines, warn_of_idle_states, warn_of_lost_keys

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerSide"]

logger = logging.getLogger(__name__)
SLOW_SAVE_SECONDS = 1.0
"""A save that takes longer may lose its sources if the engine needs the blocks."""
_ATTACH_SECONDS_PER_GIB = 4.0  # to populate and pin; several times what it takes on an idle machine


class SchedulerSide:
    """Owns the store and the books of saves and loads. Used on the scheduler's thread only.

    tokens_per_step: the most tokens that the engine computes in one step.
    engine_caches: the engine's own prefix caching is on, so a prefix that is being loaded for one
    request will be a local hit of the next.
    namespace: what the stored bytes belong to; in one engine's memory it never changes, and the
    start line names it. events: set if the engine publishes KV events.
    data_parallel: this core's index and how many there are, for its part of the disk.
    """

    def __init__(
        self,
        options: Options,
        groups: EngineGroups,
        *,
        num_ranks: int,
        tokens_per_step: int = 0,
        engine_caches: bool = True,
        namespace: NamespaceFactors | None = None,
        events: KVEvents | None = None,
        data_parallel: DataParallelRank = (0, 1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = groups.layout
        self.options = options
        self.layout = layout
        self.num_ranks = num_ranks
        self.clock = clock
        self.meter = Meter()
        self.owner = f"engine-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        budget = options.budget_bytes
        self.plan = plan_slots(
            layout,
            budget,
            options.planned_checkpoint_interval,
            num_ranks=num_ranks,
            partition=options.group_partition,
            state_interval=options.planned_state_interval(groups.state_interval),
        )
        warn_of_idle_states(options.checkpoint_interval, groups)
        check_memory(budget)
        warm_up()
        may_lack = groups.drafters if options.draft == "best_effort" else frozenset()
        self.store = Store(
            layout,
            self.plan,
            num_ranks=num_ranks,
            clock=clock,
            record_changes=events is not None,
            optional=may_lack,
        )
        self._events = events
        self.store.register_owner(self.owner, live=True)
        try:
            self._server: PoolServer | None = PoolServer(self.store.arenas, layout_fingerprint(layout))
        except OSError:
            self.store.close()
            raise
        self.below = self._make_below(groups, namespace, may_lack, data_parallel)
        self.finder = Finder(
            self.store,
            layout,
            self.meter,
            owner=self.owner,
            drafters=may_lack,
            promoter=self.below.promoter if self.below is not None else None,
        )
        self.divergent = DivergentHits(self.finder, layout, wanted=options.mode == "read_write")
        self.saves = SaveBook(
            self.store,
            groups,
            options,
            self.meter,
            owner=self.owner,
            num_ranks=num_ranks,
            clock=clock,
            committed=self.below.committed if self.below is not None else None,
        )
        self.loads = LoadBook(
            self.store,
            layout,
            self.meter,
            owner=self.owner,
            num_ranks=num_ranks,
            timeout_seconds=options.load_timeout_seconds,
            clock=clock,
        )
        self.pins: PinBook | None = None
        self._failed_loads = FailedLoads()
        self._drafters = groups.drafters
        self._tokens_per_step = tokens_per_step
        self._engine_caches = engine_caches
        self._states: dict[str, RequestState] = {}
        self._attached: set[int] = set()
        self._levels = Levels(self.meter)
        self._disk_levels = DiskLevels(self.meter)
        self._failed_load_logged = False
        self._broken = False
        self._levels_up = False
        self._engine_emptied = False  # by a reset, and nothing has been computed since
        self._engine_is_stale = False  # it may hold blocks that a reset should have emptied
        self._missed: list[tuple[bytes, set[str], set[str]]] = []
        pinning = _ATTACH_SECONDS_PER_GIB * self.store.size_bytes / (1 << 30)
        self._attach_until = clock() + 2 * options.load_timeout_seconds + pinning
        self.namespace = namespace
        self.start_lines = start_lines(layout, self.plan)
        if self.below is not None:
            self.start_lines.append(disk_line(self.below.tier))
        for line in self.start_lines:
            logger.info("kvquilt: %s", line)
        if namespace is not None:
            logger.info("kvquilt: namespace %s", namespace.digest().hex())

    def _make_below(
        self,
        groups: EngineGroups,
        namespace: NamespaceFactors | None,
        may_lack: frozenset[str],
        data_parallel: DataParallelRank,
    ) -> Below | None:
        if self.options.disk_path is None:
            return None
        try:
            if namespace is None:
                raise ConfigError("disk_path: pages can be kept on disk only under a namespace")
            warn_of_lost_keys(namespace)
            return Below(
                self.store,
                self.layout,
                self.plan,
                self.options,
                namespace,
                state_interval=self.options.planned_state_interval(groups.state_interval),
                optional=may_lack,
                rank=data_parallel,
                clock=self.clock,
            )
        except BaseException:
            self._close_server()
            self.store.close()
            raise

    # ---- look-up ----

    def bind(self, manager: KVCacheManager) -> None:
        """Learn of the engine's cache manager, and let its resets see our pins first."""
        blocks_per_step = sum(-(-self._tokens_per_step // g.tokens_per_block) for g in self.layout.groups)
        self.divergent.bind(manager)
        self.pins = PinBook(manager.block_pool, blocks_per_step)
        self.saves.bind(self.pins)
        self.loads.bind(self.pins)
        engine_reset = manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            # The engine refuses a reset while blocks are in use, and offers no hook before it.
            self._release_pins()
            self._engine_emptied = bool(engine_reset())
            if self._engine_emptied:
                self._engine_is_stale = False
            return self._engine_emptied

        manager.reset_prefix_cache = reset_prefix_cache

    def match(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond `local_tokens`; None: ask again at the next step.

        Idempotent: the answer for one request and local length is remembered with its lease.
        """
        state = self._state(request)  # also where the answer is no: it waits for blocks
        if self._failed_loads.ask_again(request.request_id):
            return None, False
        if self.options.mode == "save_only" or request.skip_reading_prefix_cache:
            return 0, False
        if self._broken or self.pins is None or len(self._attached) < self.num_ranks:
            return 0, False
        if local_tokens % self.layout.lattice_tokens:
            return 0, False
        if state.no_fetch:
            return 0, False
        found = self.finder.find(state, local_tokens)
        if found is None:
            return None, False
        junction = self.finder.junction(found)
        if junction > max(request.shared_prefix_boundary, local_tokens):
            # The engine ends a step there and keeps the states, so the next such prompt resumes there.
            request.shared_prefix_boundary = junction
        if found.tokens <= local_tokens:
            return (None, False) if self.divergent.ask_again(state, local_tokens) else (0, False)
        self.divergent.forget(request.request_id)
        if self._engine_caches and self.loads.brings(state.chain, found.tokens):
            return None, False  # what is being loaded will be this request's local hit
        return found.tokens - local_tokens, True

    # ---- request life ----

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has given the request its blocks: what it finally takes rules."""
        state = self._state(request)
        loaded_well = request.num_computed_tokens > 0  # a fresh request has none yet
        hollow = state.hollow and loaded_well
        external = state.external_tokens if loaded_well else 0
        state.restart()
        state.hollow, state.external_tokens = hollow, external
        self.saves.drop_checkpoint(state)
        loaded, state.loaded_tokens = state.loaded_tokens, 0
        if not external_tokens:
            if loaded and request.num_computed_tokens >= loaded:
                # The load has ended and the request runs: what it brought need not be saved.
                state.next_block = [
                    0 if hollow and group.name in self._drafters else loaded // group.tokens_per_block
                    for group in self.layout.groups
                ]
            self.finder.forget(state)
            return
        found, local_tokens, without = self.finder.take(state, external_tokens)
        state.hollow, state.external_tokens = bool(without), external_tokens
        self.loads.start(state, found, local_tokens, blocks.blocks, without)

    def doom(self, request: Request, external_tokens: int) -> None:
        """`allocated` failed: the engine waits for a load that will never come, so fail it."""
        # Not remembered if it is not yet: the request may have ended since.
        state = self._states.get(request.request_id) or self._new_state(request)
        state.restart()  # its block tables are new, whatever failed
        if external_tokens:
            self.loads.doom(state, "the load could not be planned")

    def finished(self, request: Request, block_ids: BlockTables) -> None:
        """Finish or abort: save what is left, forget the rest."""
        self._failed_loads.forget(request.request_id)
        self.divergent.forget(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is None:
            return
        self.finder.forget(state)
        written = min(request.num_computed_tokens, request.num_tokens)
        if self._broken or not state.scheduled or self.loads.is_loading(request.request_id):
            written = 0
        self.saves.finish(state, written, block_ids)
        if written:
            # The window that a next turn resumes from outlives the windows before it.
            tokens = min(written, len(state.chain) * self.layout.tokens_per_hash)
            self.store.touch(state.chain, tokens)
            if self.below is not None:
                self.below.touch(state.chain, tokens)

    def drop(self, request: Request) -> None:
        """`finished` failed: give back what the request held, and save nothing."""
        self._failed_loads.forget(request.request_id)
        self.divergent.forget(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self.saves.drop_checkpoint(state)
            self.finder.forget(state)

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None or state.request is not request:
            state = self._states[request.request_id] = self._new_state(request)
        return state

    def _new_state(self, request: Request) -> RequestState:
        boundaries = prompt_boundaries(
            self.layout, request.num_prompt_tokens, slack=self.options.retain_slack
        )
        state = RequestState.of(request, self.layout, boundaries)
        if self._events is not None:
            self._events.remember(state.chain, request)
        if self.below is not None:
            state.chain.durable = self.below.is_durable(adapter=request.lora_request is not None)
        return state

    # ---- one engine step ----

    def build_step(self, output: SchedulerOutput) -> bytes:
        """Plan this step's saves and encode what the workers are to do."""
        self._engine_emptied = False
        for request_id in output.preempted_req_ids or ():
            if request_id in self._states:
                self.saves.drop_checkpoint(self._states[request_id])
                self._states[request_id].loaded_tokens = 0
                self._states[request_id].restart()
        now = self.clock()
        # An idle engine needs no blocks: there a late copy may still end well.
        oldest = now - self.options.load_timeout_seconds if self._states else float("-inf")
        self.saves.give_up_slow(now - SLOW_SAVE_SECONDS, oldest)
        if not self._broken:
            self.saves.plan(self._scheduled(output))
        idle = not output.num_scheduled_tokens
        if idle and self.below is not None:
            self.below.breathe()
        return self.encode_step(idle=idle)

    def encode_step(self, *, idle: bool = False) -> bytes:
        """Encode what is waiting to be sent. idle: the engine computes nothing in this step."""
        cancel, refail = self.loads.take_cancels()
        return encode_plan(
            StepPlan(
                attach_path=self._server.path if self._server is not None else "",
                idle=idle,
                saves=self.saves.take_messages(),
                loads=self.loads.take_messages(),
                flush=self.saves.take_flush(),
                spoil=self.saves.take_spoiled(),
                cancel=cancel,
                refail=refail,
            )
        )

    def _scheduled(self, output: SchedulerOutput) -> Iterable[Progress]:
        block_state = output.kv_connector_block_state
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is None or block_state is None:
                continue
            request = state.request
            if not state.scheduled:
                state.scheduled = True
                state.computed_from = request.num_computed_tokens
                if self._engine_is_stale and state.computed_from > state.external_tokens:
                    state.barred_tokens = NEVER
            # Drafted tokens may be rejected; tokens that the request does not have yet are not hashed.
            written = min(request.num_computed_tokens + num_scheduled, request.num_tokens)

            def tables(request_id: str = request_id) -> Sequence[Sequence[int]]:
                return block_state.get_block_ids(request_id) or ()

            handed_over = block_state.boundary_state_offloads.get(request_id, ())
            yield Progress(state, written, tables, handed_over)

    def on_output(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report; runs before the engine sees finished loads."""
        if output.invalid_block_ids:
            # Another connector's synchronous load failed: this step read and wrote wrong KV.
            self.saves.fail_all()
            for state in self._states.values():
                state.next_block = [0] * len(self.layout.groups)
                state.next_check = 0
        errors: list[Exception] = []
        missed, self._missed = self._missed, []
        for payload, finished, failed in missed:
            errors += self._take_reports(payload)
            self.loads.told(finished, failed)
        errors += self._take_reports(_payload(output))
        self.loads.filter_output(output)
        self._failed_loads.add(output.failed_recving, self._states)
        if output.failed_recving and not self._failed_load_logged:
            self._failed_load_logged = True
            logger.warning(
                "kvquilt: a load failed. It is recomputed, provided that the engine's kv_load_failure_policy "
                "is 'recompute': kvquilt sets that by itself, but under MultiConnector it has to be set "
                "beside the list of connectors"
            )
        if errors:
            raise errors[0]

    def miss_output(self, output: KVConnectorOutput) -> None:
        """`on_output` failed: take this step's reports in with the next step's. Twice is harmless."""
        finished, failed = set(output.finished_recving or ()), set(output.failed_recving)
        self._missed.append((_payload(output), finished, failed))

    def _take_reports(self, payload: bytes) -> list[Exception]:
        errors: list[Exception] = []
        for report in decode_reports(payload):
            if report.attached:
                self._attach(report.rank)
            if report.error:
                logger.error("kvquilt: switched off, rank %d: %s", report.rank, report.error)
                self._broken = True
                self._close_server()
            for job_id in report.timed_out:
                self.loads.on_timeout(job_id)
            for book, ends in ((self.saves, report.saves), (self.loads, report.loads)):
                for end in ends:
                    try:
                        book.on_end(report.rank, end)
                    except Exception as error:  # noqa: BLE001 - the ends of other jobs must not be lost
                        errors.append(error)
        return errors

    def _attach(self, rank: int) -> None:
        self._attached.add(rank)
        if len(self._attached) == self.num_ranks:
            self._close_server()

    def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # ---- the engine's questions ----

    def has_push_work(self) -> bool:
        """Keep the engine stepping: copies are out whose end nobody would hear of otherwise, or
        ranks have not attached, which they do in a step: so the first request finds them ready,
        and the socket is gone before anything could kill this process.

        A rank that stays silent for twice the load time-out is no longer waited for; while it attaches, it
        may have to pin all of the pools, and has more time the larger they are.
        """
        since = self.clock() - 2 * self.options.load_timeout_seconds
        if self._server is not None:
            if self.clock() < self._attach_until:
                return True
            logger.error("kvquilt: switched off: not all ranks have attached the pools in time")
            self._broken = True
            self._close_server()
        return bool(self.saves.under_way(newer_than=since) or self.loads.under_way(newer_than=since))

    def has_block_frees(self) -> bool:
        """Waiting beats preempting: blocks that only pins hold come back in a step or two."""
        since = self.clock() - SLOW_SAVE_SECONDS
        return bool(
            self.pins is not None and self.saves.under_way(newer_than=since) and self.pins.exclusive()
        )

    def reset(self) -> bool:
        """Empty every tier; False if a process killed later might find pages again, since the disk could
        not record the reset. Copies in flight land invisibly, loads in flight are reported failed.
        Live requests are not saved any more, nor is what builds on blocks that the engine has kept
        because it refused to reset its own cache."""
        for state in self._states.values():
            self.finder.forget(state)
            self.saves.drop_checkpoint(state)
            state.barred_tokens = NEVER
        self._engine_is_stale = not self._engine_emptied
        self._levels_up = True
        self.loads.cancel_all()
        self.store.reset()
        return self.below is None or self.below.reset()

    def _release_pins(self) -> None:
        if self.pins is not None and len(self.pins) and self.pins.all_that_is_used():
            self.saves.release_pins(self._states.values())

    def take_events(self) -> list[KVCacheEvent]:
        """What the store holds or lost since the last call, for the engine to publish."""
        return self._events.translate(self.store.take_changes()) if self._events is not None else []

    def stats(self) -> KVQuiltStats | None:
        """Counts since the last call, with the gauges of now; None if nothing happened."""
        if not self.meter.fresh and not self._levels_up:
            return None
        pins = len(self.pins) if self.pins is not None else 0
        gauges = self._levels.gauges(self.store.stats(), pins)
        if self.below is not None:
            gauges |= self._disk_levels.gauges(self.below)
        # Levels that are up must be seen to come down, also when nothing is counted any more.
        self._levels_up = any(gauges[name][""] for name in ("leases", "tickets", "pins"))
        self._levels_up |= any(gauges.get("disk_queue", {}).values())
        return self.meter.drain(gauges)

    def close(self) -> None:
        """Return all that is held and unmap the pools. Safe to call twice."""
        for state in self._states.values():
            self.finder.forget(state)
            self.saves.drop_checkpoint(state)
        self._states.clear()
        self.saves.close()
        self.loads.close()
        self._close_server()
        if self.below is not None:
            self.below.close()
        self.store.close()


def _payload(output: KVConnectorOutput) -> bytes:
    payload: bytes = getattr(output.kv_connector_worker_meta, "payload", b"")
    return payload
