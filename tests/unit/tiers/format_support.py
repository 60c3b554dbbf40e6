"""One page's header at a time, for tests that forge or read them."""

from __future__ import annotations

import numpy as np

from kvquilt.tiers.format import PageHeader, PageHeaders


def _headers(page: PageHeader) -> PageHeaders:
    spans = np.frombuffer(page.spans, dtype=np.uint64).reshape(1, -1, 4)
    return PageHeaders(
        spans.shape[1],
        page.namespace,
        groups=np.asarray([page.group], dtype=np.int64),
        generation=page.generation,
        payload_bytes=page.payload_bytes,
        slots=np.asarray([page.slot], dtype=np.int64),
        keys=np.frombuffer(page.key, dtype=np.uint64).reshape(1, 4),
        spans=spans,
    )


def pack_page(header: memoryview, page: PageHeader, payload: memoryview) -> None:
    """Write the header of `page` with its checks into `header`, whole blocks long."""
    _headers(page).seal(0, header, payload)


def verify_page(header: memoryview, payload: memoryview, page: PageHeader) -> bool:
    """Is this slot, byte for byte, the intact page that `page` describes?"""
    return _headers(page).proves(0, memoryview(bytearray(header)), payload)
