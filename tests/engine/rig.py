"""What the connector's engine tests share: prompts, what an engine without kvquilt says to them,
and one engine at a time, kept while tests ask for the same one."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvquilt.testing import Engine, Result, model_spec
from kvquilt.testing.copy_faults import CopyPlan, FaultyCopier

OUTPUT_TOKENS = 4
ANSWER_TOKENS = 24
VOCABULARY = (3, 2048)
POOL_BLOCKS = 900
RAM_BYTES = "96MiB"


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    """One prompt of random tokens per length; none shares its first token run with another."""
    rng = np.random.default_rng(seed)
    return [rng.integers(*VOCABULARY, length).tolist() for length in lengths]


SOME = random_prompts(1, 331, 331, 331, 331)
"""Four ordinary prompts."""
EDGES = random_prompts(2, 64, 65, 96, 97, 128, 129, 192, 193, 257)
"""One prompt for each way of lying on, or one past, a boundary."""
BRANCH = [prompt[:220] + tail for prompt, tail in zip(SOME, random_prompts(3, *[111] * 4), strict=True)]
"""Prompts that leave those of SOME after 220 tokens."""
TURN_1 = random_prompts(4, 370, 370)
"""First turns whose answers of `ANSWER_TOKENS` cross a boundary."""


class Truth:
    """What an engine without kvquilt answers, by prompt."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.layout = model_spec(model).layout
        self._answers: dict[tuple[int, ...], Result] = {}
        with Engine(model, num_blocks=POOL_BLOCKS, max_model_len=2048) as engine:
            for prompts in (SOME, EDGES, BRANCH):
                assert engine.reset_prefix_cache()
                self._ask(engine, prompts, OUTPUT_TOKENS)
            self._ask(engine, TURN_1, ANSWER_TOKENS)
            assert engine.reset_prefix_cache()
            engine.run(EDGES, max_tokens=1, concurrency=1)
            hits = engine.run(EDGES, max_tokens=OUTPUT_TOKENS, concurrency=1)
            self.own_hits = {tuple(p): hit for p, hit in zip(EDGES, hits, strict=True)}
            """What it answers to EDGES out of its own prefix cache. A last token computed alone goes
            through other kernels than one among many, which moves the last bits."""
            assert engine.reset_prefix_cache()
            tails = random_prompts(5, 30, 30)
            self.turn_2 = [
                [*prompt, *self.of(prompt).tokens, *tail] for prompt, tail in zip(TURN_1, tails, strict=True)
            ]
            """Second turns: the first prompt, the whole answer, 30 tokens more."""
            self._ask(engine, self.turn_2, OUTPUT_TOKENS)

    def of(self, prompt: Sequence[int]) -> Result:
        return self._answers[tuple(prompt)]

    def boundary(self, prompt: Sequence[int]) -> int:
        """The longest hit that can be had for a prompt."""
        return self.layout.max_boundary(len(prompt))

    def _ask(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        answers = engine.run(prompts, max_tokens=max_tokens, concurrency=1)
        self._answers |= {tuple(p): a for p, a in zip(prompts, answers, strict=True)}


class Rig:
    """An engine with kvquilt, emptied, and the truth for its model."""

    def __init__(self, engine: Engine, truth: Truth) -> None:
        self.engine = engine
        self.truth = truth

    @property
    def connector(self) -> Any:
        """Our connector on the scheduler's side, also below a MultiConnector."""
        connector = self.engine.connector
        return next(iter(getattr(connector, "sub_connectors", [connector])))

    @property
    def worker_connector(self) -> Any:
        connector = self.engine.worker_connector
        return next(iter(getattr(connector, "sub_connectors", [connector])))

    @property
    def side(self) -> Any:
        return self.connector.scheduler_side

    @property
    def worker(self) -> Any:
        return self.worker_connector.worker_side

    def total(self, name: str, label: str | None = None) -> float:
        return float(self.side.meter.total(name, label))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = OUTPUT_TOKENS,
        concurrency: int = 1,
        **more: Any,
    ) -> list[Result]:
        return self.engine.run(prompts, max_tokens=max_tokens, concurrency=concurrency, **more)

    def fill(self, prompts: Sequence[Sequence[int]], **more: Any) -> list[Result]:
        """Run cold prompts, and wait until their saves are committed."""
        results = self.run(prompts, **more)
        self.engine.step_until_idle()
        return results

    def forget_locally(self) -> None:
        """Empty the engine's own cache, and only that."""
        self.engine.step_until_idle()
        assert self.engine.reset_prefix_cache()

    def forget_stored(self) -> None:
        """Empty the store, and only that: the engine keeps its cache."""
        self.engine.step_until_idle()
        self.side.store.reset()

    def faulty(self, plan: CopyPlan) -> FaultyCopier:
        """From now on the worker's copies go wrong by `plan`; job numbers count from here."""
        copier = FaultyCopier(self.worker.copier, plan)
        self.worker.copier = copier
        return copier

    def heal(self) -> None:
        """Undo `faulty`, and let what was held back end."""
        while isinstance(self.worker.copier, FaultyCopier):
            self.worker.copier.heal()
            self.engine.step_until_idle()
            self.worker.poll()
            self.worker.copier = self.worker.copier._inner

    def assert_answers(
        self, results: Sequence[Result], prompts: Sequence[Sequence[int]], drift: float = 0.0
    ) -> None:
        """Equal to a run without kvquilt: tokens, and log-probabilities within `drift`."""
        assert len(results) == len(prompts)
        for result, want in zip(results, map(self.truth.of, prompts), strict=True):
            count = len(result.tokens)
            assert count
            assert result.tokens == want.tokens[:count]
            moved = [abs(a - b) for a, b in zip(result.logprobs, want.logprobs[:count], strict=True)]
            assert max(moved) <= drift, f"log-probabilities moved by {max(moved)}"

    def assert_hits(
        self, results: Sequence[Result], prompts: Sequence[Sequence[int]], boundary: int | None = None
    ) -> None:
        """Each prompt's hit came from kvquilt alone and is the longest there is (or `boundary`)."""
        hits = [(r.local_hit_tokens, r.external_hit_tokens) for r in results]
        assert all(external > 0 for _, external in hits), f"a test that never hits proves nothing: {hits}"
        assert hits == [(0, self.truth.boundary(p) if boundary is None else boundary) for p in prompts]

    def assert_clean(self) -> None:
        """Nothing is held: no lease, ticket, pin or block; and nothing went wrong unseen."""
        self.engine.step_until_idle()
        audit = self.side.store.audit()
        assert (audit.leases, audit.tickets) == (0, 0)
        assert len(self.side.pins) == 0
        assert self.side.loads.under_way() == self.side.saves.under_way() == 0
        assert self.engine.num_free_blocks() == self.engine.block_pool.num_gpu_blocks - 1


class Keeper:
    """Keeps one engine alive while the same one is asked for: two in one process would share
    the worker's connector."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._engine: Engine | None = None

    def rig(
        self, truth: Truth, options: Mapping[str, Any] | None = None, *, fresh: bool = False, **engine: Any
    ) -> Rig:
        """An engine for the truth's model with these connector options, both caches emptied.

        fresh: not one that another test has used.
        """
        options = (
            {"ram_bytes": RAM_BYTES} | dict(options or {})
            if "kv_connector" not in (options or {})
            else options
        )
        engine = {"num_blocks": POOL_BLOCKS, "max_model_len": 2048} | engine
        key = repr((truth.model, options, sorted(engine.items())))
        if fresh or key != self._key or self._engine is None:
            self.close()
            self._engine, self._key = Engine(truth.model, connector=options, **engine), key
        rig = Rig(self._engine, truth)
        self._engine.step_until_idle()
        assert self._engine.reset_prefix_cache(reset_connector=True)
        return rig

    def keeps(self, rig: Rig) -> bool:
        """Whether the rig's engine is still alive."""
        return rig.engine is self._engine

    def close(self) -> None:
        engine, self._engine, self._key = self._engine, None, None
        if engine is not None:
            engine.close()
        gc.collect()
