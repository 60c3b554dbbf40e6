"""What the harness remembers of requests and blocks, and the errors it raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvquilt.testing.sim_fingerprint import TokenHashes, next_token
from kvquilt.testing.sim_shapes import VOCAB_SIZE, HarnessError

__all__ = ["Admission", "BlockWatch", "Hang", "HarnessRequest", "LeakError", "WrongOutput"]


class Hang(HarnessError):
    """The engine makes no progress."""


class LeakError(HarnessError):
    """Blocks, pins or requests are left where none should be."""


class WrongOutput(HarnessError):
    """A request got tokens that the model would not have sampled, or in another order."""


@dataclass(frozen=True)
class Admission:
    """One time that the scheduler gave a request its first blocks.

    local, external: tokens hit in the engine's own cache, and beyond it by the connector.
    asynchronous: the external tokens are loaded before the request runs.
    preempted: the request had run before and was preempted.
    """

    step: int
    local: int
    external: int
    asynchronous: bool
    preempted: bool


@dataclass
class HarnessRequest:
    """A request and what became of it.

    finish_reason: None while it lives, then "length", "abort" or "error".
    """

    id: str
    prompt: list[int]
    max_tokens: int
    salt: str
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    admissions: list[Admission] = field(default_factory=list)
    _expected: TokenHashes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._expected = TokenHashes(self.prompt, self.salt)

    def take(self, tokens: Sequence[int]) -> None:
        """Append sampled tokens. Raises WrongOutput if the model would have sampled others."""
        for token in tokens:
            expected = next_token(self._expected.values[-1], VOCAB_SIZE)
            if token != expected:
                at = len(self.output)
                raise WrongOutput(f"request {self.id}: output {at} is {token}, expected {expected}")
            self._expected.extend([token])
            self.output.append(token)

    @property
    def local_hit(self) -> int:
        """Tokens from the engine's own cache at the last admission that no preemption led to."""
        return self._start().local

    @property
    def external_hit(self) -> int:
        """Tokens from the connector at that admission; 0 if its load had failed before."""
        return self._start().external

    def _start(self) -> Admission:
        starts = [admission for admission in self.admissions if not admission.preempted]
        if not starts:
            raise HarnessError(f"request {self.id} was never admitted")
        return starts[-1]


class BlockWatch:
    """Sees blocks change hands, by listening at the engine's KV cache manager.

    admitted: called with (request id, local, external, asynchronous, preempted) at each admission.
    """

    def __init__(self, manager: Any, admitted: Callable[[str, int, int, bool, bool], None]) -> None:
        self._pool = manager.block_pool
        self._fresh: set[int] = set()
        self._free: set[int] = set()
        self._get_new_blocks = self._pool.get_new_blocks
        self._pool.get_new_blocks = self._new_blocks
        self._allocate_slots = manager.allocate_slots
        self._admitted = admitted
        manager.allocate_slots = self._slots

    def drain(self) -> tuple[list[int], list[int]]:
        """(blocks handed out, blocks given back without a hash) since the last call.

        At the first call, all blocks that were never handed out are among the second. A block that
        keeps its hash still has contents that the engine may hit, and is in neither.
        """
        idle = {b.block_id for b in self._pool.blocks[1:] if b.ref_cnt == 0 and b.block_hash is None}
        fresh, self._fresh = self._fresh, set()
        freed = idle - (self._free - fresh)
        self._free = idle
        return sorted(fresh), sorted(freed)

    def _new_blocks(self, num_blocks: int) -> Any:
        blocks = self._get_new_blocks(num_blocks)
        self._fresh.update(block.block_id for block in blocks)
        return blocks

    def _slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        first = request.num_computed_tokens == 0 and request.status.name in ("WAITING", "PREEMPTED")
        result = self._allocate_slots(request, *args, **kwargs)
        if first and result is not None:
            self._admitted(
                request.request_id,
                kwargs.get("num_new_computed_tokens", 0),
                kwargs.get("num_external_computed_tokens", 0),
                bool(kwargs.get("delay_cache_blocks", False)),
                request.num_preemptions > 0,
            )
        return result
