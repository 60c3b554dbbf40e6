"""The phases: prompts through an engine without kvquilt, then through one with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvquilt.bench.clock import PausableClock, UnclockedObserver
from kvquilt.bench.control import ZeroingCopier
from kvquilt.bench.engines import empty_engine, open_engine, run_one_by_one
from kvquilt.bench.expect import holds, kept_pages
from kvquilt.bench.progress import BenchProgress
from kvquilt.bench.report import logprob_drift
from kvquilt.bench.setup import BenchSetup
from kvquilt.bench.workload import Prompt
from kvquilt.errors import BenchError
from kvquilt.layout import CacheLayout
from kvquilt.testing.engine import Engine
from kvquilt.testing.pages import PageRecorder, PageReport
from kvquilt.testing.results import DraftCounts, Result

__all__ = [
    "Counts",
    "Reference",
    "Tested",
    "check_layout",
    "counts_of",
    "run_phase",
    "run_reference",
    "run_tested",
    "watch_pages",
]

Results = list[Result]
CONTROL_PROMPTS = 12


@dataclass(frozen=True)
class Reference:
    """Results without kvquilt: prompts computed, prompts from the engine's own prefix cache,
    branches computed, and second branches computed where forks matter.

    drift: the largest difference of a log-probability between a prompt computed and the same prompt
    from the engine's own prefix cache, in batches of several sizes.
    """

    cold: Results
    warm: Results
    branch: Results
    second_branch: Results
    drift: float
    drafts: Mapping[str, DraftCounts]


@dataclass(frozen=True)
class Counts:
    """The connector's counters at one moment: metric -> label -> number; pages and bytes by group."""

    totals: Mapping[str, Mapping[str, float]]
    pages: Mapping[str, int]
    bytes_resident: Mapping[str, int]
    evictions: Mapping[str, int]

    def since(self, before: Counts, metric: str, label: str | None = None) -> int:
        """Growth of a counter, over all labels or of one."""
        return self._sum(metric, label) - before._sum(metric, label)

    def _sum(self, metric: str, label: str | None) -> int:
        values = self.totals.get(metric, {})
        return int(sum(values.values()) if label is None else values.get(label, 0))


@dataclass(frozen=True)
class Tested:
    """Results with kvquilt, its counters around the phases, and the control: group -> prompts whose
    output changed. drafts: by phase."""

    cold: Results
    warm: Results
    branch: Results
    second_branch: Results
    start: Counts
    before_warm: Counts
    after_warm: Counts
    end: Counts
    pages: PageReport
    sensitivity: Mapping[str, int]
    drafts: Mapping[str, DraftCounts]


def run_reference(setup: BenchSetup, progress: BenchProgress, *, branches: bool = True) -> Reference:
    """The engine alone: the outputs to equal, and its own prefix hits as the bound.

    Its drift is taken where kvquilt's is: over prompts and branches from its own cache. Prompts also
    come one by one, as loads end one by one: hits that begin together stay in step for good, and
    would never show what a batch of an odd size, or a prefill beside decodes, does to the last bits.

    branches: run those, too.
    """
    work, order, size = setup.work, setup.config.order, setup.config.concurrency
    branch_boundary = setup.expected.best_branch // setup.config.requests
    with open_engine(
        setup, progress, connector=None, clock=PausableClock(), keep_boundary=branch_boundary
    ) as engine:
        cold = run_phase(engine, setup, progress, "prompts, computed", work.prompts)
        drafts = engine.drafts
        warm = run_phase(engine, setup, progress, "engine_warm", work.prompts, order)
        drafts = engine.drafts.since(drafts)
        sizes = (size, size - 1) if size > 1 else ()
        own_warm = [_own_hits(engine, setup, progress, n) for n in sizes]
        own_branch: Results = []
        branch: Results = []
        second: Results = []
        if branches:
            own_branch = run_phase(engine, setup, progress, "its own hits, branches", work.branches)
            empty_engine(engine)
            branch = run_phase(engine, setup, progress, "branches, computed", work.branches)
        if branches and setup.expected.second_branch is not None:
            empty_engine(engine)
            second = run_phase(engine, setup, progress, "second branches, computed", work.second_branches)
    drifts = [logprob_drift(results, cold) for results in (warm, *own_warm)]
    drift = max(*drifts, logprob_drift(own_branch, branch))
    return Reference(cold, warm, branch, second, drift, {"engine_warm": drafts})


def _own_hits(engine: Engine, setup: BenchSetup, progress: BenchProgress, at_once: int) -> Results:
    prompts = setup.work.prompts
    with progress.stage(f"  its own hits, one by one, {at_once} at most") as advance:
        return run_one_by_one(
            engine, prompts, max_tokens=setup.config.output_tokens, concurrency=at_once, progress=advance
        )


def run_tested(
    setup: BenchSetup,
    reference: Reference,
    progress: BenchProgress,
    prepare: Callable[[Engine], None] | None = None,
) -> Tested:
    """The engine with kvquilt: cold, warm, branch, and the control.

    prepare: called with the engine before the first phase; tests damage copies there.
    """
    work, order, clock = setup.work, setup.config.order, PausableClock()
    options = {**setup.config.options, "ram_bytes": setup.ram_bytes}
    with open_engine(setup, progress, connector=options, clock=clock) as engine:
        check_layout(engine, setup)
        pages = watch_pages(engine, clock)
        if prepare is not None:
            prepare(engine)
        drafts: dict[str, DraftCounts] = {}

        def phase(name: str, prompts: Sequence[Prompt], order: str = "same") -> Results:
            before = engine.drafts
            results = run_phase(engine, setup, progress, name, prompts, order)
            empty_engine(engine)
            drafts[name] = engine.drafts.since(before)
            return results

        start = counts_of(engine)
        cold = phase("cold", work.prompts)
        before_warm = counts_of(engine)
        warm = phase("kvquilt_warm", work.prompts, order)
        after_warm = counts_of(engine)
        branch = phase("branch", work.branches)
        again = setup.expected.second_branch is not None
        second = phase("second_branch", work.second_branches) if again else []
        end = counts_of(engine)
        engine.worker_connector.worker_side.observer = None
        sensitivity = _control(engine, setup, reference, progress)
    return Tested(
        cold=cold,
        warm=warm,
        branch=branch,
        second_branch=second,
        start=start,
        before_warm=before_warm,
        after_warm=after_warm,
        end=end,
        pages=pages.report(),
        sensitivity=sensitivity,
        drafts=drafts,
    )


def run_phase(
    engine: Engine,
    setup: BenchSetup,
    progress: BenchProgress,
    name: str,
    prompts: Sequence[Prompt],
    order: str = "same",
) -> Results:
    """Run prompts as the run's config says, shown as the stage `name`."""
    with progress.stage(f"  {name}") as advance:
        return engine.run(
            prompts,
            max_tokens=setup.config.output_tokens,
            concurrency=setup.config.concurrency,
            progress=advance,
            order=order,
        )


def check_layout(engine: Engine, setup: BenchSetup) -> None:
    """What was expected was expected of these groups, so the engine must have them."""
    found, planned = engine.connector.scheduler_side.layout, setup.model.layout
    if found != planned:
        raise BenchError(
            f"the engine made other cache groups of --model={setup.config.model} than its config.json says: "
            f"{_describe(found)} instead of {_describe(planned)}"
        )


def _describe(layout: CacheLayout) -> str:
    return ", ".join(f"{g.name} ({g.tokens_per_block} tokens, {g.page_bytes} B)" for g in layout.groups)


def watch_pages(engine: Engine, clock: PausableClock) -> PageRecorder:
    """Have every page digested at save and after load, outside the clock."""
    side = engine.connector.scheduler_side
    side.saves.record_keys = side.loads.record_keys = True
    recorder = PageRecorder(engine.kv_caches, engine.kv_cache_config)
    engine.worker_connector.worker_side.observer = UnclockedObserver(recorder, clock)
    return recorder


def counts_of(engine: Engine) -> Counts:
    """The connector's counters now."""
    side = engine.connector.scheduler_side
    groups = side.store.stats().groups
    return Counts(
        totals={name: dict(values) for name, values in side.meter.totals.items()},
        pages={g.name: g.pages for g in groups},
        bytes_resident={g.name: g.bytes_used for g in groups},
        evictions={g.name: g.evictions for g in groups},
    )


def _control(
    engine: Engine, setup: BenchSetup, reference: Reference, progress: BenchProgress
) -> dict[str, int]:
    """Load each group in turn as zeros; count the prompts whose output changes."""
    layout, worker = setup.model.layout, engine.worker_connector.worker_side
    prompts = setup.work.prompts[: _control_size(setup)]
    expected = [result.tokens for result in reference.cold]
    tested = [(i, g) for i, g in enumerate(layout.groups) if g.cacheable and g.page_bytes]
    tested = [(i, g) for i, g in tested if not g.draft and g.name not in setup.model.draft_groups]
    run_phase(engine, setup, progress, "control: prompts again", prompts)
    changed: dict[str, int] = {}
    copier = worker.copier
    for index, group in tested:
        empty_engine(engine)
        worker.copier = ZeroingCopier(copier, index)
        try:
            results = run_phase(engine, setup, progress, f"control: {group.name} as zeros", prompts)
        finally:
            worker.copier = copier
        changed[group.name] = sum(r.tokens != tokens for r, tokens in zip(results, expected, strict=False))
    return changed


def _control_size(setup: BenchSetup) -> int:
    """Prompts that the budget holds at once, so that all of them are loaded; at least one."""
    pages = {
        name: int(mask.sum())
        for name, mask in kept_pages(setup.model.layout, setup.config, setup.options).items()
    }
    size = min(CONTROL_PROMPTS, setup.config.requests)
    while size > 1 and not holds(setup.plan, {name: size * count for name, count in pages.items()}):
        size -= 1
    return size
