"""Loads: copies into the engine's blocks, and the leases and pins of those under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import TransferError
from kvquilt.layout import CacheLayout, needed_blocks
from kvquilt.store import Chain, Found, PageRange, Store
from kvquilt.vllm.metadata import CopyList, JobEnd, LoadJob
from kvquilt.vllm.metrics import Meter
from kvquilt.vllm.pins import PinBook
from kvquilt.vllm.requests import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["LoadBook"]

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]


@dataclass
class _Load:
    """A load that some rank's copies have not ended, or that the engine has not been told of."""

    job_id: int
    state: RequestState
    lease_id: int | None
    limited_by: str
    local_tokens: int
    tokens: int
    key: bytes
    pinned: list[int]
    ranks_left: set[int]
    pages_of_group: IntArray
    started: float
    reason: str = ""
    cancelled: bool = False
    message: LoadJob | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class _Pages:
    """What a load writes: entry i is `engine_block[i]` of `group[i]`, from `slot[i]`; `block[i]` is its
    index in the prompt. The zero_* arrays name blocks to fill with zeros."""

    group: NDArray[np.int32]
    block: IntArray
    engine_block: IntArray
    slot: IntArray
    zero_group: NDArray[np.int32]
    zero_block: IntArray

    @classmethod
    def of(
        cls,
        loaded: Sequence[tuple[int, IntArray, IntArray, IntArray]],
        zeroed: Sequence[tuple[int, IntArray]],
    ) -> _Pages:
        """From (group, blocks, engine blocks, slots) and (group, engine blocks) of each group."""

        def joined(parts: Sequence[IntArray]) -> IntArray:
            whole: IntArray = np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
            return whole

        def groups(parts: Sequence[tuple[int, IntArray]]) -> NDArray[np.int32]:
            return joined([np.full(ids.size, group) for group, ids in parts]).astype(np.int32)

        return cls(
            group=groups([(part[0], part[1]) for part in loaded]),
            block=joined([part[1] for part in loaded]),
            engine_block=joined([part[2] for part in loaded]),
            slot=joined([part[3] for part in loaded]),
            zero_group=groups(zeroed),
            zero_block=joined([ids for _, ids in zeroed]),
        )

    def zeroes(self) -> CopyList | None:
        """The blocks to fill with zeros as a message, None if there are none."""
        if not self.zero_block.size:
            return None
        return CopyList.of(self.zero_group, self.zero_block, np.zeros_like(self.zero_block))


class LoadBook:
    """Starts loads, and ends them when every rank's copy has really ended.

    Telling the engine (`filter_output`) and giving back lease and pins (`on_end`) are two
    events: a load that outlives its time is reported failed while its copy still runs.
    Used on the scheduler's thread only.
    """

    def __init__(
        self,
        store: Store,
        layout: CacheLayout,
        meter: Meter,
        *,
        owner: str,
        num_ranks: int,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._layout = layout
        self._meter = meter
        self._owner = owner
        self._num_ranks = num_ranks
        self._timeout = timeout_seconds
        self._clock = clock
        self._pins: PinBook | None = None
        self._loads: dict[int, _Load] = {}
        self._untold: dict[str, _Load] = {}
        self._next_job = 1
        self._cancel: list[int] = []
        self._refail: list[tuple[int, str]] = []
        self.record_keys = False

    def bind(self, pins: PinBook) -> None:
        self._pins = pins

    def under_way(self, *, newer_than: float = float("-inf")) -> int:
        """Loads that have not ended, those only that started after `newer_than`."""
        return sum(load.started > newer_than for load in self._loads.values())

    def is_loading(self, request_id: str) -> bool:
        """Does the engine still wait for a load of this request?"""
        return request_id in self._untold

    def brings(self, chain: Chain, tokens: int) -> bool:
        """Is a prefix of this chain, no longer than `tokens`, being loaded for another request?

        A load that has outlived its time is not waited for.
        """
        since = self._clock() - 2 * self._timeout
        return any(
            not load.cancelled
            and load.started > since
            and 0 < load.tokens <= tokens
            and load.key == chain.hash_at(load.tokens)
            for load in self._untold.values()
        )

    def start(
        self,
        state: RequestState,
        found: Found | None,
        local_tokens: int,
        tables: Sequence[Sequence[KVCacheBlock]],
        without: Collection[str] = (),
    ) -> None:
        """Load `found` into the request's blocks, or doom the load if that cannot be right.

        without: groups that the hit does without; their blocks are filled with zeros.
        The engine waits for the request from here on, so whatever is wrong is reported to it.
        """
        try:
            if found is None or found.lease_id is None:
                raise TransferError("what the engine took is no boundary that every group can resume from")
            leased = self._store.pages(found.lease_id, self._owner)
            pages = self._destinations(leased, found.tokens, local_tokens, tables, without)
        except Exception as error:  # noqa: BLE001 - the lease goes back, the engine is told
            self._doom(state, found, str(error))
            return
        keys = b""
        if self.record_keys:
            keys = b"".join(
                state.chain.keys(int(g))[int(b)].tobytes()
                for g, b in zip(pages.group, pages.block, strict=True)
            )
        try:
            self._add(state, found, local_tokens, pages, keys)
        except Exception as error:  # noqa: BLE001 - the same
            self._doom(state, found, str(error))

    def doom(self, state: RequestState, why: str) -> None:
        """Report the request's load failed at the next step; for a load that never started."""
        if state.request.request_id not in self._untold:
            self._doom(state, None, why)

    def take_messages(self) -> tuple[LoadJob, ...]:
        """Jobs to send in this step's metadata."""
        messages = []
        for load in self._loads.values():
            if load.message is not None:
                messages.append(load.message)
                load.message = None
        return tuple(messages)

    def take_cancels(self) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...]]:
        """Jobs to cancel, and jobs to report failed although they were reported done."""
        cancel, self._cancel = tuple(self._cancel), []
        refail, self._refail = tuple(self._refail), []
        return cancel, refail

    def cancel_all(self) -> None:
        """After a reset: what is being loaded is no longer wanted, and is to be reported failed."""
        for load in self._untold.values():
            if not load.cancelled:
                load.cancelled = True
                load.reason = load.reason or "reset"
                self._cancel.append(load.job_id)

    def on_timeout(self, job_id: int) -> None:
        """A rank has given up waiting for its copy; the request is being reported failed."""
        load = self._loads.get(job_id)
        if load is not None:
            load.reason = load.reason or "timeout"

    def on_end(self, rank: int, end: JobEnd) -> None:
        """One rank's copies have really ended. Unknown jobs are ignored."""
        load = self._loads.get(end.job_id)
        if load is None or rank not in load.ranks_left:
            return
        load.ranks_left.discard(rank)
        if not end.ok:
            load.reason = load.reason or "copy"
        if load.ranks_left:
            return
        del self._loads[end.job_id]
        self._give_back(load)
        if not load.reason:
            self._meter.sample("load_seconds", self._clock() - load.started)

    def filter_output(self, output: KVConnectorOutput) -> None:
        """See what the workers tell the engine of our loads, and hold back a success that a
        reset has overtaken until the workers have turned it into a failure."""
        for request_id in list(output.finished_recving or ()):
            load = self._untold.get(request_id)
            if load is None:
                continue
            failed = request_id in output.failed_recving
            if load.cancelled and not failed:
                output.finished_recving = set(output.finished_recving or ()) - {request_id}
                self._refail.append((load.job_id, request_id))
                continue
            self.told({request_id}, {request_id} if failed else set())

    def told(self, finished: set[str], failed: set[str]) -> None:
        """The engine has been told that these loads have ended. Unknown requests are ignored."""
        for request_id in finished:
            load = self._untold.pop(request_id, None)
            if load is not None:
                self._count(load, request_id in failed)

    def close(self) -> None:
        """Give back every lease and pin."""
        for load in self._loads.values():
            self._give_back(load)
        self._loads.clear()
        self._untold.clear()

    def _count(self, load: _Load, failed: bool) -> None:
        if failed:
            load.state.no_fetch = True
            self._meter.count("load_failures", 1, load.reason or "copy")
            return
        load.state.loaded_tokens = 0 if load.local_tokens else load.tokens
        self._meter.count("hit_tokens", load.tokens - load.local_tokens, load.limited_by)
        for index in np.flatnonzero(load.pages_of_group):
            group, pages = self._layout.groups[index], int(load.pages_of_group[index])
            self._meter.count("loaded_pages", pages, group.name)
            self._meter.count("loaded_bytes", pages * group.slot_content_bytes(self._num_ranks), group.name)

    def _give_back(self, load: _Load) -> None:
        if load.pinned and self._pins is not None:
            self._pins.unpin(load.pinned)
        load.pinned = []
        if load.lease_id is not None:
            self._store.release(load.lease_id, self._owner)
        load.lease_id = None

    def _doom(self, state: RequestState, found: Found | None, why: str) -> None:
        if found is not None and found.lease_id is not None:
            self._store.release(found.lease_id, self._owner)
        self._add(state, None, 0, _Pages.of([], [])).reason = "refused"
        logger.warning("kvquilt: request %s is recomputed: %s", state.request.request_id, why)

    def _add(
        self,
        state: RequestState,
        found: Found | None,
        local_tokens: int,
        pages: _Pages,
        keys: bytes = b"",
    ) -> _Load:
        pinned: list[int] = [*pages.engine_block.tolist(), *pages.zero_block.tolist()]
        if pinned and self._pins is not None:
            self._pins.pin(pinned)
        tokens = found.tokens if found is not None else 0
        load = _Load(
            job_id=self._next_job,
            state=state,
            lease_id=found.lease_id if found is not None else None,
            limited_by=(found.limited_by if found is not None else None) or "none",
            local_tokens=local_tokens,
            tokens=tokens,
            key=state.chain.hash_at(tokens) if tokens else b"",
            pinned=pinned,
            ranks_left=set(range(self._num_ranks)),
            pages_of_group=np.bincount(pages.group, minlength=len(self._layout.groups)),
            started=self._clock(),
            message=LoadJob(
                self._next_job,
                state.request.request_id,
                CopyList.of(pages.group, pages.engine_block, pages.slot, keys),
                self._timeout,
                doomed=found is None,
                zero=pages.zeroes(),
            ),
        )
        self._next_job += 1
        self._loads[load.job_id] = load
        self._untold[state.request.request_id] = load
        return load

    def _destinations(
        self,
        leased: Sequence[PageRange],
        tokens: int,
        local_tokens: int,
        tables: Sequence[Sequence[KVCacheBlock]],
        without: Collection[str],
    ) -> _Pages:
        """Every page to load, and every block to fill with zeros.

        Raises TransferError if the engine's tables and what the boundary needs do not agree.
        """
        loaded: list[tuple[int, IntArray, IntArray, IntArray]] = []
        zeroed: list[tuple[int, IntArray]] = []
        ranges = {page.group: page for page in leased}
        for index, group in enumerate(self._layout.groups):
            if not group.cacheable or not group.page_bytes:
                continue
            lo, hi = needed_blocks(group, tokens)
            lo = max(lo, local_tokens // group.tokens_per_block)
            self._check_extra(group.name, tables[index], lo)
            page = ranges.get(index)
            if hi <= lo:
                continue
            row = tables[index][lo:hi]
            if len(row) != hi - lo or any(b.is_null or b.block_hash is not None for b in row):
                raise TransferError(
                    f"cache group {group.name!r}: no fresh engine block for each of blocks {lo}..{hi - 1}"
                )
            ids = np.fromiter((b.block_id for b in row), dtype=np.int64, count=hi - lo)
            if group.name in without:
                zeroed.append((index, ids))
                continue
            if page is None or page.first_block != lo or page.slots.size != hi - lo:
                raise TransferError(
                    f"cache group {group.name!r}: the lease does not cover blocks {lo}..{hi - 1}"
                )
            loaded.append((index, np.arange(lo, hi, dtype=np.int64), ids, page.slots))
        if not loaded:
            raise TransferError("there is nothing to load")
        return _Pages.of(loaded, zeroed)

    @staticmethod
    def _check_extra(name: str, table: Sequence[KVCacheBlock], lo: int) -> None:
        """A block that the engine expects and that we would not fill must not pass as loaded, be it below
        the local length: that may be the length of another group."""
        if any(not b.is_null and b.block_hash is None for b in table[:lo]):
            raise TransferError(
                f"cache group {name!r}: the engine expects blocks before block {lo}, the first that is needed"
            )
