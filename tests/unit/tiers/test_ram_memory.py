"""The pools as memory of this process: where pages lie in it, and that huge pages can."""

from __future__ import annotations

import os

import numpy as np

from kvquilt.store import mapping
from kvquilt.tiers.memory import RamMemory
from unit.store.store_support import chain_of, full32_window16, make_store


def test_pages_lie_in_the_slots_that_are_named_and_huge_pages_can_be_mapped() -> None:
    with make_store(full32_window16(), 2048) as store:
        memory = RamMemory(store)
        slots = np.asarray([2047, 5])
        pages = memory.pages(chain_of(store.layout, "ab"), 1, np.asarray([0, 1]), slots)
        stride = store.arenas[1].slot_stride
        os.pwrite(store.arenas[1].fd, b"page", 5 * stride)
        assert bytes(pages.memory[pages.offsets[1] :][:4]) == b"page" == bytes(memory.slot(1, 5)[:4])
        assert pages.offsets[0] == 2047 * stride
        huge, address = mapping.huge_page_bytes(), np.frombuffer(pages.memory, dtype=np.uint8).ctypes.data
        assert not 0 < huge <= len(pages.memory) or address % huge == 0
        memory.close()
