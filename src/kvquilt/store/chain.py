"""`Chain`: the engine's block hashes of one request, as they grow.

Keys are never computed here: block i of a group is named by the engine hash that closes it,
`hashes[(i + 1) * k - 1]` with k hashes per block. Hashes past a group's last whole block name
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvquilt.layout import CacheLayout

__all__ = ["KEY_BYTES", "Chain"]

KEY_BYTES = 32


class Chain:
    """Engine block hashes of one request; hash i covers tokens [0, (i + 1) * tokens_per_hash).

    hashes: bytes of 1 to 32 each, all of one length (shorter ones are padded with zeros to
    four uint64 words). It belongs to the request's owner, who alone extends it; another thread that reads
    it meanwhile may see the shorter chain. The owner may note in `source` what the hashes are of; the
    store hands it on with `Change`, and never looks at it. durable: may pages of it outlive the process?

    Raises ValueError for hashes that are empty, too long or of unequal length.
    """

    __slots__ = ("_buffer", "_hash_bytes", "_length", "_per_block", "durable", "layout", "source")

    def __init__(self, layout: CacheLayout, hashes: Sequence[bytes] = ()) -> None:
        self.layout = layout
        self.source: object = None
        self.durable = True
        self._per_block = tuple(
            layout.hashes_per_block(group) if group.cacheable else 0 for group in layout.groups
        )
        self._buffer: NDArray[np.uint64] = np.zeros((max(16, len(hashes)), 4), dtype=np.uint64)
        self._length = 0
        self._hash_bytes = 0
        self.extend(hashes)

    @classmethod
    def of_pages(
        cls,
        layout: CacheLayout,
        group_index: int,
        keys: NDArray[np.uint64],
        spans: NDArray[np.uint64],
        step: int,
    ) -> Chain:
        """A chain that names pages of one group of which only the keys are known: block i is keys[i].

        keys: shape (n, 4). spans: shape (n, s, 4), hashes of the inside of each block, `step` hashes apart
        (0: none), as the index keeps them. Blocks of other groups have no meaning in it.
        """
        chain = cls(layout)
        per_block = chain._per_block[group_index]
        rows = np.zeros((len(keys), per_block, 4), dtype=np.uint64)
        if step:
            rows[:, step - 1 : -1 : step] = spans[:, : per_block // step - 1]
        rows[:, -1] = keys
        chain._buffer = rows.reshape(-1, 4)
        chain._length = len(keys) * per_block
        chain._hash_bytes = KEY_BYTES
        return chain

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Append the hashes that the engine has added since."""
        if not hashes:
            return
        length = self._hash_bytes or len(hashes[0])
        if not 0 < length <= KEY_BYTES:
            raise ValueError(f"engine block hash of {length} bytes: allowed are 1 to {KEY_BYTES}")
        joined = b"".join(hashes)
        if len(joined) != length * len(hashes) or max(map(len, hashes)) != length:
            raise ValueError(f"engine block hashes of unequal length: this chain has {length} bytes each")
        words = np.frombuffer(joined, dtype=np.uint8).reshape(len(hashes), length)
        if length < KEY_BYTES:
            words = np.pad(words, ((0, 0), (0, KEY_BYTES - length)))
        self._hash_bytes = length
        end = self._length + len(hashes)
        if end > self._buffer.shape[0]:
            grown = np.zeros((max(end, 2 * self._buffer.shape[0]), 4), dtype=np.uint64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = words.view(np.uint64)
        self._length = end

    def __len__(self) -> int:
        return self._length

    def num_blocks(self, group_index: int) -> int:
        """Whole blocks of that group that the hashes cover; 0 for a group that is not cacheable."""
        per_block = self._per_block[group_index]
        return self._length // per_block if per_block else 0

    def keys(self, group_index: int) -> NDArray[np.uint64]:
        """Keys of that group's whole blocks, shape (num_blocks, 4): a view, not a copy."""
        per_block = self._per_block[group_index]
        if not per_block:
            return self._buffer[:0]
        return self._buffer[per_block - 1 : self._length : per_block]

    def spans(self, group_index: int, step: int, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The hashes inside these blocks of the group, `step` hashes apart (0: none), shape (n, s, 4)."""
        per_block = self._per_block[group_index]
        inside = np.arange(step - 1, per_block - 1, step) if step else np.zeros(0, dtype=np.int64)
        return np.take(self._buffer, blocks[:, None] * per_block + inside, axis=0)

    def hash_at(self, tokens: int) -> bytes:
        """The hash that closes the first `tokens` tokens.

        Raises ValueError if `tokens` is not a positive multiple of the hash unit, or not hashed yet.
        """
        index, rest = divmod(tokens, self.layout.tokens_per_hash)
        if rest or not 0 < index <= self._length:
            raise ValueError(
                f"no hash closes {tokens} tokens: {self._length} hashes of "
                f"{self.layout.tokens_per_hash} tokens are known"
            )
        return bytes(self._buffer[index - 1].tobytes()[: self._hash_bytes])

    @property
    def hash_bytes(self) -> int:
        """Bytes of each of the engine's hashes; 0 before the first."""
        return self._hash_bytes

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """All hashes, shape (len, 4), C-contiguous: a view."""
        return self._buffer[: self._length]

    def hashes_per_block(self, group_index: int) -> int:
        """Hashes per block of that group; 0 for a group that is not cacheable."""
        return self._per_block[group_index]
