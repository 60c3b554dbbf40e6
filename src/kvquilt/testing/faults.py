"""Faults on purpose: methods that raise, stores that are full, workers that report late, and copies
that go wrong.

Every fault is decided by a plan of values (a seed and rates, or the exact call), so a failing run
can be repeated and a property test can shrink it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from kvquilt.testing.copy_faults import CopyFault, CopyPlan, FaultyCopier

__all__ = ["CopyFault", "CopyPlan", "FaultyCopier", "LateWorker", "MethodFault", "full_store"]


class MethodFault:
    """While in force, a method of one object raises, or does something else; a context manager.

    target, name: the object and its method. It may be a connector's hook, a store's `reserve`, a
    tier's `read`: anything that looks the method up on the instance.
    error: raised instead of the call; an exception class is instantiated.
    after: raise once the real call has had its effect.
    instead: called as instead(real, *args, **kwargs) in place of the call, where no error is given.
    at: numbers of the calls concerned, counting from 0; None means all. rate, seed: or a share.

        with MethodFault(store, "reserve", error=MemoryError, rate=0.3, seed=7) as fault:
            ...
        assert fault.num_faults > 0

    Raises AttributeError if there is no such method, TypeError if the object takes no attributes.
    """

    def __init__(
        self,
        target: Any,
        name: str,
        *,
        error: BaseException | type[BaseException] | None = None,
        instead: Callable[..., Any] | None = None,
        after: bool = False,
        at: Collection[int] | None = None,
        rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        if (error is None) == (instead is None):
            raise ValueError("one of error and instead is needed")
        self.num_calls = 0
        self.num_faults = 0
        self._target = target
        self._name = name
        self._real = getattr(target, name)
        self._error = error
        self._instead = instead
        self._after = after
        self._at = at
        self._rate = rate
        self._seed = seed
        self._own: Any = None

    def __enter__(self) -> Self:
        self._own = vars(self._target).get(self._name) if hasattr(self._target, "__dict__") else None
        try:
            setattr(self._target, self._name, self._call)
        except AttributeError as error:
            kind = type(self._target).__name__
            raise TypeError(f"{kind} takes no attributes: its {self._name} cannot be replaced") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is None:
            delattr(self._target, self._name)
        else:  # a class, or a fault upon a fault
            setattr(self._target, self._name, self._own)

    def _hits(self, call: int) -> bool:
        if self._at is not None:
            return call in self._at
        return random.Random(f"{self._seed}/{call}").random() < self._rate

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        call, self.num_calls = self.num_calls, self.num_calls + 1
        if not self._hits(call):
            return self._real(*args, **kwargs)
        self.num_faults += 1
        if self._instead is not None:
            return self._instead(self._real, *args, **kwargs)
        if self._after:
            self._real(*args, **kwargs)
        assert self._error is not None
        raise self._error


def full_store(store: Any, **when: Any) -> MethodFault:
    """A store in which nothing finds room: `reserve` grants no slots, but does all else it does.

    when: `at`, or `rate` and `seed`, as of MethodFault.
    """
    return MethodFault(store, "reserve", instead=lambda real, owner, wants: real(owner, []), **when)


class LateWorker:
    """Makes a worker's connector tell the scheduler later, or never, what it has done.

    connector: a worker's connector; whole reports (transfer results and worker metadata) are held
    back for `steps` steps each, `steps=None` until `heal`. In force from construction on.
    """

    def __init__(self, connector: Any, steps: int | None) -> None:
        self._steps = steps
        self._step = 0
        self._results: list[tuple[int, Any]] = []
        self._metas: list[tuple[int, Any]] = []
        self._get_results = connector.get_transfer_results
        self._build_meta = connector.build_connector_worker_meta
        connector.get_transfer_results = self.get_transfer_results
        connector.build_connector_worker_meta = self.build_connector_worker_meta

    def silence(self) -> None:
        """Hold everything back until `heal`."""
        self._steps = None

    @property
    def silent(self) -> bool:
        """Is everything held back?"""
        return self._steps is None

    def heal(self) -> None:
        """Hold nothing back any more; what was held comes with the next step."""
        self._steps = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The results that are due, joined."""
        self._step += 1
        self._results.append((self._step, self._get_results(finished_req_ids)))
        due = self._take_due(self._results)
        joined = type((due or [self._results[0][1]])[0])()
        for results in due:
            joined.finished_sending |= results.finished_sending
            joined.finished_recving |= results.finished_recving
            joined.failed_recving |= results.failed_recving
        return joined

    def build_connector_worker_meta(self) -> Any:
        """The metadata that are due, aggregated as the engine does over workers; or None."""
        self._metas.append((self._step, self._build_meta()))
        due = [meta for meta in self._take_due(self._metas) if meta is not None]
        if not due:
            return None
        joined = due[0]
        for meta in due[1:]:
            joined = joined.aggregate(meta)
        return joined

    def _take_due(self, items: list[tuple[int, Any]]) -> list[Any]:
        due = [item for step, item in items if self._steps is not None and step + self._steps <= self._step]
        del items[: len(due)]
        return due
