"""What the docs say about options, pages and files is true."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from kvquilt.config import Options
from kvquilt.layout.groups import GroupKind

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def documented_options() -> dict[str, object]:
    """Option -> default, from the table in docs/options.md."""
    rows = re.findall(
        r"^\| `(\w+)` \| `(.+?)` \|", (DOCS / "options.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: json.loads(default) for name, default in rows}


def test_every_option_is_documented_with_its_default() -> None:
    defaults = Options()
    assert documented_options() == {name: getattr(defaults, name) for name in Options.__struct_fields__}


@pytest.mark.engine
def test_every_metric_is_documented_with_its_type_and_label() -> None:
    declared = pytest.importorskip("kvquilt.vllm.metrics", reason="needs vllm").METRICS
    rows = re.findall(
        r"^\| `kvquilt_(\w+)` \| (\w+) \| (?:`(\w+)`)? ?\|",
        (DOCS / "metrics.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    wanted = [(name, metric.kind.__name__.lower(), metric.label) for name, metric in declared.items()]
    assert sorted(rows) == sorted(wanted)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", sorted((DOCS / "kinds").glob("*.md")), ids=lambda path: path.stem)
def test_figures_of_each_kind_are_what_the_code_says(page: Path) -> None:
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert (failed, tried > 0) == (0, True)


def test_there_is_a_page_for_each_kind() -> None:
    kinds = {*get_args(GroupKind), "latent", "draft"}
    assert {page.stem for page in (DOCS / "kinds").glob("*.md")} == kinds
    for kind in kinds:
        text = (DOCS / "kinds" / f"{kind}.md").read_text(encoding="utf-8")
        for part in ("## What is stored", "## What a hit needs", "```text", "## What it costs"):
            assert part in text, f"{kind}: {part}"


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(text: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text.read_text(encoding="utf-8"))
    assert [link for link in links if not (text.parent / link).exists()] == []


def test_the_read_me_shows_the_commands_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"\$ make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= commands
    assert commands <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
