"""What one request of a test engine gave, gathered from the engine core's own outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DraftCounts", "RequestRecord", "Result"]


@dataclass(frozen=True)
class Result:
    """One finished request.

    tokens: generated token ids. logprobs: the log-probability of each, empty if none were asked for.
    ttft_seconds: from handing the request over to its first token; None if it has none.
    finish_reason: "length", "stop", "abort" or "error".
    local_hit_tokens, external_hit_tokens: prompt tokens that were not computed, because the engine
    held them itself, or because the connector brought them. request_id: the engine's own id.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_seconds: float | None
    finish_reason: str
    local_hit_tokens: int
    external_hit_tokens: int
    request_id: str


@dataclass(frozen=True)
class DraftCounts:
    """Tokens that a drafter proposed, and those of them that the target model accepted.

    >>> DraftCounts(drafted=30, accepted=12).acceptance
    0.4
    """

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def plus(self, stats: Any) -> DraftCounts:
        """With one step's `SpecDecodingStats`, which may be None."""
        if stats is None:
            return self
        return DraftCounts(self.drafted + stats.num_draft_tokens, self.accepted + stats.num_accepted_tokens)

    def since(self, before: DraftCounts) -> DraftCounts:
        """The growth since an earlier moment."""
        return DraftCounts(self.drafted - before.drafted, self.accepted - before.accepted)


@dataclass
class RequestRecord:
    """A request on its way; fed with the core's outputs. started: when it was handed over, by `clock`."""

    request_id: str
    started: float
    clock: Callable[[], float] = time.perf_counter
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_token: float | None = None
    finish_reason: str | None = None
    local_hit_tokens: int = 0
    external_hit_tokens: int = 0

    def feed(self, output: Any) -> None:
        """Add one `EngineCoreOutput`.

        The engine's frontend reports local and external hits as one sum; the core's `PrefillStats`
        still has both, and has them once, with the first output.
        """
        if output.new_token_ids and self.first_token is None:
            self.first_token = self.clock()
        self.tokens.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            # Column 0 is the sampled token; the others are the most probable ones.
            self.logprobs.extend(output.new_logprobs.logprobs[: len(output.new_token_ids), 0].tolist())
        stats = output.prefill_stats
        if stats is not None:
            self.local_hit_tokens = stats.num_local_cached_tokens
            self.external_hit_tokens = stats.num_external_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)

    def result(self) -> Result:
        """The finished request. Raises RuntimeError while it is not finished."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.request_id!r} has not finished")
        return Result(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            ttft_seconds=None if self.first_token is None else self.first_token - self.started,
            finish_reason=self.finish_reason,
            local_hit_tokens=self.local_hit_tokens,
            external_hit_tokens=self.external_hit_tokens,
            request_id=self.request_id,
        )


def in_order(prompts: Sequence[Any], order: str) -> list[int]:
    """Indices of `prompts` in the order of submission. Raises ValueError for an unknown order."""
    if order not in ("same", "reversed"):
        raise ValueError(f"order={order!r}: allowed are 'same' and 'reversed'")
    indices = list(range(len(prompts)))
    return indices if order == "same" else indices[::-1]
