"""Tensor parallelism with real worker processes: one slot holds all ranks' pages, and all or none count."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from engine.processes import Child, left_behind, wait_until
from engine.rig import random_prompts
from kvquilt.testing import Engine, Result
from kvquilt.testing.copy_faults import CopyPlan
from kvquilt.testing.ranks import RANK_PROBE, Ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANKS = 2
BINDING = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
"""A core for each rank; the engine's own choice asks for a NUMA node for each."""
OPTIONS = {"ram_bytes": "64MiB", "load_timeout_seconds": 5.0}
LENGTHS = (331, 331, 200, 449)
TOKENS = 8
MODELS = ("gemma4-mini", "granite-hybrid-mini", "mla-mini")


class Rig:
    """One engine with a worker process per rank."""

    def __init__(self, model: str, engine: Engine) -> None:
        self.model, self.engine, self.ranks = model, engine, Ranks(engine)
        self.side: Any = engine.connector.scheduler_side
        self.ranks.record()
        # The first copies compile their kernels, and a busy machine is slow: no save is to be given up.
        self.side.pins.cap = 1_000_000
        self.run(random_prompts(10, 331))

    def empty(self) -> None:
        self.engine.step_until_idle()
        assert self.engine.reset_prefix_cache(reset_connector=True)

    def run(self, prompts: list[list[int]], concurrency: int = 1) -> list[Result]:
        results = self.engine.run(prompts, max_tokens=TOKENS, concurrency=concurrency)
        self.engine.step_until_idle()
        return results

    def forget(self) -> None:
        """Empty the engine's own cache; the store keeps its pages."""
        self.engine.step_until_idle()
        assert self.engine.reset_prefix_cache()

    def boundaries(self, prompts: list[list[int]]) -> list[int]:
        return [self.side.layout.max_boundary(len(prompt)) for prompt in prompts]

    def count(self, name: str) -> float:
        return float(self.side.meter.total(name))

    def assert_clean(self) -> None:
        self.engine.step_until_idle()
        audit = self.side.store.audit()
        assert (audit.leases, audit.tickets, len(self.side.pins)) == (0, 0, 0)
        assert self.side.loads.under_way() == self.side.saves.under_way() == 0
        assert self.engine.num_free_blocks() == self.engine.block_pool.num_gpu_blocks - 1
        assert not self.engine.connector._hook_errors


def said(results: list[Result]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(tuple(result.tokens), tuple(result.logprobs)) for result in results]


def external(results: list[Result]) -> list[int]:
    assert all(result.local_hit_tokens == 0 for result in results)
    return [result.external_hit_tokens for result in results]


# ---- a worker that dies ----

_DYING = """
import os
from vllm import LLM, SamplingParams
from kvquilt.testing import make_model
from kvquilt.testing.ranks import RANK_PROBE

if __name__ == "__main__":
    llm = LLM(
        make_model("gemma4-mini").as_posix(), dtype="float32", block_size=32, max_model_len=4096,
        num_gpu_blocks_override=900, kv_cache_memory_bytes=256 << 20, enforce_eager=True,
        skip_tokenizer_init=True, disable_hybrid_kv_cache_manager=False, tensor_parallel_size=2,
        kv_transfer_config={
            "kv_connector": "KVQuiltConnector", "kv_connector_module_path": "kvquilt.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": {"ram_bytes": "64MiB"},
        },
        **RANK_PROBE,
    )
    def ask(tokens):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [5 + i * i % 1999 for i in range(331)]}
        return llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens
    ask(4)
    llm.reset_prefix_cache()
    print("hit", ask(4), flush=True)
    print("workers", *llm.collective_rpc("kvquilt_pid"), flush=True)
    try:
        ask(3500)
    except Exception as error:
        print("ended", type(error).__name__, flush=True)
    else:
        print("ended", "with an answer", flush=True)
"""


def test_a_killed_worker_ends_the_engine_cleanly(tmp_path: Path) -> None:
    """SIGKILL in the middle of a request: the engine ends without an answer; nothing of it is left."""
    before = set(Path("/dev/shm").iterdir())
    more = {"VLLM_CPU_OMP_THREADS_BIND": BINDING, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with Child([sys.executable, "-c", textwrap.dedent(_DYING)], tmp_path, more) as child:
        assert child.expect("hit").split()[1] == "320"
        workers = [int(pid) for pid in child.expect("workers").split()[1:]]
        assert len(workers) == RANKS
        assert set(workers) < set(child.members())
        os.kill(workers[1], signal.SIGKILL)
        line = child.next_line("ended")
        # None: on a busy machine the engine's own clean-up ends the process before any error reaches it.
        assert line is None or line.split()[1] == "EngineDeadError", line
        child.wait()
        wait_until(lambda: not child.members(), f"still there: {child.members()}")
        assert left_behind([child], tmp_path) == []
        ours = [path for path in set(Path("/dev/shm").iterdir()) - before if "kvquilt" in path.name]
        assert ours == []


# ---- all ranks or none ----


@pytest.fixture(scope="module", params=MODELS)
def two_ranks(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", BINDING)
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        with Engine(
            request.param,
            connector=OPTIONS,
            num_blocks=900,
            max_model_len=1024,
            tensor_parallel_size=RANKS,
            **RANK_PROBE,
        ) as engine:
            yield Rig(request.param, engine)


@pytest.fixture
def rig(two_ranks: Rig) -> Iterator[Rig]:
    two_ranks.empty()
    yield two_ranks
    two_ranks.ranks.heal()
    two_ranks.assert_clean()


def test_every_rank_gets_back_what_it_saved(rig: Rig) -> None:
    """The same tokens and log-probabilities, and each page on each rank byte for byte."""
    pids = rig.ranks.pids()
    assert len({*pids, os.getpid()}) == RANKS + 1
    prompts = random_prompts(11, *LENGTHS)
    before = rig.ranks.reports()
    cold = rig.run(prompts)
    assert external(cold) == [0] * len(prompts)
    rig.forget()
    warm = rig.run(prompts)
    assert external(warm) == rig.boundaries(prompts)
    assert min(external(warm)) > 0
    assert said(warm) == said(cold)
    loaded = rig.count("loaded_pages")
    for report, old in zip(rig.ranks.reports(), before, strict=True):
        assert report.mismatches == ()
        assert report.compared == report.equal
        assert report.compared - old.compared > 3 * len(prompts)
        assert report.unknown == 0
        assert set(report.compared_by_group) == {
            i for i, group in enumerate(rig.side.layout.groups) if group.cacheable
        }
    assert loaded >= report.compared - old.compared  # pages are counted once, not for each rank


def test_ranks_hold_different_bytes_but_for_latent_ones(rig: Rig) -> None:
    """The control of the test above: pages that came back to the wrong rank would not be equal. A
    latent page is the same on all ranks, and there is room for one of them."""
    rig.run(random_prompts(12, 331))
    blocks = list(range(1, 9))  # the lowest ids are given out first
    for index, group in enumerate(rig.side.layout.groups):
        one, two = rig.ranks.digests(index, blocks)
        assert len(set(one)) > 1
        assert group.replicated == (rig.model == "mla-mini")
        assert (one == two) == group.replicated
        pages = 1 if group.replicated else RANKS
        assert 0 <= rig.side.plan.slot_bytes[group.name] - pages * group.page_bytes < 4096


def test_many_at_once(rig: Rig) -> None:
    """Ranks never disagree about a hit: they would wait for each other for ever."""
    prompts = random_prompts(13, *[331 + 16 * i for i in range(8)])
    cold = rig.run(prompts)
    rig.forget()
    warm = rig.run(prompts, concurrency=len(prompts))
    assert external(warm) == rig.boundaries(prompts)
    for report in rig.ranks.reports():
        assert (report.mismatches, report.unknown) == ((), 0)
    # In bfloat16 a batch of eight says other things than eight alone, with or without hits.
    if rig.engine.vllm_config.model_config.dtype == torch.float32:
        assert [result.tokens for result in warm] == [result.tokens for result in cold]


def test_b10_prompts_that_share_a_prefix_and_part(rig: Rig) -> None:
    """B10: shared blocks from the store, other tails; each as without any hit, on every rank."""
    # Tails long enough that no prompt's own last state lies where they part.
    shared, *tails = random_prompts(18, 3 * 128, 270, 281, 292)
    prompts = [shared + tail for tail in tails]
    alone = []
    for prompt in prompts:
        rig.empty()
        alone += rig.run([prompt])
    assert external(alone) == [0, 0, 0]
    rig.empty()
    together = []
    for prompt in prompts:
        together += rig.run([prompt])
        rig.forget()
    # A state is made where the second prompt leaves the first, and serves the third.
    states = any(group.kind == "recurrent" for group in rig.side.layout.groups)
    assert external(together) == [0, 0 if states else len(shared), len(shared)]
    for with_hit, without in zip(together, alone, strict=True):
        assert with_hit.tokens == without.tokens
        assert max(abs(a - b) for a, b in zip(with_hit.logprobs, without.logprobs, strict=True)) < 1e-3
    for report in rig.ranks.reports():
        assert (report.mismatches, report.unknown) == ((), 0)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_load_that_fails_on_one_rank_is_recomputed_on_all(rig: Rig, rank: int) -> None:
    prompts = random_prompts(14 + rank, 331, 449)
    cold = rig.run(prompts)
    rig.forget()
    failed = rig.count("load_failures")
    rig.ranks.fault(rank, CopyPlan(at={0: "tear"}))
    warm = rig.run(prompts)
    assert rig.ranks.faults()[rank] == [(0, "load", "tear")]
    assert rig.ranks.faults()[1 - rank] == []
    assert rig.count("load_failures") == failed + 1
    assert external(warm) == [0, rig.boundaries(prompts)[1]]
    assert said(warm) == said(cold)


def test_a_rank_that_stays_silent_fails_the_load_in_time(rig: Rig) -> None:
    prompts = random_prompts(16, 331)
    cold = rig.run(prompts)
    rig.forget()
    rig.ranks.fault(1, CopyPlan(at={0: "silent"}))
    warm = rig.engine.run(prompts, max_tokens=TOKENS, concurrency=1)
    assert rig.ranks.faults()[1] == [(0, "load", "silent")]
    assert external(warm) == [0]
    assert said(warm) == said(cold)
    assert rig.side.loads.under_way() == 1  # its slots stay leased until its copy has really ended
    rig.ranks.heal()
    rig.engine.step_until_idle()
    assert rig.side.loads.under_way() == 0


def test_what_one_rank_could_not_save_is_not_there(rig: Rig) -> None:
    prompts = random_prompts(17, 331)
    rig.ranks.fault(0, CopyPlan(rates={"fail": 1.0}, directions=("save",)))
    failed = rig.count("saves_failed")
    cold = rig.run(prompts)
    assert rig.count("saves_failed") > failed
    assert sum(group.pages for group in rig.side.store.stats().groups) == 0
    rig.ranks.heal()
    rig.forget()
    again = rig.run(prompts)
    assert external(again) == [0]
    assert said(again) == said(cold)
    rig.forget()
    assert external(rig.run(prompts)) == rig.boundaries(prompts)
