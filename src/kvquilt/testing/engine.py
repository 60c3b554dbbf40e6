"""A real vLLM engine inside this process, stepped by hand, for tests and benchmarks.

The engine core, its scheduler, its block pool and its worker are all in reach, several engines can
run one after another in one process, and a step happens when the caller asks for it: a test can
stop between any two steps and look.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from unittest import mock

from kvquilt.testing.models import make_drafter, make_model
from kvquilt.testing.results import DraftCounts, RequestRecord, Result, in_order
from kvquilt.testing.specs import SPECS
from kvquilt.testing.stubs import provide_stubs

__all__ = ["Engine", "connector_config"]

_MIB = 1 << 20
_DEFAULT_POOL_BYTES = 256 * _MIB
_IDLE_SECONDS = 0.001


def connector_config(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The engine's `kv_transfer_config` for `options`.

    options: None for no connector; options of KVQuiltConnector; or, if it has the key
    "kv_connector", a whole `KVTransferConfig` as a mapping.
    """
    if options is None:
        return None
    if "kv_connector" in options:
        return dict(options)
    return {
        "kv_connector": "KVQuiltConnector",
        "kv_connector_module_path": "kvquilt.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(options),
    }


class Engine:
    """One in-process engine; a context manager.

    model: the name of a tiny model (see `specs.SPECS`), made on demand with `seed`, or a path.
    connector: see `connector_config`.
    num_blocks: size of the engine's pool in blocks; else `kv_cache_memory_bytes` (default 256 MiB).
    retention_interval: the engine's own `prefix_cache_retention_interval`: 0 keeps, in groups that
    are not dense, only blocks at prompts' boundaries; None keeps all.
    clock: seconds for times to the first token; one that stands still leaves out what is not the
    engine's work. engine_args: any other argument of vLLM's `EngineArgs`; they win over everything.

    Sets VLLM_ENABLE_V1_MULTIPROCESSING=0 and HF_HUB_OFFLINE=1 in this process. Raises what vLLM
    raises if it cannot start; nothing is left running then.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        connector: Mapping[str, Any] | None = None,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int = 16384,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        retention_interval: int | None = 0,
        seed: int = 0,
        log_stats: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        **engine_args: Any,
    ) -> None:
        _prepare_environment()
        from vllm.engine.arg_utils import EngineArgs

        arguments: dict[str, Any] = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_hybrid_kv_cache_manager": False,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_prefix_caching": enable_prefix_caching,
            "prefix_cache_retention_interval": retention_interval,
            "num_gpu_blocks_override": num_blocks,
            "kv_cache_memory_bytes": kv_cache_memory_bytes or _DEFAULT_POOL_BYTES,
            "seed": seed,
            "disable_log_stats": not log_stats,
        }
        _calm_llvmlite()
        path = os.fspath(model)
        if path in SPECS:
            arguments.update(_tiny_arguments(path, seed))
            path = arguments.pop("model")
        arguments.update(engine_args)
        transfer = connector_config(connector)
        if transfer is not None:
            arguments["kv_transfer_config"] = _transfer_config(transfer)
        self._clock = clock
        self._records: dict[str, RequestRecord] = {}
        self._serial = 0
        self.drafts = DraftCounts()
        """Tokens drafted and accepted so far; of engines with `log_stats`."""
        self._llm: Any = _start(EngineArgs(model=path, **arguments))
        self._core: Any = self._llm.engine_core.engine_core
        # The frontend's own step reads the core through this method; on the way through it the
        # outputs still have what the frontend drops.
        self._llm.engine_core.get_output = self._get_output

    # -- parts of the engine ------------------------------------------------------------------

    @property
    def llm_engine(self) -> Any:
        """vLLM's `LLMEngine`."""
        if self._llm is None:
            raise RuntimeError("the engine is closed")
        return self._llm

    @property
    def vllm_config(self) -> Any:
        """The resolved `VllmConfig`."""
        return self.llm_engine.vllm_config

    @property
    def scheduler(self) -> Any:
        """The engine core's `Scheduler`."""
        self._check_open()
        return self._core.scheduler

    @property
    def block_pool(self) -> Any:
        """The scheduler's `BlockPool`."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def kv_cache_config(self) -> Any:
        """The scheduler's `KVCacheConfig`: groups in order, one spec each."""
        return self.scheduler.kv_cache_config

    @property
    def connector(self) -> Any:
        """The connector on the scheduler's side, or None."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The connector on the worker's side, or None; only with one rank, in this process."""
        self._check_open()
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    @property
    def kv_caches(self) -> dict[str, Any]:
        """Layer name -> the worker's cache of that layer (a tensor, or a list for recurrent states)."""
        layers = self.vllm_config.compilation_config.static_forward_context
        names = (name for group in self.kv_cache_config.kv_cache_groups for name in group.layer_names)
        return {name: layers[name].kv_cache for name in names}

    def num_free_blocks(self) -> int:
        """Blocks that no request and no pin holds."""
        return int(self.block_pool.get_num_free_blocks())

    # -- requests -----------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        request_id: str | None = None,
        logprobs: int | None = 1,
        cache_salt: str | None = None,
        lora_request: Any = None,
        **sampling: Any,
    ) -> str:
        """Queue one greedy request that never stops early; returns the engine's own id for it.

        prompt: token ids. max_tokens: tokens to generate. sampling: further `SamplingParams`.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **options,
        )
        self._serial += 1
        name = request_id if request_id is not None else f"request-{self._serial}"
        started = self._clock()
        inputs = tokens_input(list(prompt), cache_salt=cache_salt)
        key: str = self.llm_engine.add_request(name, inputs, params, lora_request=lora_request)
        self._records[key] = RequestRecord(key, started, self._clock)
        return key

    def step(self) -> None:
        """One step of the engine: schedule, run, collect."""
        self.llm_engine.step()

    def finished(self, request_id: str) -> bool:
        """Whether the request with the engine's id `request_id` has ended."""
        return self._records[request_id].finish_reason is not None

    def take_result(self, request_id: str) -> Result:
        """The result of a finished request, which is forgotten. Raises KeyError, RuntimeError."""
        result = self._records[request_id].result()
        del self._records[request_id]
        return result

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        concurrency: int = 8,
        logprobs: int | None = 1,
        progress: Callable[[int, int], None] | None = None,
        ids: Sequence[str] | None = None,
        cache_salt: str | None = None,
        lora_request: Any = None,
        order: str = "same",
    ) -> list[Result]:
        """Run all prompts, at most `concurrency` unfinished at a time; results in prompt order.

        progress: called with (finished, all) after each request. ids: names for the requests.
        order: "same" or "reversed": the order in which prompts are handed over.
        Raises ValueError for impossible arguments.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: must be at least 1")
        if ids is not None and len(ids) != len(prompts):
            raise ValueError(f"{len(ids)} ids for {len(prompts)} prompts")
        queue = in_order(prompts, order)[::-1]
        running: dict[str, int] = {}
        results: dict[int, Result] = {}
        while queue or running:
            while queue and len(running) < concurrency:
                index = queue.pop()
                key = self.add(
                    prompts[index],
                    max_tokens=max_tokens,
                    request_id=None if ids is None else ids[index],
                    logprobs=logprobs,
                    cache_salt=cache_salt,
                    lora_request=lora_request,
                )
                running[key] = index
            self.step()
            for key in [key for key in running if self.finished(key)]:
                results[running.pop(key)] = self.take_result(key)
                if progress is not None:
                    progress(len(results), len(prompts))
        return [results[index] for index in range(len(prompts))]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests by the engine's own ids; they finish with the reason "abort"."""
        self.llm_engine.abort_request(list(request_ids), internal=True)
        for key in request_ids:
            record = self._records.get(key)
            if record is not None and record.finish_reason is None:
                record.finish_reason = "abort"

    def step_until_idle(self, deadline_seconds: float = 60.0) -> int:
        """Step until the scheduler has nothing left, saves of a connector included.

        Returns the number of steps. Raises TimeoutError after `deadline_seconds`.
        """
        end = time.monotonic() + deadline_seconds
        steps = 0
        while self.scheduler.has_requests():
            if time.monotonic() > end:
                raise TimeoutError(f"not idle after {deadline_seconds} s: {self._describe()}")
            self.step()
            steps += 1
        return steps

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Empty the engine's own prefix cache; False if blocks were still in use."""
        return bool(self.llm_engine.engine_core.reset_prefix_cache(reset_connector=reset_connector))

    # -- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut the engine down, connector included. Closing twice is fine."""
        llm, self._llm, self._core = self._llm, None, None
        if llm is None:
            return
        # The tap refers to this object, which would keep the engine alive.
        del llm.engine_core.get_output
        with _no_collections():
            llm.engine_core.shutdown()
            llm.renderer.shutdown()
        del llm
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._core is None:
            raise RuntimeError("the engine is closed")

    def _get_output(self) -> Any:
        from vllm.v1.engine import EngineCoreOutputs

        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        mine = (outputs and outputs.get(0)) or EngineCoreOutputs()
        self.drafts = self.drafts.plus(getattr(mine.scheduler_stats, "spec_decoding_stats", None))
        for output in mine.outputs:
            record = self._records.get(output.request_id)
            if record is not None:
                record.feed(output)
        if not executed and self._core.scheduler.has_requests():
            # As the server's loop does: a step without work lets transfer threads have the GIL.
            time.sleep(_IDLE_SECONDS)
        return mine

    def _describe(self) -> str:
        running, waiting = self.scheduler.get_request_counts()
        return (
            f"{running} running, {waiting} waiting, {len(self.scheduler.requests)} known to the scheduler, "
            f"{self.num_free_blocks()} of {self.block_pool.num_gpu_blocks} blocks free"
        )


def _prepare_environment() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Threads that spin at barriers make a tiny model many times slower as soon as another process
    # wants the cores. OpenMP reads this when torch is loaded; later it has no effect.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output belongs to the caller: a benchmark prints its JSON there.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def _tiny_arguments(name: str, seed: int) -> dict[str, Any]:
    """What the tiny model `name` needs: "model" is its path, and its drafter's is in what drafts."""
    spec = SPECS[name]
    provide_stubs(spec)
    arguments: dict[str, Any] = {**spec.engine, "model": os.fspath(make_model(name, seed=seed))}
    drafter = make_drafter(name, seed=seed)
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": os.fspath(drafter),
            "num_speculative_tokens": spec.draft_tokens,
        }
    return arguments


def _calm_llvmlite() -> None:
    """Give llvmlite's library object an empty `__dict__`, once numba has loaded it.

    vLLM's CPU platform reads `__dict__` of every object in every module when an engine starts; that
    object answers any name with a C function, and the engine fails to start.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    functions = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(functions, dict):
        functions["__dict__"] = {}


def _transfer_config(options: Mapping[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**options)


@contextmanager
def _no_collections() -> Iterator[None]:
    """In each life vLLM collects garbage eight times, over all of torch: more than half of the time that
    a tiny engine takes to start and end. Once at the end is enough."""
    with mock.patch("gc.collect", return_value=0):
        yield


def _start(arguments: Any) -> Any:
    """Start vLLM's engine; if that fails, undo what it had set up so that another one can start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        with _no_collections():
            return LLMEngine.from_engine_args(arguments)
    except BaseException:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        raise
