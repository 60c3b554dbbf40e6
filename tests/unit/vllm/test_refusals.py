"""Ways of running the engine in parallel that are refused at start, by name, and one that is served."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvquilt.errors import ConfigError
from kvquilt.vllm.connector import _check_engine
from kvquilt.vllm.start import warn_of_stray_drafts


def config(role: str = "kv_both", **parallel: Any) -> Any:
    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "mp",
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
    )


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"],
)
def test_refused_with_name_and_value(name: str) -> None:
    """Context parallelism multiplies the blocks' tokens; stages and hosts have pages of their own."""
    _check_engine(config())
    with pytest.raises(ConfigError, match=rf"{name}=2: only 1 is served"):
        _check_engine(config(**{name: 2}))


@pytest.mark.parametrize(
    ("method", "groups", "second_runner", "warns"),
    [
        ("draft_model", 2, False, True),
        ("draft_model", 2, True, False),
        ("draft_model", 1, False, False),
        ("ngram", 2, False, False),
    ],
)
def test_an_engine_whose_drafts_overwrite_group_0_is_named(
    method: str, groups: int, second_runner: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method), use_v2_model_runner=second_runner
    )
    with caplog.at_level(logging.WARNING, logger="kvquilt"):
        warn_of_stray_drafts(engine, groups)  # type: ignore[arg-type]
    assert ("write over pages of cache group 0" in caplog.text) == warns


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_executors_whose_workers_may_be_elsewhere_are_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"distributed_executor_backend='{backend}'"):
        _check_engine(config(distributed_executor_backend=backend))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles_of_other_connectors_are_refused(role: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_role='{role}'.*kv_both"):
        _check_engine(config(role))


@pytest.mark.parametrize("backend", ["mp", "uni", None])
def test_tensor_and_data_parallelism_are_served(backend: str | None) -> None:
    _check_engine(config(tensor_parallel_size=4, data_parallel_size=8, distributed_executor_backend=backend))
