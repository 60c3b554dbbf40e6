"""What one layer keeps, as the engine's own layer specs say it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["LayerSpec"]


@dataclass(frozen=True)
class LayerSpec:
    """Cache of one layer on one rank. Layers with equal specs (but for the name) may share a group.

    tokens_per_block: tokens of one block. state_bytes: bytes of one stored state over all heads of
    the rank: of one token (attention), or of one checkpoint (recurrent). tokens_per_state: tokens
    that one stored state of an attention layer covers (compressed caches: above 1).
    alignment: the engine rounds the page up to it. padded_bytes: the engine's page if it is wider.
    mla: one latent for K and V; the engine never pads such a page to another layer's size.
    role: tells caches apart that have equal sizes but different meaning.
    copies: ranks that hold the same bytes.
    """

    name: str
    kind: Literal["full", "sliding", "chunked", "recurrent"]
    tokens_per_block: int
    state_bytes: int
    tokens_per_state: int = 1
    window: int | None = None
    chunk: int | None = None
    alignment: int = 1
    padded_bytes: int | None = None
    mla: bool = False
    role: str = ""
    copies: int = 1

    @property
    def content_bytes(self) -> int:
        """Bytes of a block that mean something."""
        if self.kind == "recurrent":
            return self.state_bytes
        return math.ceil(self.tokens_per_block / self.tokens_per_state) * self.state_bytes

    @property
    def engine_bytes(self) -> int:
        """Bytes that the engine sets aside for a block: content, alignment, padding."""
        if self.padded_bytes is not None:
            return self.padded_bytes
        return -(-self.content_bytes // self.alignment) * self.alignment

    @property
    def key(self) -> tuple[object, ...]:
        """All that must agree for two layers to have one spec in the engine."""
        return (
            self.kind,
            self.tokens_per_block,
            self.state_bytes,
            self.tokens_per_state,
            self.window,
            self.chunk,
            self.alignment,
            self.padded_bytes,
            self.mla,
            self.role,
        )
