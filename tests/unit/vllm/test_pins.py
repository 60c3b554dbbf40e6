"""Pins on the engine's real block pool."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvquilt.vllm.pins import MAX_PINNED_SHARE, MAX_STEP_SHARE, MIN_PINNED_BLOCKS, PinBook


def pool(size: int = 101) -> BlockPool:
    return BlockPool(num_gpu_blocks=size, enable_caching=True, hash_block_size=16)


def test_pinned_block_is_not_handed_out_again() -> None:
    blocks = pool()
    pins = PinBook(blocks)
    mine = blocks.get_new_blocks(3)
    pins.pin([b.block_id for b in mine])
    blocks.free_blocks(reversed(mine))
    assert blocks.get_num_free_blocks() == 97
    assert (len(pins), pins.exclusive()) == (3, 3)
    rest = blocks.get_new_blocks(97)
    assert not {b.block_id for b in rest} & {b.block_id for b in mine}
    pins.unpin([b.block_id for b in mine])
    assert (len(pins), blocks.get_num_free_blocks()) == (0, 3)


def test_pin_on_a_block_in_use_costs_nothing() -> None:
    blocks = pool()
    pins = PinBook(blocks)
    mine = blocks.get_new_blocks(2)
    pins.pin([b.block_id for b in mine])
    assert (len(pins), pins.exclusive()) == (2, 0)
    blocks.free_blocks([mine[0]])
    assert pins.exclusive() == 1


def test_two_pins_on_one_block_are_two_references() -> None:
    blocks = pool()
    pins = PinBook(blocks)
    [block] = blocks.get_new_blocks(1)
    pins.pin([block.block_id])
    pins.pin([block.block_id])
    blocks.free_blocks([block])
    assert (len(pins), pins.exclusive()) == (1, 1)
    pins.unpin([block.block_id])
    assert blocks.get_num_free_blocks() == 99
    pins.unpin([block.block_id])
    assert (len(pins), blocks.get_num_free_blocks()) == (0, 100)


def test_free_block_can_be_pinned_out_of_the_free_list() -> None:
    blocks = pool()
    pins = PinBook(blocks)
    pins.pin([5, 6])
    assert blocks.get_num_free_blocks() == 98
    pins.unpin([5, 6])
    assert blocks.get_num_free_blocks() == 100


def test_tail_goes_before_its_head() -> None:
    """Freed blocks are handed out oldest first: the chain's last block must be the first to go."""
    blocks = pool(6)
    pins = PinBook(blocks)
    chain = [b.block_id for b in blocks.get_new_blocks(5)]
    pins.pin(chain)
    blocks.free_blocks([blocks.blocks[i] for i in chain])
    pins.unpin(chain)
    assert [b.block_id for b in blocks.get_new_blocks(5)] == chain[::-1]


def test_knows_when_only_pins_are_in_the_way() -> None:
    blocks = pool()
    pins = PinBook(blocks)
    assert pins.all_that_is_used()
    mine = blocks.get_new_blocks(2)
    pins.pin([mine[0].block_id])
    assert not pins.all_that_is_used()
    blocks.free_blocks(mine)
    assert pins.all_that_is_used()
    assert not blocks.reset_prefix_cache()
    pins.unpin([mine[0].block_id])
    assert blocks.reset_prefix_cache()


@pytest.mark.parametrize(
    ("size", "per_step"), [(10, 0), (1000, 0), (1000, 15), (1000, 100), (1000, 10_000), (100_000, 50)]
)
def test_cap(size: int, per_step: int) -> None:
    cap = PinBook(pool(size), per_step).cap
    share, most = int(size * MAX_PINNED_SHARE), int(size * MAX_STEP_SHARE)
    assert cap == max(1, share, min(per_step, most), min(MIN_PINNED_BLOCKS, most))
    assert 1 <= cap <= max(1, size * MAX_STEP_SHARE)
