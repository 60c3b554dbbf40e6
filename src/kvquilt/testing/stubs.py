"""Empty modules for imports that a text model's code makes and never uses."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from kvquilt.testing.specs import ModelSpec

__all__ = ["provide_stubs"]

_FOLDER = str(Path(__file__).parent / "stub_modules")


def provide_stubs(spec: ModelSpec) -> None:
    """Let this process, and those it starts, import what `spec.stubs` names, where it is not installed.

    The folder with the stubs goes last, so what is installed wins.
    """
    if _FOLDER in sys.path or all(importlib.util.find_spec(name) for name in spec.stubs):
        return
    sys.path.append(_FOLDER)
    paths = [path for path in (os.environ.get("PYTHONPATH"), _FOLDER) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
