"""The engine's scheduler with the real connector does anything, in any order, with anything failing.

After every step the store's books balance and every pin is a reference that the engine knows of;
every token that attention reads, and every token sampled, is checked by the harness. At the end,
once nothing fails any more, every request has ended and nothing is leased, reserved or pinned.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.connector_support import KINDS, LAYOUTS
from harness.traffic import Traffic, make, random_traffic

MORE = int(os.environ.get("KVQUILT_STRESS", "1"))
"""How many times the usual number of examples and requests to try."""


class EngineMachine(RuleBasedStateMachine):
    """Rules are what may happen to the engine between two steps."""

    traffic: Traffic | None = None

    @initialize(name=st.sampled_from(sorted(LAYOUTS | KINDS)), seed=st.integers(0, 1 << 20))
    def begin(self, name: str, seed: int) -> None:
        self.traffic = Traffic(make(random.Random(seed), name), name)

    @property
    def now(self) -> Traffic:
        assert self.traffic is not None
        return self.traffic

    @precondition(lambda self: self.traffic is not None and len(self.traffic.live) < 10)
    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 400),
        tail=st.sampled_from([0, 0, 1, 5, 40]),
        max_tokens=st.sampled_from([1, 2, 20, 60]),
        salt=st.sampled_from([None, None, None, "x"]),
    )
    def add(self, base: int, length: int, tail: int, max_tokens: int, salt: str | None) -> None:
        self.now.add(base, length, tail, max_tokens, salt)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        self.now.step(times)

    @rule(which=st.integers(0, 9), mid_step=st.booleans())
    def abort(self, which: int, mid_step: bool) -> None:
        self.now.abort(which, mid_step)
        self.now.step(1)

    @rule(which=st.integers(0, 9))
    def preempt(self, which: int) -> None:
        self.now.preempt(which)

    @rule(connector=st.booleans(), running=st.booleans())
    def reset(self, connector: bool, running: bool) -> None:
        self.now.reset(connector, running)

    @rule(rank=st.integers(0, 1), times=st.integers(1, 8))
    def silence(self, rank: int, times: int) -> None:
        self.now.silence(rank)
        self.now.step(times)

    @rule(claims=st.booleans())
    def claim(self, claims: bool) -> None:
        self.now.claim(claims)

    @rule(
        which=st.integers(0, 60),
        rate=st.sampled_from([0.3, 1.0]),
        after=st.booleans(),
        seed=st.integers(0, 99),
        times=st.integers(1, 4),
    )
    def fail(self, which: int, rate: float, after: bool, seed: int, times: int) -> None:
        self.now.inject(which, rate, after, seed)
        self.now.step(times)
        self.now.calm()

    @rule()
    def full(self) -> None:
        self.now.fill()
        self.now.step(3)
        self.now.calm()

    @rule()
    def drain(self) -> None:
        self.now.drain()

    def teardown(self) -> None:
        if self.traffic is None:
            return
        with self.traffic.quilt:
            self.traffic.end()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of injected errors would be logged once per hook and engine."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_nothing_leaks_and_nothing_hangs_whatever_happens() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            settings.get_profile("ci"), max_examples=25 * MORE, stateful_step_count=40, derandomize=MORE == 1
        ),
    )


NUM_ENGINES = 10


def test_a_thousand_random_requests() -> None:
    """Ten engines of full and sliding groups, 100 requests each, all chosen by their seeds."""
    totals: Counter[str] = Counter()
    names = sorted(LAYOUTS)
    for seed in range(NUM_ENGINES * MORE):
        totals.update(random_traffic(seed, 100, names[seed % len(names)]))
    assert totals["requests"] >= 1_000
    assert totals["hit_tokens"] > 0
    assert totals["load_failures"] > 0


def test_random_requests_over_all_kinds_and_every_hit_is_the_brute_force_one() -> None:
    """Twenty-three layouts of all kinds; KVQUILT_STRESS=20 makes it 10,000 requests."""
    totals: Counter[str] = Counter()
    for seed in range(len(KINDS) * MORE):
        totals.update(random_traffic(1_000 + seed, 25, sorted(KINDS)[seed % len(KINDS)]))
    assert totals["requests"] >= 500
    assert totals["hits"] > 0
    assert totals["look-ups checked"] >= 100
    assert totals["load_failures"] > 0
