"""The host copier: round trips in every layout, guards, failures, threads."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvquilt.errors import TransferError
from kvquilt.transfer import ArenaView, GroupPages, HostCopier, PageCopies, kernels, layer_pages

DEADLINE = 60.0


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, dtype=torch.uint8):
    span = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    return torch.zeros(span, dtype=dtype).as_strided(shape, strides, offset)


def fill(tensor: torch.Tensor, seed: int = 0) -> None:
    gen = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 127, tensor.shape, generator=gen).to(tensor.dtype))


def run(copier, job: int, way: str, *args):
    getattr(copier, way)(job, *args)
    assert copier.wait(job, DEADLINE)
    (done,) = copier.poll()
    assert done.job_id == job
    return done


class Rig:
    """Groups of tensors with an arena each."""

    def __init__(self, groups, *, num_slots=8, slot_stride=None, rank=0, num_ranks=1, threads=2):
        self.groups = groups
        self.buffers = []
        for group in groups:
            stride = slot_stride or max(64, group.page_bytes * num_ranks)
            self.buffers.append(np.full((num_slots, stride), 0xEE, dtype=np.uint8))
        self.copier = HostCopier(groups, range(len(groups)), rank, num_ranks, threads)
        self.copier.attach([ArenaView.of(b, b.shape[1]) for b in self.buffers])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.copier.close()
        assert self.copier.pending() == 0


def one_group(tensor, num_blocks, block_dim=0, name="g"):
    return GroupPages(name, (layer_pages("layer", tensor, num_blocks, block_dim=block_dim),))


LAYOUTS = {
    "tokens_inside_heads": (strided((8, 16, 2, 256), (8192, 256, 4096, 1)), 0),
    "heads_inside_tokens": (strided((8, 16, 2, 256), (8192, 512, 256, 1)), 0),
    "kv_first": (torch.zeros(2, 8, 16, 64, dtype=torch.uint8), 1),
    "blocks_first": (torch.zeros(8, 2, 16, 64, dtype=torch.uint8), 0),
    "padded_blocks": (strided((8, 1, 1, 100), (128, 100, 100, 1)), 0),
    "heads_first_kernel_blocks": (torch.zeros(2, 24, 16, dtype=torch.float16), 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_saved_and_loaded_elsewhere_is_byte_exact(layout):
    tensor, dim = LAYOUTS[layout]
    fill(tensor)
    ratio = tensor.shape[dim] // 8
    before = tensor.clone()
    with Rig([one_group(tensor, 8, dim)]) as rig:
        done = run(rig.copier, 1, "save", PageCopies([0], [3], [6]))
        assert (done.ok, done.pages, done.num_bytes) == (True, 1, rig.groups[0].page_bytes)
        tensor.fill_(99)
        assert run(rig.copier, 2, "load", PageCopies([0], [5], [6])).ok
        slot = rig.buffers[0]
        assert (slot[:6] == 0xEE).all()
        assert (slot[7:] == 0xEE).all()
    for block in range(8):
        got, old = (t.narrow(dim, block * ratio, ratio) for t in (tensor, before))
        want = before.narrow(dim, 3 * ratio, ratio) if block == 5 else torch.full_like(old, 99)
        assert torch.equal(got, want), block


def test_equal_shape_and_different_strides_are_both_right():
    """B11: the page of either is its own bytes in memory order."""
    a, b = LAYOUTS["tokens_inside_heads"][0], LAYOUTS["heads_inside_tokens"][0]
    assert a.shape == b.shape
    assert a.stride() != b.stride()
    fill(a, 1)
    fill(b, 1)
    groups = [one_group(a, 8, name="a"), one_group(b, 8, name="b")]
    with Rig(groups) as rig:
        assert run(rig.copier, 1, "save", PageCopies([0, 1], [3, 3], [0, 0])).ok
        a_page, b_page = (buffer[0, :8192] for buffer in rig.buffers)
        assert a_page.tobytes() == a[3].permute(1, 0, 2).contiguous().numpy().tobytes()
        assert b_page.tobytes() == b[3].contiguous().numpy().tobytes()
        assert a_page.tobytes() != b_page.tobytes()


@pytest.mark.parametrize("kernel_blocks", [25, 17])
def test_every_kernel_block_of_a_manager_block_is_restored(kernel_blocks):
    """B12: the last kernel page differs from the first and comes back."""
    tensor = torch.zeros(4 * kernel_blocks, 64, 8, dtype=torch.int16)
    tensor += torch.arange(4 * kernel_blocks, dtype=torch.int16)[:, None, None]
    with Rig([one_group(tensor, 4)]) as rig:
        assert rig.groups[0].page_bytes == kernel_blocks * 64 * 8 * 2
        done = run(rig.copier, 1, "save", PageCopies([0], [1], [0]))
        assert done.num_bytes == rig.groups[0].page_bytes
        assert run(rig.copier, 2, "load", PageCopies([0], [3], [0])).ok
    first = kernel_blocks
    assert torch.equal(tensor[3 * kernel_blocks :], tensor[first : 2 * first])
    assert tensor[-1, 0, 0] == 2 * kernel_blocks - 1 != tensor[3 * kernel_blocks, 0, 0]


def test_layers_and_groups_that_share_one_storage_do_not_mix():
    """All groups view one allocation: layer l of either group starts where the other's does."""
    backing = torch.arange(2 * 8 * 96, dtype=torch.int32).to(torch.uint8)
    wide = [backing.as_strided((8, 96), (96, 1), i * 8 * 96) for i in range(2)]
    narrow = [backing.as_strided((8, 40), (96, 1), i * 8 * 96) for i in range(2)]
    groups = [
        GroupPages("wide", tuple(layer_pages(f"w{i}", t, 8) for i, t in enumerate(wide)), 192),
        GroupPages("narrow", tuple(layer_pages(f"n{i}", t, 8) for i, t in enumerate(narrow)), 80),
    ]
    before = backing.clone()
    with Rig(groups) as rig:
        assert run(rig.copier, 1, "save", PageCopies([0, 1], [2, 3], [1, 1])).ok
        assert run(rig.copier, 2, "load", PageCopies([0, 1], [4, 5], [1, 1])).ok
    want = before.clone().view(2, 8, 96)
    want[:, 4] = want[:, 2]
    want[:, 5, :40] = want[:, 3, :40]
    assert torch.equal(backing.view(2, 8, 96), want)


def test_each_rank_has_its_part_of_the_slot():
    tensors = [torch.zeros(4, 96, dtype=torch.uint8) for _ in range(3)]
    buffer = np.zeros((2, 320), dtype=np.uint8)
    for rank, tensor in enumerate(tensors):
        tensor += rank + 1
        copier = HostCopier([one_group(tensor, 4)], {0: 0}, rank, 3, 1)
        copier.attach([ArenaView.of(buffer, 320)])
        assert run(copier, 1, "save", PageCopies([0], [1], [1])).ok
        copier.close()
    assert buffer[1, :288].reshape(3, 96).tolist() == [[r + 1] * 96 for r in range(3)]
    assert not buffer[0].any()
    assert not buffer[1, 288:].any()


def test_zeroed_destinations_are_whole_pages():
    """B26: what is not restored must not keep old bytes of another type."""
    draft, main = torch.full((6, 2, 50), -1.0), torch.full((6, 64), 7, dtype=torch.int16)
    groups = [one_group(draft, 6, name="draft"), one_group(main, 6, name="main")]
    with Rig(groups) as rig:
        rig.buffers[1][0] = 5
        done = run(rig.copier, 1, "load", PageCopies([1], [2], [0]), PageCopies([0, 0], [2, 4], [0, 0]))
        assert (done.ok, done.pages, done.num_bytes) == (True, 1, 128)
    assert [bool((draft[b] == 0).all()) for b in range(6)] == [False, False, True, False, True, False]
    assert [bool((draft[b] == -1).all()) for b in range(6)] == [True, True, False, True, False, True]
    assert (main[2] == 0x0505).all()
    assert (main[[0, 1, 3, 4, 5]] == 7).all()


BAD = {
    "null block": ([0, 0], [1, 0], [0, 1], "null block"),
    "negative block": ([0, 0], [1, -1], [0, 1], "negative"),
    "block beyond": ([0, 0], [1, 8], [0, 1], "beyond the engine"),
    "negative slot": ([0, 0], [1, 2], [0, -1], "slot is negative"),
    "slot beyond": ([0, 0], [1, 2], [0, 8], "beyond the arena"),
    "group beyond": ([0, 3], [1, 2], [0, 1], "no such group"),
    "negative group": ([0, -1], [1, 2], [0, 1], "no such group"),
    "group not copied": ([0, 1], [1, 2], [0, 1], "ever copied"),
}


@pytest.mark.parametrize("way", ["save", "load"])
@pytest.mark.parametrize("case", BAD)
def test_one_bad_entry_fails_the_job_and_nothing_is_copied(case, way):
    group, block, slot, reason = BAD[case]
    tensor = torch.full((8, 64), 3, dtype=torch.uint8)
    buffer = np.full((8, 64), 4, dtype=np.uint8)
    copier = HostCopier([one_group(tensor, 8), None], [0, None])
    copier.attach([ArenaView.of(buffer, 64)])
    done = run(copier, 1, way, PageCopies(group, block, slot))
    assert not done.ok
    assert reason in done.error
    assert (done.pages, done.num_bytes) == (0, 0)
    assert (tensor == 3).all()
    assert (buffer == 4).all()
    assert run(copier, 2, way, PageCopies([0], [1], [0])).ok, "the thread survives"
    copier.close()


def test_one_destination_twice_in_a_job_is_refused():
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    with Rig([one_group(tensor, 8)]) as rig:
        assert "slot is written twice" in run(rig.copier, 1, "save", PageCopies([0, 0], [1, 2], [3, 3])).error
        assert (
            "block is written twice" in run(rig.copier, 2, "load", PageCopies([0, 0], [2, 2], [1, 3])).error
        )
        assert run(rig.copier, 3, "save", PageCopies([0, 0], [1, 1], [2, 3])).ok, "one source twice is fine"


def test_bad_zero_destination_fails_the_load():
    tensor = torch.full((8, 64), 3, dtype=torch.uint8)
    with Rig([one_group(tensor, 8)]) as rig:
        done = run(rig.copier, 1, "load", PageCopies([0], [1], [0]), PageCopies([0], [0], [0]))
        assert not done.ok
        assert "null block" in done.error
    assert (tensor == 3).all()


def test_jobs_before_the_arenas_fail_and_empty_jobs_succeed():
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    copier = HostCopier([one_group(tensor, 8)], [0])
    assert "no arenas" in run(copier, 1, "save", PageCopies([0], [1], [0])).error
    copier.attach([ArenaView.of(bytearray(640), 64)])
    assert run(copier, 1, "load", PageCopies([], [], [])).ok
    with pytest.raises(TransferError, match="already"):
        copier.attach([ArenaView.of(bytearray(640), 64)])
    copier.close()


def test_groups_without_bytes_need_no_arena():
    empty = one_group(torch.zeros(8, 0), 8)
    copier = HostCopier([empty], [None])
    copier.attach([])
    done = run(copier, 1, "save", PageCopies([0], [1], [77]))
    assert (done.ok, done.pages, done.num_bytes) == (True, 1, 0)
    copier.close()


def test_pages_must_fit_the_slots_and_ranks_must_exist():
    group = one_group(torch.zeros(8, 64, dtype=torch.uint8), 8)
    copier = HostCopier([group], [0], 1, 2)
    with pytest.raises(TransferError, match=r"'g'.*2 pages of 64 bytes.*slots of 100"):
        copier.attach([ArenaView.of(bytearray(1000), 100)])
    with pytest.raises(TransferError, match="arena 0 of 0"):
        copier.attach([])
    copier.close()
    for rank, ranks in ((1, 1), (-1, 2)):
        with pytest.raises(TransferError, match="rank"):
            HostCopier([group], [0], rank, ranks)
    with pytest.raises(TransferError, match="no arena"):
        HostCopier([group], [None])
    with pytest.raises(TransferError, match="num_threads"):
        HostCopier([group], [0], num_threads=0)


def test_memory_of_a_device_is_refused():
    layer = layer_pages("m", torch.zeros(8, 64, device="meta"), 8)
    with pytest.raises(TransferError, match="'m' lies in meta memory"):
        HostCopier([GroupPages("g", (layer,))], [0])


def test_a_kernel_that_raises_fails_the_job_and_not_the_thread(monkeypatch, caplog):
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    with Rig([one_group(tensor, 8)]) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "copy_pages", lambda *_: 1 / 0)
            done = run(rig.copier, 1, "save", PageCopies([0], [1], [0]))
        assert not done.ok
        assert "ZeroDivisionError" in done.error
        assert run(rig.copier, 2, "save", PageCopies([0], [1], [0])).ok


def blocked_kernel(monkeypatch):
    """A kernel that waits for `go`; the order of calls by their first slot."""
    started, go, order = threading.Event(), threading.Event(), []
    real = kernels.copy_pages

    def slow(group, block, slot, *rest):
        order.append(int(slot[0]))
        started.set()
        assert go.wait(DEADLINE)
        real(group, block, slot, *rest)

    monkeypatch.setattr(kernels, "copy_pages", slow)
    return started, go, order


def test_blocks_and_slot_belong_to_the_job_until_its_copy_ends(monkeypatch):
    """B82, invariants 26 and 27: a time-out of whoever waits ends nothing."""
    tensor = torch.full((8, 64), 3, dtype=torch.uint8)
    with Rig([one_group(tensor, 8)], threads=1) as rig:
        started, go, _ = blocked_kernel(monkeypatch)
        rig.copier.save(1, PageCopies([0], [1], [0]))
        assert started.wait(DEADLINE)
        assert not rig.copier.wait(1, 0.0)
        assert rig.copier.poll() == []
        assert rig.copier.pending() == 1
        with pytest.raises(TransferError, match="job 1 is pending"):
            rig.copier.save(1, PageCopies([0], [1], [0]))
        go.set()
        assert rig.copier.wait(1, DEADLINE)
        assert [c.ok for c in rig.copier.poll()] == [True]
        assert rig.copier.poll() == []
        assert (rig.buffers[0][0] == 3).all()


def test_loads_go_before_saves(monkeypatch):
    tensor = torch.zeros(8, 64, dtype=torch.uint8)
    with Rig([one_group(tensor, 8)], threads=1) as rig:
        started, go, order = blocked_kernel(monkeypatch)
        rig.copier.save(1, PageCopies([0], [1], [1]))
        assert started.wait(DEADLINE)
        rig.copier.save(2, PageCopies([0], [1], [2]))
        rig.copier.load(3, PageCopies([0], [3], [3]))
        go.set()
        assert all(rig.copier.wait(job, DEADLINE) for job in (1, 2, 3))
        assert order == [1, 3, 2]
        assert len(rig.copier.poll()) == 3


def test_close_lets_running_copies_end_and_fails_the_rest(monkeypatch):
    tensor = torch.full((8, 64), 3, dtype=torch.uint8)
    others = set(threading.enumerate())
    rig = Rig([one_group(tensor, 8)], threads=1)
    started, go, order = blocked_kernel(monkeypatch)
    rig.copier.save(1, PageCopies([0], [1], [1]))
    assert started.wait(DEADLINE)
    rig.copier.save(2, PageCopies([0], [1], [2]))
    closer = threading.Thread(target=rig.copier.close)
    closer.start()
    assert rig.copier.wait(2, DEADLINE)
    assert rig.copier.pending() == 1, "job 1 still copies"
    go.set()
    closer.join(DEADLINE)
    assert not closer.is_alive()
    assert order == [1]
    assert {c.job_id: c.ok for c in rig.copier.poll()} == {1: True, 2: False}
    with pytest.raises(TransferError, match="closed"):
        rig.copier.save(3, PageCopies([0], [1], [1]))
    rig.copier.close()
    mine = set(threading.enumerate()) - others
    assert not [t for t in mine if t.name.startswith("kvquilt-copy")]


def test_a_large_job_is_split_and_complete(monkeypatch):
    tensor = torch.randint(0, 255, (41, 1 << 20), dtype=torch.uint8)
    sizes = []
    real = kernels.copy_pages
    monkeypatch.setattr(kernels, "copy_pages", lambda g, *rest: (sizes.append(len(g)), real(g, *rest)))
    with Rig([one_group(tensor, 41)], num_slots=40) as rig:
        done = run(rig.copier, 1, "save", PageCopies([0] * 40, range(1, 41), range(40)))
        assert done.ok
        assert done.num_bytes == 40 << 20
        assert sum(sizes) == 40
        assert 2 <= len(sizes) <= 4
        assert (rig.buffers[0] == tensor[1:].numpy()).all()


@st.composite
def workloads(draw):
    """Groups of strided layers, and a random list of copies with distinct destinations."""
    num_blocks, num_slots, groups = draw(st.integers(2, 5)), draw(st.integers(2, 5)), []
    for _ in range(draw(st.integers(1, 3))):
        layers = []
        for _ in range(draw(st.integers(1, 3))):
            ratio, inner = draw(st.integers(1, 2)), [*draw(st.lists(st.integers(1, 3), max_size=2)), 1]
            inner[-1] = draw(st.sampled_from([1, 3, 700, 2100]))
            shape, strides, step = [num_blocks * ratio, *inner], [0] * (len(inner) + 1), 1
            for axis in [len(inner), *draw(st.permutations(range(len(inner))))]:
                step += draw(st.sampled_from([0, 0, 3])) if axis != len(inner) else 0
                strides[axis] = step
                step *= shape[axis]
            layers.append((tuple(shape), tuple(strides), draw(st.integers(0, 70))))
        groups.append(layers)
    pairs = st.tuples(st.integers(0, len(groups) - 1), st.integers(1, num_blocks - 1))
    blocks = draw(st.lists(pairs, unique=True, max_size=8))
    slots = draw(st.permutations([(g, s) for g in range(len(groups)) for s in range(num_slots)]))
    return num_blocks, num_slots, groups, blocks, slots


@settings(max_examples=60, deadline=None)
@given(workloads(), st.booleans())
def test_random_layouts_match_plain_torch_indexing(work, save):
    num_blocks, num_slots, spec, blocks, slots = work
    tensors = [[strided(*layer) for layer in group] for group in spec]
    for g, group in enumerate(tensors):
        for i, tensor in enumerate(group):
            fill(tensor, 10 * g + i)
    pages = [
        GroupPages(f"g{g}", tuple(layer_pages(f"{g}.{i}", t, num_blocks) for i, t in enumerate(group)))
        for g, group in enumerate(tensors)
    ]
    left = {g: [s for h, s in slots if h == g] for g in range(len(spec))}
    picked = [(g, b, left[g].pop()) for g, b in blocks if left[g]]

    def page(g: int, block: int) -> bytes:
        out = b""
        for tensor in tensors[g]:
            ratio = tensor.shape[0] // num_blocks
            mine = tensor[block * ratio : (block + 1) * ratio]
            order = sorted(range(mine.dim()), key=lambda d: mine.stride(d), reverse=True)
            out += mine.permute(order).contiguous().numpy().tobytes()
        return out

    with Rig(pages, num_slots=num_slots) as rig:
        for g, buffer in enumerate(rig.buffers):
            buffer[:] = np.random.default_rng(g).integers(0, 255, buffer.shape, dtype=np.uint8)
        before = {(g, b): page(g, b) for g in range(len(spec)) for b in range(num_blocks)}
        arenas = [buffer.copy() for buffer in rig.buffers]
        copies = PageCopies(*(list(column) for column in zip(*picked, strict=True))) if picked else None
        copies = copies or PageCopies([], [], [])
        assert run(rig.copier, 1, "save" if save else "load", copies).ok
        for g, b, s in picked:
            size = pages[g].page_bytes
            if save:
                arenas[g][s, :size] = np.frombuffer(before[g, b], dtype=np.uint8)
            else:
                before[g, b] = arenas[g][s, :size].tobytes()
        assert all((a == b).all() for a, b in zip(arenas, rig.buffers, strict=True))
        assert before == {(g, b): page(g, b) for g in range(len(spec)) for b in range(num_blocks)}
