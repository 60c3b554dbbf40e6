"""Who may import whom: the contracts of pyproject.toml, and what is loaded in practice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "kvquilt"
HEAVY = ("torch", "vllm", "transformers")
# The parts below transfer and vllm. Whatever of them exists must be under the "pure" contract.
PURE = ("config", "errors", "units", "layout", "hits", "sizing", "retention", "store", "tiers")


def contracts() -> dict[str, dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["id"]: contract for contract in settings["tool"]["importlinter"]["contracts"]}


def exists(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()


@pytest.mark.skipif(importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed")
def test_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


def test_every_pure_part_is_under_the_pure_contract() -> None:
    listed = contracts()["pure"]["source_modules"]
    assert isinstance(listed, list)
    assert {f"kvquilt.{name}" for name in PURE if exists(name)} <= set(listed)


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level names in sys.modules after `statement` in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "module", ["kvquilt", "kvquilt.cli.main", *(f"kvquilt.{n}" for n in PURE if exists(n))]
)
def test_importing_it_loads_no_torch_and_no_engine(module: str) -> None:
    loaded = modules_loaded_by(f"import {module}")
    assert "kvquilt" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_check_above_can_see_a_heavy_import() -> None:
    assert "torch" in modules_loaded_by("import torch")
