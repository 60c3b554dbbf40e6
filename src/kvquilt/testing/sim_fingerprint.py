"""Fingerprints: 64-bit words that stand for the KV of one token in one layer on one rank.

A fingerprint depends on every token up to its position, on a salt, and on where it lies, so two
entries are equal only if a model would have computed the same KV for the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["POISON", "TokenHashes", "expected_output", "layer_constants", "next_token"]

Words = NDArray[np.uint64]

POISON: Final = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
"""What memory holds that nobody may read. No fingerprint equals it but by an accident of 2**-64."""

_GOLDEN: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_SECOND: Final = np.uint64(0x94D0_49BB_1331_11EB)


def mix(words: Words) -> Words:
    """Scatter each word over all 64 bits (the finaliser of splitmix64); a bijection."""
    x = words + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


def _seed(salt: str) -> Words:
    data = salt.encode()
    padded = data + b"\0" * (-len(data) % 8)
    words = np.frombuffer(padded, dtype=np.uint64).astype(np.uint64)
    index = np.arange(1, len(words) + 1, dtype=np.uint64)
    return np.asarray(mix(words ^ mix(index)).sum(dtype=np.uint64, keepdims=True))


class TokenHashes:
    """The running hash of a token sequence: `values[p]` depends on the salt and on tokens 0..p.

    A sum of words that are each a function of (token, position): linear to extend, and
    vectorised, which a chained hash would not be.
    """

    def __init__(self, tokens: Sequence[int] = (), salt: str = "") -> None:
        self.salt = salt
        self.tokens: list[int] = []
        self.values: Words = np.empty(0, dtype=np.uint64)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if not len(tokens):
            return
        start = len(self.tokens)
        position = np.arange(start, start + len(tokens), dtype=np.uint64)
        terms = mix(np.asarray(tokens, dtype=np.uint64) ^ mix(position))
        terms[:1] += self.values[-1:] if start else _seed(self.salt)
        self.values = np.concatenate([self.values, np.cumsum(terms, dtype=np.uint64)])
        self.tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        self.values = self.values[:length]


def layer_constants(group: int, layer: int, rank: int, num_words: int) -> Words:
    """One constant for each word of a token's entry in a layer, different for each place."""
    place = np.asarray([group, layer, rank], dtype=np.uint64) + np.uint64(1)
    base = mix(place * np.asarray([1, 1 << 20, 1 << 40], dtype=np.uint64)).sum(dtype=np.uint64)
    return mix(np.arange(num_words, dtype=np.uint64) ^ base)


def fingerprints(hashes: Words, constants: Words) -> Words:
    """Entries of shape (positions, words) for running hashes of shape (positions,)."""
    return mix(hashes[:, None] ^ constants[None, :])


def next_token(last_hash: np.uint64, vocab_size: int) -> int:
    """The token that the simulated model samples after a sequence with this running hash."""
    return int(mix(np.asarray([last_hash], dtype=np.uint64))[0] % np.uint64(vocab_size))


def expected_output(prompt: Sequence[int], num_tokens: int, vocab_size: int, salt: str = "") -> list[int]:
    """What the simulated model answers to `prompt`, whatever the engine does about it."""
    hashes = TokenHashes(prompt, salt)
    for _ in range(num_tokens):
        hashes.extend([next_token(hashes.values[-1], vocab_size)])
    return hashes.tokens[len(prompt) :]
