"""One page's header at a time, for tests that forge or read them."""

from __future__ import annotations

import numpy as np

from kvquilt.tiers.format import PageHeader, PageHeaders


def _headers(page: PageHeader) -> PageHeaders:
    return PageHeaders(
        len(page.spans) // 32,
        page.namespace,
        groups=[page.group],
        generation=page.generation,
        payload_bytes=page.payload_bytes,
        slots=np.asarray([page.slot], dtype=np.int64),
        keys=np.frombuffer(page.key, dtype=np.uint64).reshape(1, 4),
        spans=[page.spans],
    )


def pack_page(header: memoryview, page: PageHeader, payload: memoryview) -> None:
    """Write the header of `page` with its checks into `header`, whole blocks long."""
    _headers(page).write(header, [payload])


def verify_page(header: memoryview, payload: memoryview, page: PageHeader) -> bool:
    """Is this slot, byte for byte, the intact page that `page` describes?"""
    return _headers(page).verify(header, [payload], [0])[0]
