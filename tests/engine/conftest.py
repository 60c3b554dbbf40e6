"""One engine at a time for the tests of this folder, and what it says without kvquilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine.rig import Keeper, Rig, Truth


@pytest.fixture(scope="session")
def truths() -> dict[str, Truth]:
    """Truths by model, as far as any test has asked."""
    return {}


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    pytest.importorskip("vllm")
    from engine.rig import Keeper

    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def make_rig(keeper: Keeper, truths: dict[str, Truth]) -> Iterator[Callable[..., Rig]]:
    """`make_rig(model, options, **engine arguments)`; checks at the end that nothing is held."""
    from engine.rig import Truth

    made: list[Any] = []

    def make(model: str = "gemma4-mini", options: dict[str, Any] | None = None, **engine: Any) -> Rig:
        if model not in truths:
            keeper.close()
            truths[model] = Truth(model)
        rig = keeper.rig(truths[model], options, **engine)
        made.append(rig)
        return rig

    try:
        yield make
        if made and keeper.keeps(made[-1]):
            made[-1].heal()
            made[-1].assert_clean()
    except BaseException:
        keeper.close()
        raise
