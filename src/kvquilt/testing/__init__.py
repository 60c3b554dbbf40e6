"""What tests of a KV cache need: tiny models, a real engine in this process, proof of pages.

Everything here is shipped, so that others can run the same checks. Importing it needs neither torch
nor vllm; making a model needs torch and transformers, starting an engine needs vllm.
"""

from kvquilt.testing.engine import Engine
from kvquilt.testing.models import make_model, model_names, model_spec
from kvquilt.testing.pages import PageRecorder, PageReport, page_digest, page_digests, zero_pages
from kvquilt.testing.results import Result
from kvquilt.testing.specs import ModelSpec, WeightScale
from kvquilt.testing.workload import kv_cache_memory_for, pool_blocks_for

__all__ = [
    "Engine",
    "ModelSpec",
    "PageRecorder",
    "PageReport",
    "Result",
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
