"""The table of tiny models: what each looks like and what the engine needs to run it.

The shapes are chosen so that a laptop prefills 2,000 tokens in tens of milliseconds, while the
cache groups have the structure of the full-size model: the same kinds, several groups, block sizes
that differ where the real model's differ. A new model is one more entry in its family's file.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvquilt.testing.specs import full, recurrent, windows
from kvquilt.testing.specs.base import ModelSpec, WeightScale

__all__ = ["SPECS", "ModelSpec", "WeightScale"]

SPECS: Mapping[str, ModelSpec] = {**windows.FAMILY, **recurrent.FAMILY, **full.FAMILY}
"""Tiny models by name."""
