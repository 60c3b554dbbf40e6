"""`kvquilt bench`: the main job with a real engine, measured and checked."""

from kvquilt.bench.config import PROFILES, BenchConfig, make_config
from kvquilt.bench.report import Report
from kvquilt.bench.run import Outcome, run_bench

__all__ = ["PROFILES", "BenchConfig", "Outcome", "Report", "make_config", "run_bench"]
