"""From start to end: pools that cannot be attached, several connectors, metrics, closing, killing."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engine.processes import Child, engine_script, left_behind, wait_until
from engine.prometheus import value_of
from engine.rig import RAM_BYTES, SOME, Keeper, Rig, Truth
from kvquilt.testing import Engine
from kvquilt.testing.copy_faults import CopyPlan
from kvquilt.vllm import worker as worker_module
from kvquilt.vllm.metrics import METRICS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MakeRig = Callable[..., Rig]
MODEL = "gemma4-mini"


@pytest.fixture
def truth(make_rig: MakeRig, truths: dict[str, Truth], keeper: Keeper) -> Truth:
    if MODEL not in truths:
        make_rig(MODEL)
    keeper.close()
    return truths[MODEL]


# ---- pools that cannot be attached ----


def assert_serves_without_us(
    truth: Truth, caplog: pytest.LogCaptureFixture, break_it: Callable[[Rig], None]
) -> str:
    with Engine(MODEL, connector={"ram_bytes": RAM_BYTES}, num_blocks=400, max_model_len=512) as engine:
        rig = Rig(engine, truth)
        break_it(rig)
        with caplog.at_level(logging.ERROR, logger="kvquilt"):
            results = rig.run(SOME[:2])
        rig.assert_answers(results, SOME[:2])
        rig.forget_locally()
        again = rig.run(SOME[:2])
        assert {r.external_hit_tokens for r in again} == {0}
        rig.assert_answers(again, SOME[:2])
        assert (
            sum(rig.connector._hook_errors.values()) == sum(rig.worker_connector._hook_errors.values()) == 0
        )
        rig.assert_clean()
    [line] = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
    return line


def test_socket_that_is_gone_switches_kvquilt_off(truth: Truth, caplog: pytest.LogCaptureFixture) -> None:
    def remove(rig: Rig) -> None:
        shutil.rmtree(Path(rig.side._server.path).parent)

    line = assert_serves_without_us(truth, caplog, remove)
    assert "cannot attach the pools" in line


def test_ranks_that_see_other_groups_switch_kvquilt_off(
    truth: Truth, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(rig: Rig) -> None:
        monkeypatch.setattr(worker_module, "layout_fingerprint", lambda layout: "of another layout")

    line = assert_serves_without_us(truth, caplog, other)
    assert "different cache groups" in line


# ---- several connectors ----


def multi(policy: str | None) -> dict[str, object]:
    ours = {
        "kv_connector": "KVQuiltConnector",
        "kv_connector_module_path": "kvquilt.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram_bytes": RAM_BYTES},
    }
    other = {
        "kv_connector": "ClaimingConnector",
        "kv_connector_module_path": "engine.claiming_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"claim": False},
    }
    config: dict[str, object] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }
    return config | ({"kv_load_failure_policy": policy} if policy else {})


@pytest.mark.parametrize("policy", ["recompute", None])
def test_child_of_a_multi_connector(
    make_rig: MakeRig, policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves as alone; only the failure policy is the parent's, which ends the request by default."""
    rig = make_rig(MODEL, multi(policy))
    rig.fill(SOME)
    rig.forget_locally()
    warm = rig.run(SOME)
    rig.assert_hits(warm, SOME)
    rig.assert_answers(warm, SOME)
    rig.forget_locally()
    rig.faulty(CopyPlan(at={0: "fail"}))
    with caplog.at_level(logging.WARNING, logger="kvquilt"):
        [failed] = rig.run(SOME[:1])
    assert "under MultiConnector it has to be set" in caplog.text
    rig.heal()
    if policy is None:
        assert failed.finish_reason == "error"
    else:
        assert failed.finish_reason == "length"
        rig.assert_answers([failed], SOME[:1])
    rig.forget_locally()
    again = rig.run(SOME[:1])
    rig.assert_hits(again, SOME[:1])
    rig.assert_answers(again, SOME[:1])


def test_the_connector_sets_the_failure_policy_itself(make_rig: MakeRig) -> None:
    rig = make_rig(MODEL)
    assert rig.engine.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert rig.engine.scheduler.recompute_kv_load_failures
    assert rig.connector.requires_kv_delivery is False


# ---- metrics ----


def test_every_metric_reaches_prometheus_by_the_engines_own_hooks(make_rig: MakeRig, keeper: Keeper) -> None:
    from prometheus_client import REGISTRY, generate_latest

    keeper.close()
    rig = make_rig(MODEL)
    rig.fill(SOME[:1])
    rig.forget_locally()
    rig.assert_hits(rig.run(SOME[:1]), SOME[:1])
    rig.engine.step_until_idle()
    text = generate_latest(REGISTRY).decode()
    for name in METRICS:
        assert re.search(rf"^# TYPE kvquilt_{name}(_total)? ", text, re.MULTILINE), name
    boundary = rig.truth.boundary(SOME[0])
    assert value_of(text, "kvquilt_hit_tokens_total") == boundary
    assert value_of(text, "vllm:external_prefix_cache_hits_total") == boundary
    for name in ("saved_pages", "saved_bytes", "loaded_pages", "loaded_bytes"):
        assert value_of(text, f"kvquilt_{name}_total") == rig.total(name) > 0
    for name in ("leases", "tickets", "pins"):
        assert value_of(text, f"kvquilt_{name}") == 0
    for group in rig.truth.layout.groups:
        assert f'group="{group.name}"' in text


def test_start_lines_name_every_group(make_rig: MakeRig) -> None:
    rig = make_rig(MODEL)
    lines = rig.side.start_lines
    for group, line in zip(rig.truth.layout.groups, lines, strict=True):
        assert line.startswith(f"group {group.name}: {group.kind}")
        assert f"{group.tokens_per_block} tokens per block" in line
        assert f"page {group.page_bytes} B" in line


# ---- the end ----


def our_traces() -> tuple[list[str], list[str], int]:
    """Our threads, our mappings, and how many files are open, in this process."""
    gc.collect()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("kvquilt")]
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvquilt" in line]
    return threads, mappings, sum("memfd:kvquilt" in target for target in open_files())


def open_files() -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except OSError:  # the listing's own
            continue
    return targets


def test_closing_leaves_no_thread_mapping_or_file(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.close()
    assert our_traces() == ([], [], 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(2):
        with Engine(MODEL, connector={"ram_bytes": "16MiB"}, num_blocks=200, max_model_len=512) as engine:
            engine.run(SOME[:1], max_tokens=2, concurrency=1)
            engine.step_until_idle()
            threads, mappings, files = our_traces()
            assert threads
            assert mappings
            assert files
        assert our_traces() == ([], [], 0)
        assert not list(tmp_path.glob("kvquilt*"))


def test_closing_with_copies_in_flight(make_rig: MakeRig, keeper: Keeper) -> None:
    rig = make_rig(MODEL)
    rig.faulty(CopyPlan(rates={"silent": 1.0}))
    rig.engine.add(SOME[0], max_tokens=50)
    while not rig.side.saves.under_way():
        rig.engine.step()
    connectors = rig.connector, rig.worker_connector
    keeper.close()
    assert [sum(c._hook_errors.values()) for c in connectors] == [0, 0]
    del rig, connectors
    assert our_traces()[0] == []


def test_two_engines_with_one_engine_id(keeper: Keeper, tmp_path: Path) -> None:
    """Two processes, one id, the same prompts: neither sees, disturbs or outlives the other."""
    keeper.close()
    with (
        Child(engine_script(engine_id="the-same"), tmp_path) as one,
        Child(engine_script(engine_id="the-same"), tmp_path) as two,
    ):
        for child in (one, two):
            child.expect("ready")
        for child in (one, two):
            child.say("run")
        answers = [child.expect("answers") for child in (one, two)]
        assert answers[0] == answers[1]
        one.kill()
        two.say("run")
        assert two.expect("answers") == answers[1]
        two.say("end")
        assert two.wait() == 0
    assert left_behind([one, two], tmp_path) == []


def test_killed_engine_leaves_nothing(keeper: Keeper, tmp_path: Path) -> None:
    """Also one that never had a request: the socket is gone as soon as the pools are attached."""
    keeper.close()
    with Child(engine_script(), tmp_path) as child:
        child.expect("ready")
        wait_until(lambda: not list(tmp_path.glob("kvquilt*")), "the socket's folder is still there")
        child.say("run")
        child.expect("answers")
        child.kill()
        assert left_behind([child], tmp_path) == []
