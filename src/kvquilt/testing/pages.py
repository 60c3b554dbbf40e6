"""An independent look at the engine's cache: digests of pages, by plain indexing.

Nothing here goes through `kvquilt.transfer`: a page is read as `cache[block]` from the tensors that
the engine's own attention reads, so a copy that mistakes an offset or a stride cannot hide.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash

__all__ = ["PageRecorder", "PageReport", "page_digest", "page_digests", "zero_pages"]

SavedPage = tuple[int, int, bytes]
"""(group index, block id, key): the key is the engine's block hash."""

# Pages gathered at once: bounds the copy, not the result.
_BATCH = 256


class PageList(Protocol):
    """Pages as the connector's worker lists them: parallel arrays as bytes."""

    @property
    def group(self) -> bytes:
        """int32 group indices."""

    @property
    def block(self) -> bytes:
        """int64 block ids."""

    @property
    def keys(self) -> bytes:
        """Keys of equal size, one a page; empty unless the connector was told to send them."""


def page_digest(kv_caches: Mapping[str, Any], kv_cache_config: Any, group_index: int, block_id: int) -> str:
    """Digest (xxh3-128, hex) of one block over all layers of its group, in the group's layer order.

    kv_caches: layer name -> tensor, or sequence of tensors, whose first axis is blocks (or a whole
    number of kernel blocks for each block). kv_cache_config: the engine's, with `num_blocks` and
    `kv_cache_groups`. Raises IndexError for a block outside the pool.
    """
    return page_digests(kv_caches, kv_cache_config, group_index, [block_id])[0]


def page_digests(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, group_index: int, block_ids: Sequence[int]
) -> list[str]:
    """`page_digest` of many blocks of one group, in their order."""
    hashes = [xxhash.xxh3_128() for _ in block_ids]
    for pages in _group_pages(kv_caches, kv_cache_config, group_index):
        for start in range(0, len(block_ids), _BATCH):
            contents = _contents(pages, block_ids[start : start + _BATCH])
            for digest, content in zip(hashes[start : start + _BATCH], contents, strict=True):
                digest.update(content)
    return [digest.hexdigest() for digest in hashes]


def zero_pages(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, group_index: int, block_ids: Sequence[int]
) -> None:
    """Overwrite blocks of one group with zeros: the control that shows whether the group matters."""
    for pages in _group_pages(kv_caches, kv_cache_config, group_index):
        pages[_indices(pages, block_ids)] = 0


def _group_pages(kv_caches: Mapping[str, Any], kv_cache_config: Any, group_index: int) -> Iterable[Any]:
    """Each tensor of the group's layers, with the engine's blocks as its first axis."""
    num_blocks = kv_cache_config.num_blocks
    for name in kv_cache_config.kv_cache_groups[group_index].layer_names:
        cache = kv_caches[name]
        for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
            if tensor.shape[0] % num_blocks:
                raise ValueError(
                    f"layer {name!r}: {tensor.shape[0]} entries are no multiple of {num_blocks} blocks"
                )
            yield tensor if tensor.shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1))


def _indices(pages: Any, block_ids: Sequence[int]) -> Any:
    import torch

    for block_id in block_ids:
        if not 0 <= block_id < pages.shape[0]:
            raise IndexError(f"block {block_id} is outside the pool of {pages.shape[0]} blocks")
    return torch.tensor(block_ids, dtype=torch.long, device=pages.device)


def _contents(pages: Any, block_ids: Sequence[int]) -> Any:
    """The bytes of blocks, uint8 of shape (blocks, bytes), in the tensor's logical order."""
    import torch

    rows = pages[_indices(pages, block_ids)].cpu().contiguous()
    return rows.reshape(len(block_ids), -1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class PageReport:
    """What a `PageRecorder` has seen.

    compared, equal: loaded pages that had been recorded, and those of them that came back as saved.
    unknown: loaded pages that no save had recorded. compared_by_group: index -> pages compared.
    mismatches: (group index, block id, key in hex) of the first unequal pages.
    """

    recorded: int
    compared: int
    equal: int
    unknown: int
    compared_by_group: Mapping[int, int]
    mismatches: tuple[tuple[int, int, str], ...]

    def covers(self, pages: int, groups: Iterable[int]) -> bool:
        """Whether at least `pages` were compared, with some in each of `groups`."""
        return self.compared >= pages and all(self.compared_by_group.get(group, 0) for group in groups)


@dataclass
class PageRecorder:
    """Remembers pages as they are saved, and compares them when they come back.

    Attach `on_saved` where a block has been read out of the engine and before the engine may write
    it again, and `on_loaded` where it has been put back and before the engine may use it.

    kv_caches, kv_cache_config: as for `page_digest`. max_mismatches: how many to describe.
    before_compare: called with each batch of loaded pages first; a control may damage them there.

    Safe to call from several threads.
    """

    kv_caches: Mapping[str, Any]
    kv_cache_config: Any
    max_mismatches: int = 20
    before_compare: Callable[[Sequence[SavedPage]], None] | None = None
    _saved: dict[tuple[int, bytes], str] = field(default_factory=dict, repr=False)
    _compared: Counter[int] = field(default_factory=Counter, repr=False)
    _equal: int = 0
    _unknown: int = 0
    _mismatches: list[tuple[int, int, str]] = field(default_factory=list, repr=False)
    # Guards everything with an underscore.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def on_saved(self, pages: Sequence[SavedPage]) -> None:
        """Record pages that were just saved: (group index, block id, key) each.

        The same key saved again replaces its digest: equal prefixes computed in other batches may
        differ in the last bits, and what comes back is what the last save put there.
        """
        digests = self._digests(pages)
        with self._lock:
            for (group, _, key), digest in zip(pages, digests, strict=True):
                self._saved[group, key] = digest

    def on_loaded(self, pages: Sequence[SavedPage]) -> None:
        """Compare pages that were just loaded: (group index, block id, key) each."""
        if self.before_compare is not None:
            self.before_compare(pages)
        digests = self._digests(pages)
        with self._lock:
            for (group, block_id, key), digest in zip(pages, digests, strict=True):
                self._compare(group, block_id, key, digest)

    def saved(self, pages: PageList) -> None:
        """`on_saved` for a page list; so a recorder is an observer of the connector's worker."""
        self.on_saved(_rows(pages))

    def loaded(self, pages: PageList) -> None:
        """`on_loaded` for a page list."""
        self.on_loaded(_rows(pages))

    def digests(self) -> list[tuple[int, bytes, str]]:
        """(group index, key, digest) of each page recorded so far: to be taken over by `recall`."""
        with self._lock:
            return [(group, key, digest) for (group, key), digest in self._saved.items()]

    def recall(self, digests: Iterable[tuple[int, bytes, str]]) -> None:
        """Take over what another recorder has seen, maybe in another process."""
        with self._lock:
            self._saved.update({(group, key): digest for group, key, digest in digests})

    def report(self) -> PageReport:
        """The counts so far."""
        with self._lock:
            return PageReport(
                recorded=len(self._saved),
                compared=self._compared.total(),
                equal=self._equal,
                unknown=self._unknown,
                compared_by_group=dict(self._compared),
                mismatches=tuple(self._mismatches),
            )

    def _compare(self, group: int, block_id: int, key: bytes, digest: str) -> None:
        expected = self._saved.get((group, key))
        if expected is None:
            self._unknown += 1
            return
        self._compared[group] += 1
        if digest == expected:
            self._equal += 1
        elif len(self._mismatches) < self.max_mismatches:
            self._mismatches.append((group, block_id, key.hex()))

    def _digests(self, pages: Sequence[SavedPage]) -> list[str]:
        by_group: dict[int, list[int]] = {}
        for position, (group, _, _) in enumerate(pages):
            by_group.setdefault(group, []).append(position)
        digests = [""] * len(pages)
        for group, positions in by_group.items():
            blocks = [pages[position][1] for position in positions]
            found = page_digests(self.kv_caches, self.kv_cache_config, group, blocks)
            for position, digest in zip(positions, found, strict=True):
                digests[position] = digest
        return digests


def _rows(pages: PageList) -> list[SavedPage]:
    groups = np.frombuffer(pages.group, dtype=np.int32).tolist()
    blocks = np.frombuffer(pages.block, dtype=np.int64).tolist()
    size, rest = divmod(len(pages.keys), max(1, len(groups)))
    if groups and (rest or not size):
        raise ValueError(
            f"{len(groups)} pages with {len(pages.keys)} bytes of keys: does the connector send keys?"
        )
    keys = [pages.keys[i * size : (i + 1) * size] for i in range(len(groups))]
    return list(zip(groups, blocks, keys, strict=True))
