"""Where pages lie: by storage offset and strides, never by the shape."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvquilt.errors import TransferError
from kvquilt.transfer import ArenaView, GroupPages, PageCopies, check_shared_memory, layer_pages


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, dtype=torch.uint8):
    span = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    return torch.zeros(span, dtype=dtype).as_strided(shape, strides, offset)


def page_of(layer, block: int) -> bytes:
    """The page's bytes, read through the description alone."""
    storage = torch.frombuffer(
        (np.ctypeslib.ctypes.c_uint8 * layer.tensor.untyped_storage().nbytes()).from_address(
            layer.tensor.untyped_storage().data_ptr()
        ),
        dtype=torch.uint8,
    )
    start = layer.base_address - layer.tensor.untyped_storage().data_ptr() + block * layer.block_stride_bytes
    pieces = [storage[start + o : start + o + n] for o, n in layer.fragments]
    return torch.cat(pieces).numpy().tobytes() if pieces else b""


def test_a_contiguous_block_is_one_fragment():
    layer = layer_pages("a", torch.zeros(4, 2, 8, 16, dtype=torch.float32), 4)
    assert (layer.block_stride_bytes, layer.fragments, layer.page_bytes) == (1024, ((0, 1024),), 1024)


def test_storage_offset_moves_the_base_address():
    backing = torch.zeros(1000, dtype=torch.int16)
    layer = layer_pages("a", backing.as_strided((4, 8), (32, 1), 100), 4)
    assert layer.base_address == backing.data_ptr() + 200
    assert (layer.block_stride_bytes, layer.fragments) == (64, ((0, 16),))


def test_block_axis_is_told_not_guessed():
    tensor = torch.zeros(2, 2, 8, dtype=torch.uint8)
    assert layer_pages("a", tensor, 2, block_dim=0).fragments == ((0, 16),)
    assert layer_pages("a", tensor, 2, block_dim=1).fragments == ((0, 8), (16, 8))
    assert layer_pages("a", tensor, 2, block_dim=-2) == layer_pages("a", tensor, 2, block_dim=1)


def test_permuted_axes_of_a_packed_block_still_are_one_fragment():
    tensor = strided((4, 2, 8, 16), (256, 16, 32, 1))
    assert layer_pages("a", tensor, 4).fragments == ((0, 256),)


@pytest.mark.parametrize("ratio", [25, 17])
def test_manager_block_spans_all_its_kernel_blocks(ratio):
    layer = layer_pages("a", torch.zeros(3 * ratio, 64, dtype=torch.uint8), 3)
    assert (layer.block_stride_bytes, layer.fragments) == (64 * ratio, ((0, 64 * ratio),))
    apart = layer_pages("a", strided((3 * ratio, 64), (96, 1)), 3)
    assert (apart.block_stride_bytes, len(apart.fragments), apart.page_bytes) == (
        96 * ratio,
        ratio,
        64 * ratio,
    )


def test_zero_byte_pages_have_no_fragments():
    assert layer_pages("a", torch.zeros(4, 0), 4).fragments == ()
    assert GroupPages("g", ()).page_bytes == 0


@pytest.mark.parametrize(
    ("tensor", "num_blocks", "block_dim", "reason"),
    [
        (torch.zeros(1, 8).expand(4, 8), 4, 0, "share memory"),
        (torch.zeros(4, 1, 8).expand(4, 2, 8), 4, 0, "share memory"),
        (strided((4, 8), (4, 1)), 4, 0, "share memory"),
        # These strides give a token's second head and a later token's first one the same bytes.
        (strided((8, 16, 2, 256), (8192, 256, 512, 1)), 8, 0, "share memory"),
        (torch.zeros(5, 8), 4, 0, "not a multiple"),
        (torch.zeros(2, 8), 4, 0, "not a multiple"),
        (torch.zeros(0, 8), 4, 0, "not a multiple"),
        (torch.zeros(4, 8), 0, 0, "positive"),
        (torch.zeros(4, 8), -4, 0, "positive"),
        (torch.zeros(4, 8), 4, 2, "axes"),
        (torch.zeros(()), 1, 0, "axes"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_with_the_layers_name(tensor, num_blocks, block_dim, reason):
    with pytest.raises(TransferError, match=f"layer 'model.layers.3'.*{reason}"):
        layer_pages("model.layers.3", tensor, num_blocks, block_dim=block_dim)


@st.composite
def spread_tensors(draw):
    """A tensor with axes in any memory order, gaps between them, and any block axis."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides, step = [0] * len(shape), 1
    for axis in draw(st.permutations(range(len(shape)))):
        step += draw(st.sampled_from([0, 0, 1, 5]))
        strides[axis] = step
        step *= shape[axis]
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
    tensor = strided(tuple(shape), tuple(strides), draw(st.integers(0, 3)), dtype)
    axis = draw(st.integers(0, len(shape) - 1))
    return tensor, axis, draw(st.sampled_from([r for r in (1, 2, 3, 4) if shape[axis] % r == 0]))


@settings(max_examples=300, deadline=None)
@given(spread_tensors())
def test_fragments_are_exactly_the_bytes_of_the_block(drawn):
    tensor, axis, ratio = drawn
    num_blocks = tensor.shape[axis] // ratio
    layer = layer_pages("a", tensor, num_blocks, block_dim=axis)
    assert layer.page_bytes * num_blocks == tensor.numel() * tensor.element_size()
    raw = torch.zeros(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    for block in range(num_blocks):
        raw.zero_()
        marked = tensor.narrow(axis, block * ratio, ratio)
        marked.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).fill_(
            {1: 255, 2: -1, 4: -1}[tensor.element_size()]
        )
        assert page_of(layer, block) == b"\xff" * layer.page_bytes
        assert int((raw == 255).sum()) == layer.page_bytes


def test_group_pages_must_have_the_layouts_page_bytes():
    layer = layer_pages("a", torch.zeros(4, 64, dtype=torch.uint8), 4)
    assert GroupPages("g", (layer, layer)).page_bytes == 128
    assert GroupPages("g", (layer,), 64).page_bytes == 64
    with pytest.raises(TransferError, match=r"'g'.*64 bytes per block.*says 128"):
        GroupPages("g", (layer,), 128)
    with pytest.raises(TransferError, match=r"'g'.*\[4, 8\] blocks"):
        GroupPages("g", (layer, layer_pages("b", torch.zeros(8, 64), 8)))


def test_layers_that_lie_one_after_another_are_copied_as_one():
    packed = torch.zeros(4, 3, 32, dtype=torch.uint8)
    layers = tuple(layer_pages(f"l{i}", packed[:, i], 4) for i in range(3))
    assert [(s, n) for _, s, n in GroupPages("g", layers).fragment_runs()] == [(96, 96)]
    assert len(GroupPages("g", layers[::-1]).fragment_runs()) == 3
    apart = tuple(layer_pages(f"l{i}", torch.zeros(4, 32, dtype=torch.uint8), 4) for i in range(3))
    assert len(GroupPages("g", apart).fragment_runs()) == 3


def test_neighbours_with_other_strides_stay_apart():
    """Side by side in block 0 only: as one piece, the later blocks would be the wrong bytes."""
    backing = torch.zeros(4096, dtype=torch.uint8)
    first = layer_pages("a", backing.as_strided((4, 32), (256, 1), 0), 4)
    second = layer_pages("b", backing.as_strided((4, 32), (512, 1), 32), 4)
    assert [(s, n) for _, s, n in GroupPages("g", (first, second)).fragment_runs()] == [(256, 32), (512, 32)]


def test_copies_are_flat_integers_of_one_length():
    assert len(PageCopies([0, 1], [1, 2], [3, 4])) == 2
    assert len(PageCopies([], [], [])) == 0
    for bad in ([0.5], [[1]], [1, 2], ["a"]):
        with pytest.raises(TransferError, match="page copies"):
            PageCopies([0], bad, [1])
    assert PageCopies([2**32], [1], [1]).group[0] != 0


def test_arena_view_needs_a_writable_buffer():
    assert ArenaView.of(bytearray(1000), 256).num_slots == 3
    with pytest.raises(TransferError, match="read-only"):
        ArenaView.of(bytes(1000), 256)


def group_at(name: str, memory: torch.Tensor, stride: int, size: int, start: int = 0) -> GroupPages:
    """A group of one layer with four blocks in `memory`."""
    blocks = memory.as_strided((4, size), (stride, 1), start)
    return GroupPages(name, (layer_pages(f"{name}.0", blocks, 4),))


def test_b58_blocks_that_would_lie_over_another_groups_states_are_refused() -> None:
    """A state takes 1,048,576 bytes; attention of 1,024 bytes per token fits it with blocks of 1,024
    tokens, and with 2,048 its block 1 lies where state 2 does."""
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    state = group_at("state", memory, 1 << 20, 1 << 20)
    fits = group_at("full", memory, 1024 * 1024, 1024 * 1024)
    check_shared_memory([state, fits])
    with pytest.raises(TransferError, match=r"1048576 and 2097152 bytes apart"):
        check_shared_memory([state, group_at("full", memory, 2048 * 1024, 2048 * 1024)])


def test_layers_apart_from_each_other_may_differ() -> None:
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    low = group_at("low", memory, 1 << 20, 1 << 20)
    high = group_at("high", memory, 1 << 19, 1 << 19, 4 << 20)
    check_shared_memory([low, high])
    packed = [group_at(name, memory, 1 << 20, 1 << 18, i << 18) for i, name in enumerate("abcd")]
    check_shared_memory(packed)
