"""Each kind of group in a real engine: prompts twice and forks, the engine's own cache emptied between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.model_executor.models import registry
from vllm.v1.request import Request

from kvquilt.layout import needed_blocks
from kvquilt.store import Chain
from kvquilt.testing import Engine, PageRecorder, Result, model_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT_TOKENS = 830
SHARED_TOKENS = 553
OUTPUT_TOKENS = 4
RECURRENT = (
    "qwen3-next-mini",
    "qwen3.5-mini",
    "granite-hybrid-mini",
    "falcon-h1-mini",
    "nemotron-h-mini",
)
OTHERS = ("gemma4-draft-mini", "gpt-oss-mini", "llama4-mini", "olmo3-mini", "mla-mini")


class Run:
    """An engine with kvquilt that starts empty, every page watched."""

    def __init__(self, name: str) -> None:
        self.layout = model_spec(name).layout
        self.engine = Engine(
            name,
            connector={"ram_bytes": "96MiB"},
            num_blocks=1200,
            max_model_len=1024,
            max_num_seqs=1,
        )
        self.side = self.engine.connector.scheduler_side
        while not self.side._attached:
            assert not self.side._broken
            self.engine.run([[5, 6, 7]], max_tokens=1)
        self.engine.step_until_idle()
        self.side.saves.record_keys = self.side.loads.record_keys = True
        self.pages = PageRecorder(self.engine.kv_caches, self.engine.kv_cache_config)
        self.engine.worker_connector.worker_side.observer = self.pages

    def ask(self, prompts: list[list[int]]) -> list[Result]:
        """The answers, from nothing but what kvquilt holds."""
        self.engine.step_until_idle()
        assert self.engine.reset_prefix_cache()
        answers = self.engine.run(prompts, max_tokens=OUTPUT_TOKENS, concurrency=1)
        self.engine.step_until_idle()
        assert {answer.local_hit_tokens for answer in answers} == {0}
        return answers

    def forget(self) -> None:
        self.engine.step_until_idle()
        assert self.engine.reset_prefix_cache(reset_connector=True)

    def assert_pages(self, *boundaries: int) -> None:
        """All pages of these hits were compared, of every group, and were equal."""
        report = self.pages.report()
        for index, group in enumerate(self.layout.groups):
            want = sum(int(hi - lo) for lo, hi in (needed_blocks(group, end) for end in boundaries))
            assert report.compared_by_group.get(index, 0) == want > 0, group.name
        assert (report.equal, report.unknown) == (report.compared, 0), report.mismatches

    def assert_clean(self) -> None:
        assert not self.engine.connector._hook_errors
        assert not self.engine.worker_connector._hook_errors
        assert self.side.meter.total("load_failures") == 0
        audit = self.side.store.audit()
        assert (audit.leases, audit.tickets, len(self.side.pins)) == (0, 0, 0)


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    # The engine looks at each model class in a new process, to keep CUDA out of this one: seconds each.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look(), raising=False)
    run = Run(request.param)
    try:
        yield run
        run.assert_clean()
    finally:
        run.engine.close()


def prompts(count: int) -> list[list[int]]:
    """Prompts that share their first tokens and nothing else."""
    rows: Any = np.random.default_rng(11).integers(3, 2048, (count, PROMPT_TOKENS))
    rows[:, :SHARED_TOKENS] = rows[0, :SHARED_TOKENS]
    rows[:, SHARED_TOKENS] = np.arange(3, 3 + count)
    return [list(map(int, row)) for row in rows]


def hits(answers: list[Result]) -> list[int]:
    return [answer.external_hit_tokens for answer in answers]


def assert_same(answers: list[Result], computed: list[Result]) -> None:
    for answer, want in zip(answers, computed, strict=True):
        assert answer.tokens == want.tokens
        assert answer.logprobs == pytest.approx(want.logprobs, abs=1e-5)


@pytest.mark.parametrize("run", OTHERS, indirect=True)
def test_prompts_and_forks_hit_all_that_the_layout_allows(run: Run) -> None:
    first, fork = prompts(2)
    (fork_computed,) = run.ask([fork])
    run.forget()
    (computed,) = run.ask([first])
    (again,) = run.ask([first])
    (forked,) = run.ask([fork])
    end, branch = run.layout.max_boundary(PROMPT_TOKENS), run.layout.max_boundary(SHARED_TOKENS + 1)
    assert hits([computed, again, forked]) == [0, end, branch]
    assert_same([again, forked], [computed, fork_computed])
    run.assert_pages(end, branch)


@pytest.mark.parametrize("run", RECURRENT, indirect=True)
def test_states_serve_a_prompt_at_once_and_a_fork_the_second_time(run: Run) -> None:
    first, fork, second = prompts(3)
    (second_computed,) = run.ask([second])
    run.forget()
    (computed,) = run.ask([first])
    (again,) = run.ask([first])
    (forked,) = run.ask([fork])
    (resumed,) = run.ask([second])
    end, branch = run.layout.max_boundary(PROMPT_TOKENS), run.layout.max_boundary(SHARED_TOKENS + 1)
    assert hits([computed, again, forked, resumed]) == [0, end, 0, branch]
    assert_same([again, resumed], [computed, second_computed])
    run.assert_pages(end, branch)


@pytest.mark.parametrize("run", ["gemma4-draft-mini"], indirect=True)
def test_a_hit_does_without_pages_that_only_the_drafter_lacks(run: Run) -> None:
    """Its blocks are filled with zeros: fewer drafts may be accepted, the output is the same."""
    (prompt,) = prompts(1)
    (computed,) = run.ask([prompt])
    (warm,) = run.ask([prompt])
    assert run.side.meter.total("hit_tokens", "draft.full") == 0
    index = run.layout.index("draft.full")
    request = Request(
        "hashed",
        prompt,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=run.engine._core.request_block_hasher,
    )
    chain = Chain(run.layout, list(request.block_hashes))
    lost = np.arange(chain.num_blocks(index))
    assert run.side.store.withdraw(chain, index, lost) == lost.size > 0
    (without,) = run.ask([prompt])
    assert hits([warm, without]) == [run.layout.max_boundary(PROMPT_TOKENS)] * 2
    assert_same([warm, without], [computed, computed])
    assert run.side.meter.total("hit_tokens", "draft.full") == without.external_hit_tokens
