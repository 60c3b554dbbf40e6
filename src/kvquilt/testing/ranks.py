"""Looking into an engine's worker processes, one per rank, from the process of its scheduler.

The engine mixes `RankProbe` into the class of its workers:

    engine = Engine("gemma4-mini", connector={...}, tensor_parallel_size=2, **RANK_PROBE)
    ranks = Ranks(engine)
    ranks.record()
    ...
    ranks.reports()  # one PageReport for each rank
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvquilt.testing.copy_faults import CopyPlan, FaultyCopier
from kvquilt.testing.pages import PageRecorder, PageReport, page_digests

if TYPE_CHECKING:
    from kvquilt.testing.engine import Engine

__all__ = ["RANK_PROBE", "RankProbe", "Ranks"]

RANK_PROBE: Mapping[str, Any] = {
    "worker_extension_cls": f"{__name__}.RankProbe",
    "distributed_executor_backend": "mp",
}
"""Engine arguments that make worker processes with a probe each."""


class RankProbe:
    """What is called in the worker processes; they bring `self.rank` and `self.vllm_config`."""

    rank: int
    vllm_config: Any

    def kvquilt_pid(self) -> int:
        """This worker's process id."""
        return os.getpid()

    def kvquilt_record(self) -> None:
        """Compare from now on each page that comes back with what this rank saved."""
        self._kvquilt_recorder = PageRecorder(self._kvquilt_caches(), self._kvquilt_config())
        self._kvquilt_worker().observer = self._kvquilt_recorder

    def kvquilt_report(self) -> PageReport:
        """What the recorder has seen."""
        return self._kvquilt_recorder.report()

    def kvquilt_digests(self, group: int, blocks: Sequence[int]) -> list[str]:
        """Digests of blocks in this rank's own tensors."""
        return page_digests(self._kvquilt_caches(), self._kvquilt_config(), group, blocks)

    def kvquilt_faults(self, plan: CopyPlan | None, rank: int) -> None:
        """Heal this rank; then, if it is the one meant, let copies go wrong by plan, counted from here."""
        worker = self._kvquilt_worker()
        if isinstance(worker.copier, FaultyCopier):
            worker.copier.heal()
            worker.poll()
            worker.copier = worker.copier._inner
        if plan is not None and self.rank == rank:
            worker.copier = FaultyCopier(worker.copier, plan)

    def kvquilt_faults_done(self) -> list[tuple[int, str, str]]:
        """(job number, direction, fault) of what has gone wrong on this rank."""
        copier = self._kvquilt_worker().copier
        return list(copier.faults) if isinstance(copier, FaultyCopier) else []

    def _kvquilt_worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    def _kvquilt_config(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._kv_cache_config

    def _kvquilt_caches(self) -> dict[str, Any]:
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = self._kvquilt_config().kv_cache_groups
        return {name: layers[name].kv_cache for group in groups for name in group.layer_names}


class Ranks:
    """The probes of an engine's workers, asked all at once; answers come in rank order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def pids(self) -> list[int]:
        """The workers' process ids."""
        return list(self._call("kvquilt_pid"))

    def record(self) -> None:
        """Compare from now on each page that comes back, on each rank; the connector sends keys."""
        side = self._engine.connector.scheduler_side
        side.saves.record_keys = side.loads.record_keys = True
        self._call("kvquilt_record")

    def reports(self) -> list[PageReport]:
        """What each rank has recorded and compared."""
        return list(self._call("kvquilt_report"))

    def digests(self, group: int, blocks: Sequence[int]) -> list[list[str]]:
        """Digests of blocks, as each rank holds them."""
        return list(self._call("kvquilt_digests", group, list(blocks)))

    def fault(self, rank: int, plan: CopyPlan) -> None:
        """Let copies of one rank go wrong by plan, and of no other."""
        self._call("kvquilt_faults", plan, rank)

    def heal(self) -> None:
        """Undo `fault`, and let what was held back end."""
        self._call("kvquilt_faults", None, -1)

    def faults(self) -> list[list[tuple[int, str, str]]]:
        """What has gone wrong by plan, on each rank."""
        return list(self._call("kvquilt_faults_done"))

    def _call(self, method: str, *args: Any) -> Any:
        return self._engine.llm_engine.collective_rpc(method, args=args)
