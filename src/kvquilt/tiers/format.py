"""What lies on disk, byte by byte: slot headers, table entries, and the first block of each file.

docs/format.md describes the same in tables. All integers are little-endian. Every structure is
checked before it is believed: a slot by xxh3-128 over header and payload, the rest by 64-bit checks.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvquilt.compiled import njit

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "FileHead",
    "PageHeader",
    "PageHeaders",
    "entry_dtype",
    "header_bytes",
    "intact_entries",
    "parse_page_header",
    "seal_entries",
]

FORMAT_VERSION = 1
BLOCK_BYTES = 4096
"""Unit of direct disk I/O; offsets and lengths of all slots are multiples of it."""

SLAB_MAGIC = b"KVQSLAB1"
TABLE_MAGIC = b"KVQTABL1"
PAGE_MAGIC = b"KVQPAGE1"

# magic, version, arena, slot bytes, number of slots, keys per span, entry bytes, namespace digest
_FILE = struct.Struct("<8sIIQQII32s")
# magic, version, group, generation, payload bytes, key, namespace digest, slot, keys per span, reserved
_PAGE = struct.Struct("<8sIIQQ32s32sQII")
_NUM_SPANS = 104  # where what names the page ends
_PAGE_CHECK = _PAGE.size  # xxh3-128 of the header with this check zero, then of the payload
_HEADER_CHECK = _PAGE_CHECK + 16  # xxh3-64 of the header with both checks zero
_SPANS = 160  # where the hashes inside the block start
_NO_PAGE_CHECK = bytes(16)
_NO_CHECKS = bytes(24)


def header_bytes(span_keys: int) -> int:
    """Length of a slot's header: whole blocks."""
    return -(-(_SPANS + 32 * span_keys) // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class FileHead:
    """The first block of a slab or of a table: what the file is, and for what.

    entry_bytes: 0 in a slab.
    """

    magic: bytes
    arena: int
    slot_bytes: int
    num_slots: int
    span_keys: int
    entry_bytes: int
    namespace: bytes

    def pack(self) -> bytes:
        """The whole block."""
        facts = _FILE.pack(
            self.magic,
            FORMAT_VERSION,
            self.arena,
            self.slot_bytes,
            self.num_slots,
            self.span_keys,
            self.entry_bytes,
            self.namespace,
        )
        check = xxhash.xxh3_64_intdigest(facts)
        return (facts + struct.pack("<Q", check)).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def parse(cls, block: bytes) -> FileHead | None:
        """The head in this block; None if there is none of this version, or it is damaged."""
        if len(block) < _FILE.size + 8:
            return None
        facts = block[: _FILE.size]
        if struct.unpack_from("<Q", block, _FILE.size)[0] != xxhash.xxh3_64_intdigest(facts):
            return None
        magic, version, arena, slot_bytes, num_slots, span_keys, entry_bytes, namespace = _FILE.unpack(facts)
        if version != FORMAT_VERSION or magic not in (SLAB_MAGIC, TABLE_MAGIC):
            return None
        return cls(magic, arena, slot_bytes, num_slots, span_keys, entry_bytes, namespace)


@dataclass(frozen=True)
class PageHeader:
    """What a slot's header says of its page. spans: the hashes inside the block, 32 bytes each."""

    group: int
    generation: int
    payload_bytes: int
    key: bytes
    namespace: bytes
    slot: int
    spans: bytes


@functools.cache
def _page_dtype(span_keys: int) -> np.dtype[np.void]:
    """A header as an array's element, for whole batches."""
    fields: list[tuple[str, object, int]] = [
        ("magic", np.dtype("S8"), 0),
        ("version", np.dtype("<u4"), 8),
        ("group", np.dtype("<u4"), 12),
        ("generation", np.dtype("<u8"), 16),
        ("payload_bytes", np.dtype("<u8"), 24),
        ("key", np.dtype(("<u8", (4,))), 32),
        ("namespace", np.dtype(("u1", (32,))), 64),
        ("slot", np.dtype("<u8"), 96),
        ("num_spans", np.dtype("<u4"), _NUM_SPANS),
        ("spans", np.dtype(("<u8", (span_keys, 4))), _SPANS),
    ]
    return np.dtype(
        {
            "names": [name for name, _, _ in fields],
            "formats": [kind for _, kind, _ in fields],
            "offsets": [offset for _, _, offset in fields],
            "itemsize": header_bytes(span_keys),
        }
    )


class PageHeaders:
    """Headers of a batch of pages, as they have to be.

    groups, slots: shape (n,). keys: shape (n, 4). spans: shape (n, s, 4), the hashes inside each
    block, at most span_keys of them.
    """

    def __init__(
        self,
        span_keys: int,
        namespace: bytes,
        *,
        groups: NDArray[np.int64],
        generation: int,
        payload_bytes: int,
        slots: NDArray[np.int64],
        keys: NDArray[np.uint64],
        spans: NDArray[np.uint64],
    ) -> None:
        facts = np.zeros(len(slots), dtype=_page_dtype(span_keys))
        facts["magic"] = PAGE_MAGIC
        facts["version"] = FORMAT_VERSION
        facts["group"] = groups
        facts["generation"] = generation
        facts["payload_bytes"] = payload_bytes
        facts["key"] = keys
        facts["namespace"] = np.frombuffer(namespace, dtype=np.uint8)
        facts["slot"] = slots
        facts["num_spans"] = spans.shape[1]
        facts["spans"][:, : spans.shape[1]] = spans
        self._size = facts.dtype.itemsize
        self._headers = facts.view(np.uint8).reshape(len(slots), self._size)

    def seal(self, place: int, header: memoryview, payload: memoryview) -> None:
        """Put the header at this place of the batch, with its checks for this payload, into `header`, of a
        header's length."""
        header[:] = self._headers[place].data
        struct.pack_into("<Q", header, _HEADER_CHECK, xxhash.xxh3_64_intdigest(header))
        page = xxhash.xxh3_128(header)
        page.update(payload)
        header[_PAGE_CHECK:_HEADER_CHECK] = page.digest()

    def proves(self, place: int, header: memoryview, payload: memoryview) -> bool:
        """Are these, as they were read, the intact page at this place of the batch? (its spans are as intact,
        but need not be those given) Puts zero in place of the page's check."""
        if header[:_NUM_SPANS] != self._headers[place, :_NUM_SPANS].tobytes():
            return False
        check = bytes(header[_PAGE_CHECK:_HEADER_CHECK])
        header[_PAGE_CHECK:_HEADER_CHECK] = _NO_PAGE_CHECK
        page = xxhash.xxh3_128(header)
        page.update(payload)
        return page.digest() == check


def parse_page_header(header: bytes | memoryview) -> PageHeader | None:
    """What a header says; None if it is no intact header of this version."""
    page = _fields(header)
    if page is None:
        return None
    checks = bytes(header[_PAGE_CHECK : _PAGE_CHECK + 24])
    own = xxhash.xxh3_64_intdigest(_unchecked(header))
    return page if struct.unpack_from("<Q", checks, 16)[0] == own else None


def _fields(header: bytes | memoryview) -> PageHeader | None:
    magic, version, group, generation, payload, key, namespace, slot, spans, _ = _PAGE.unpack_from(header, 0)
    end = _SPANS + 32 * spans
    if magic != PAGE_MAGIC or version != FORMAT_VERSION or end > len(header):
        return None
    return PageHeader(group, generation, payload, key, namespace, slot, bytes(header[_SPANS:end]))


def _unchecked(header: bytes | memoryview) -> bytes:
    """The header with its checks zero."""
    return bytes(header[:_PAGE_CHECK]) + _NO_CHECKS + bytes(header[_PAGE_CHECK + 24 :])


@functools.cache
def entry_dtype(span_keys: int) -> np.dtype[np.void]:
    """A table's entry for one slot; all zero where the slot holds no page.

    stamp: recency when the page was written. check: over the rest of the entry and the slot's number.
    """
    return np.dtype(
        [
            ("key", "<u8", (4,)),
            ("generation", "<u8"),
            ("stamp", "<i8"),
            ("group", "<i4"),
            ("reserved", "<u4"),
            ("check", "<u8"),
            ("span", "<u8", (span_keys, 4)),
        ]
    )


_CHECK_WORD = 7  # place of `check` in an entry, in 64-bit words
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@njit
def _checks(words: NDArray[np.uint64], slots: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """A 64-bit mix over the words of each entry but its check. Guards against torn and foreign
    entries; what an entry promises is proven by the page itself."""
    for i in range(words.shape[0]):
        mixed = np.uint64(slots[i]) + _STEP
        for j in range(words.shape[1]):
            if j != _CHECK_WORD:
                mixed = (mixed ^ words[i, j]) * _MIX
                mixed = (mixed ^ (mixed >> _SHIFT)) + _STEP
        out[i] = mixed


def _entry_checks(entries: NDArray[np.void], slots: NDArray[np.int64]) -> NDArray[np.uint64]:
    words = np.ascontiguousarray(entries).view(np.uint64).reshape(len(entries), entries.dtype.itemsize // 8)
    out = np.empty(len(entries), dtype=np.uint64)
    _checks(words, slots, out)
    return out


def seal_entries(entries: NDArray[np.void], slots: NDArray[np.int64]) -> None:
    """Fill in the checks of entries for these slots."""
    entries["check"] = _entry_checks(entries, slots)


def intact_entries(entries: NDArray[np.void], slots: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which entries are intact and belong to these slots. Empty ones are not."""
    return np.asarray(entries["check"] == _entry_checks(entries, slots))
