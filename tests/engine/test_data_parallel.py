"""Data parallelism with real engine cores: each has a store and a part of the disk of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engine.disk import namespaces
from engine.processes import Child, left_behind, wait_until
from kvquilt.tiers.manifest import Manifest
from kvquilt.tiers.namespaces import tree_bytes

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_TWO_CORES = """
import asyncio, json, sys
OPTIONS = {"ram_bytes": "16MiB", **json.loads(sys.argv[1])}
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from kvquilt.testing import make_model

async def ask(llm, name, rank):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [5 + i * i % 1999 for i in range(331)]}
    async for answer in llm.generate(prompt, params, name, data_parallel_rank=rank):
        pass
    print("rank", rank, answer.num_cached_tokens, list(answer.outputs[0].token_ids), flush=True)
    await llm.reset_prefix_cache()

async def main():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=make_model("gemma4-mini").as_posix(), dtype="float32", block_size=32, max_model_len=512,
        num_gpu_blocks_override=200, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
        skip_tokenizer_init=True, disable_hybrid_kv_cache_manager=False, data_parallel_size=2,
        kv_transfer_config={
            "kv_connector": "KVQuiltConnector", "kv_connector_module_path": "kvquilt.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": OPTIONS,
        },
    ))
    for number, rank in enumerate([0, 0, 1, 1, 0]):
        await ask(llm, f"request-{number}", rank)
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
    print("end", flush=True)
"""


def two_cores(folder: Path, **options: object) -> Child:
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0"}
    return Child([sys.executable, "-c", _TWO_CORES, json.dumps(options)], folder, binding)


def test_each_engine_core_has_a_store_and_a_part_of_the_disk_of_its_own(tmp_path: Path) -> None:
    """What one core has saved is no hit on the other, and the same prompt is never answered otherwise.
    After a restart each core finds what it wrote itself; together they keep below the bound."""
    disk, bound = tmp_path / "disk", 24 << 20
    answers = []
    for _ in range(2):
        with two_cores(tmp_path, disk_path=str(disk), disk_bytes=bound) as child:
            answers.append([child.expect("rank").split(maxsplit=3)[1:] for _ in range(5)])
            child.expect("end")
            assert child.wait() == 0
            wait_until(lambda child=child: not child.members(), "the cores are still there")
            assert left_behind([child], tmp_path) == []
        assert tree_bytes(disk) <= bound
    first, second = ([(rank, hit) for rank, hit, _ in life] for life in answers)
    assert first == [("0", "0"), ("0", "320"), ("1", "0"), ("1", "320"), ("0", "320")]
    assert second == [("0", "320"), ("0", "320"), ("1", "320"), ("1", "320"), ("0", "320")]
    assert len({tokens for life in answers for _, _, tokens in life}) == 1
    found = namespaces(disk)
    assert [path.parent.name for path in found] == ["dp0", "dp1"]
    slots = []
    for path in found:
        manifest = Manifest.read(path)
        assert manifest is not None
        slots.append([arena.num_slots for arena in manifest.arenas])
        assert bound / 3 < sum(arena.num_slots * arena.slot_bytes for arena in manifest.arenas) < bound / 2
    assert slots[0] == slots[1]
