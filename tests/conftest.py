"""Environment of all tests. It is set at import, before any test module imports an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("kvquilt.testing.tier_contract")

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    # The engine core in this process: tests look into it, and no child outlives a failed test.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Models are made from a seed; nothing may reach out for weights, configs or statistics.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The engine's threads spin between parallel regions otherwise, and starve the copy threads of
    # a small machine. Read when torch is loaded.
    "OMP_WAIT_POLICY": "passive",
    # Compiled kernels are kept between runs, in one place that `make clean` empties.
    "NUMBA_CACHE_DIR": str(ROOT / ".cache" / "numba"),
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# Deadlines measure the machine, not the code. "ci" tries the same examples on every run, so that a
# failure is a change; "explore" looks for new ones: HYPOTHESIS_PROFILE=explore make test
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _fresh_logger() -> Iterator[None]:
    """The connector takes over the engine's handlers and level; the next test is to see its own."""
    engine = logging.getLogger("vllm")
    level = engine.level  # the bench turns it down for its process
    yield
    engine.setLevel(level)
    logger = logging.getLogger("kvquilt")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
