"""Messages between the scheduler side and the workers.

The engine pickles its own metadata classes, so ours are plain dataclasses whose single field
is msgspec bytes; nothing of ours is pickled beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvquilt.transfer import PageCopies

__all__ = [
    "CopyList",
    "JobEnd",
    "LoadJob",
    "SaveJob",
    "StepMetadata",
    "StepPlan",
    "WorkerMetadata",
    "WorkerReport",
    "decode_plan",
    "decode_reports",
    "encode_plan",
    "encode_reports",
]


class CopyList(msgspec.Struct, frozen=True):
    """Page copies of one job: parallel arrays as little-endian bytes.

    group: int32; block, slot: int64. keys: 32 bytes a page, only when page checks are on.
    """

    group: bytes
    block: bytes
    slot: bytes
    keys: bytes = b""

    @classmethod
    def of(
        cls,
        group: NDArray[np.int32],
        block: NDArray[np.int64],
        slot: NDArray[np.int64],
        keys: bytes = b"",
    ) -> CopyList:
        return cls(group.tobytes(), block.tobytes(), slot.tobytes(), keys)

    def copies(self) -> PageCopies:
        return PageCopies(
            group=np.frombuffer(self.group, dtype=np.int32),
            block=np.frombuffer(self.block, dtype=np.int64),
            slot=np.frombuffer(self.slot, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.block) // 8


class SaveJob(msgspec.Struct, frozen=True):
    """Engine blocks -> slots, after this step's forward pass."""

    job_id: int
    pages: CopyList


class LoadJob(msgspec.Struct, frozen=True):
    """Slots -> engine blocks of one request. doomed: report it failed without copying.

    zero: blocks to fill with zeros, for groups that the hit does without.
    """

    job_id: int
    request_id: str
    pages: CopyList
    timeout_seconds: float
    doomed: bool = False
    zero: CopyList | None = None


class StepPlan(msgspec.Struct, frozen=True):
    """What the workers do in one engine step.

    attach_path: where to fetch the pools' file descriptors; empty once all ranks have.
    idle: the engine computes nothing in this step.
    flush: save jobs whose sources are no longer pinned: end them before the forward pass.
    spoil: save jobs whose sources were given away because they take too long: they fail.
    cancel: load jobs to report failed, unless they have been reported. refail: load jobs to
    report failed although every rank has reported them done.
    """

    attach_path: str = ""
    idle: bool = False
    saves: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    flush: tuple[int, ...] = ()
    spoil: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()
    refail: tuple[tuple[int, str], ...] = ()


class JobEnd(msgspec.Struct, frozen=True):
    """A job whose copies have really ended on one rank."""

    job_id: int
    ok: bool
    seconds: float = 0.0
    error: str = ""


class WorkerReport(msgspec.Struct, frozen=True):
    """What one rank reports after a step."""

    rank: int
    attached: bool
    saves: tuple[JobEnd, ...] = ()
    loads: tuple[JobEnd, ...] = ()
    timed_out: tuple[int, ...] = ()
    error: str = ""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler side -> workers: an encoded `StepPlan`."""

    payload: bytes = b""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers -> scheduler side: an encoded list of `WorkerReport`, one per rank."""

    payload: bytes = b""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        if not isinstance(other, WorkerMetadata):
            raise TypeError(f"cannot merge {type(other).__name__} into WorkerMetadata")
        return WorkerMetadata(encode_reports(decode_reports(self.payload) + decode_reports(other.payload)))


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_report_decoder = msgspec.msgpack.Decoder(list[WorkerReport])


def encode_plan(plan: StepPlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(payload: bytes) -> StepPlan:
    return _plan_decoder.decode(payload)


def encode_reports(reports: list[WorkerReport]) -> bytes:
    return _encoder.encode(reports)


def decode_reports(payload: bytes) -> list[WorkerReport]:
    return _report_decoder.decode(payload) if payload else []
