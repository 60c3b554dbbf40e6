"""What tests of a KV cache need: tiny models, a real engine in this process, proof of pages.

Everything here is shipped, so that others can run the same checks. Importing it needs neither torch
nor vllm; making a model needs torch and transformers, starting an engine needs vllm, and the contract of
tiers needs pytest.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvquilt.testing.engine import Engine
from kvquilt.testing.models import make_model, model_names, model_spec
from kvquilt.testing.pages import PageRecorder, PageReport, page_digest, page_digests, zero_pages
from kvquilt.testing.results import Result
from kvquilt.testing.specs import ModelSpec, WeightScale
from kvquilt.testing.workload import kv_cache_memory_for, pool_blocks_for

if TYPE_CHECKING:
    from kvquilt.testing.tier_contract import TierContract
    from kvquilt.testing.tier_faults import FaultyFiles, FaultyTier, FileFault
    from kvquilt.testing.tier_pages import PageSource

__all__ = [
    "Engine",
    "FaultyFiles",
    "FaultyTier",
    "FileFault",
    "ModelSpec",
    "PageRecorder",
    "PageReport",
    "PageSource",
    "Result",
    "TierContract",
    "WeightScale",
    "kv_cache_memory_for",
    "make_model",
    "model_names",
    "model_spec",
    "page_digest",
    "page_digests",
    "pool_blocks_for",
    "zero_pages",
]

# Loaded when they are asked for: they compile the store's kernels, and one of them needs pytest.
_TIERS = {
    "FaultyFiles": "kvquilt.testing.tier_faults",
    "FaultyTier": "kvquilt.testing.tier_faults",
    "FileFault": "kvquilt.testing.tier_faults",
    "PageSource": "kvquilt.testing.tier_pages",
    "TierContract": "kvquilt.testing.tier_contract",
}


def __getattr__(name: str) -> object:
    if name in _TIERS:
        return getattr(import_module(_TIERS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
