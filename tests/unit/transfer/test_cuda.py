"""The accelerator's copier on a fake device: every schedule keeps the order that events give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvquilt.errors import TransferError
from kvquilt.testing.fake_device import FakeDevice, Span
from kvquilt.transfer import ArenaView, GroupPages, PageCopies, layer_pages
from kvquilt.transfer.cuda import CudaCopier, GroupPath

NUM_BLOCKS, NUM_SLOTS, FRAGMENT, LAYERS = 8, 4, 64, 2
PAGE = FRAGMENT * LAYERS
SCHEDULES = 1000
DEADLINE = 60.0


class Rig:
    """One group of two layers on a fake device, and an engine that gives it work."""

    def __init__(self, seed: int = 0, *, threaded: bool = False, **options):
        self.random = random.Random(seed)
        self.device = FakeDevice(seed, **options)
        self.cache = torch.zeros(LAYERS, NUM_BLOCKS, FRAGMENT, dtype=torch.uint8)
        self.cache += torch.arange(NUM_BLOCKS, dtype=torch.uint8)[:, None]
        layers = tuple(layer_pages(f"l{i}", self.cache[i], NUM_BLOCKS) for i in range(LAYERS))
        self.arena = np.full((NUM_SLOTS, PAGE), 200, dtype=np.uint8)
        self.arena += np.arange(NUM_SLOTS, dtype=np.uint8)[:, None]
        group = GroupPages("g", layers)
        self.copier = CudaCopier([group], [0], device=self.device, threaded=threaded)
        self.copier.attach([ArenaView.of(self.arena, PAGE)])
        self.done = {}

    def block(self, block: int) -> bytes:
        return self.cache[:, block].numpy().tobytes()

    def spans(self, block: int, write: bool) -> list[Span]:
        return [Span(self.cache[i, block].data_ptr(), FRAGMENT, write) for i in range(LAYERS)]

    def forward(self, name: str, *, reads: int | None = None, writes: int | None = None, value: int = 0):
        """A slow forward pass; returns the bytes that it saw, filled in as it runs."""
        seen, steps, spans = [], [], []
        for layer in range(LAYERS):
            for half in range(2):
                part = slice(half * FRAGMENT // 2, (half + 1) * FRAGMENT // 2)
                if reads is not None:
                    source = self.cache[layer, reads, part]
                    steps.append(lambda s=source: seen.append(s.numpy().tobytes()))
                if writes is not None:
                    steps.append(lambda t=self.cache[layer, writes, part]: t.fill_(value))
        spans += self.spans(reads, False) if reads is not None else []
        spans += self.spans(writes, True) if writes is not None else []
        self.device.work(self.device.current_stream(), name, steps, spans)
        return seen

    def poll(self) -> list[int]:
        new = {c.job_id: c for c in self.copier.poll()}
        assert not new.keys() & self.done.keys(), "a job is reported once"
        self.done |= new
        return list(new)

    def some_time_passes(self) -> None:
        """Whatever the threads and the device may do between two calls of the engine."""
        for _ in range(self.random.randrange(6)):
            self.random.choice([self.copier.launch_next, self.device.step, self.device.step])()

    def until(self, condition, on_done=lambda job: None) -> None:
        for _ in range(10_000):
            if condition():
                return
            self.some_time_passes()
            for job in self.poll():
                on_done(job)
        raise AssertionError("the schedule does not end")


def overlapped_schedule(seed: int, **options) -> list[str]:
    """B78: a save right behind the forward pass that writes its block; a load into a block that
    a step in flight still reads; after each Completion the step that must come later."""
    rig, wrong = Rig(seed, **options), []
    saw_before = rig.forward("step t", reads=2, writes=1, value=77)
    rig.some_time_passes()
    later: dict[int, list[bytes]] = {}
    jobs = [
        lambda: rig.copier.save(1, PageCopies([0], [1], [0])),
        lambda: rig.copier.load(2, PageCopies([0], [2], [1]), PageCopies([0], [3], [0])),
    ]
    rig.random.shuffle(jobs)
    for job in jobs:
        job()
        rig.some_time_passes()

    def on_done(job: int) -> None:
        if job == 1:  # the pin is gone: the block may be written anew
            later[1] = rig.forward("overwrite", writes=1, value=99)
        else:  # the load is reported: a step may read the block
            later[2] = rig.forward("read", reads=2)

    rig.until(lambda: len(later) == 2 and rig.device.idle(), on_done)
    checks = {
        "the running step saw its own block": b"".join(saw_before) == bytes([2]) * PAGE,
        "the save saw the final bytes": rig.arena[0].tobytes() == bytes([77]) * PAGE,
        "the next step saw the loaded bytes": b"".join(later[2]) == bytes([201]) * PAGE,
        "the zeroed block is zero": rig.block(3) == bytes(PAGE),
        "both jobs ended well": all(c.ok for c in rig.done.values()),
    }
    wrong += [name for name, holds in checks.items() if not holds]
    rig.copier.close()
    return wrong + rig.device.hazards


def test_no_read_before_the_writer_is_done_no_overwrite_before_the_reader_is_done():
    for seed in range(SCHEDULES):
        assert overlapped_schedule(seed) == [], f"schedule {seed}"


def test_without_events_the_same_schedules_go_wrong():
    """The test above can fail."""
    found = {wrong for seed in range(100) for wrong in overlapped_schedule(seed, ignore_waits=True)}
    assert {"the save saw the final bytes", "the running step saw its own block"} <= found
    assert any("begins during" in wrong for wrong in found)


def aborted_schedule(seed: int, *, reuse_at_abort: bool = False, **options) -> list[str]:
    """B82: the request is aborted, or its time is up, while the device copies. The owner of the
    memory hands blocks and slot out again; the new owners' bytes must survive."""
    rig = Rig(seed, **options)
    jobs = [
        lambda: rig.copier.load(1, PageCopies([0, 0], [4, 5], [1, 2])),
        lambda: rig.copier.save(2, PageCopies([0], [6], [0])),
    ]
    rig.random.shuffle(jobs)
    for job in jobs:
        job()
        rig.some_time_passes()
    if rig.random.random() < 0.5:
        rig.copier.wait(1, 0.0)  # whoever waited gives up; the copy goes on

    def new_owner(job: int) -> None:
        if job == 1:
            for block in (4, 5):
                rig.forward(f"owner of {block}", writes=block, value=111)
        elif job == 2:
            rig.copier.save(3, PageCopies([0], [7], [0]))

    if reuse_at_abort:
        new_owner(1)
    later = (lambda job: new_owner(job) if job == 2 else None) if reuse_at_abort else new_owner
    rig.until(lambda: {1, 2, 3} <= rig.done.keys() and rig.device.idle(), later)
    wrong = [f"block {b}" for b in (4, 5) if rig.block(b) != bytes([111]) * PAGE]
    wrong += ["slot 0"] if rig.arena[0].tobytes() != bytes([7]) * PAGE else []
    rig.copier.close()
    return wrong + rig.device.hazards


def test_blocks_and_slots_are_kept_until_the_copy_has_ended():
    for seed in range(SCHEDULES):
        assert aborted_schedule(seed) == [], f"schedule {seed}"


def test_reuse_at_the_abort_is_noticed():
    assert any(aborted_schedule(seed, reuse_at_abort=True) for seed in range(100))


def test_a_copy_that_fails_halfway_ends_only_when_its_first_half_has():
    for seed in range(50):
        rig = Rig(seed, fail_copy=0)
        rig.copier.load(1, PageCopies([0, 0], [4, 5], [1, 2]))
        assert rig.copier.launch_next()
        while rig.poll() == []:
            assert not rig.device.idle()
            assert rig.device.step()
        assert not rig.done[1].ok
        assert "middle of a batch" in rig.done[1].error
        assert (rig.done[1].pages, rig.done[1].num_bytes) == (0, 0)
        assert rig.device.idle(), "nothing of the failed job copies any more"
        rig.copier.save(2, PageCopies([0], [1], [0]))
        done = rig.done
        rig.until(lambda done=done: 2 in done)
        assert done[2].ok
        rig.copier.close()
        assert rig.device.hazards == []


def test_memory_stays_pinned_until_the_last_copy_has_ended():
    for seed in range(200):
        rig = Rig(seed)
        rig.forward("step", writes=1, value=5)
        rig.copier.save(1, PageCopies([0], [1], [0]))
        rig.copier.load(2, PageCopies([0], [2], [1]))
        rig.some_time_passes()
        rig.copier.close()
        rig.poll()
        assert rig.done.keys() == {1, 2}
        assert rig.copier.pending() == 0
        assert rig.device.hazards == []
        assert all(c.ok or c.error == "the copier was closed" for c in rig.done.values())
        with pytest.raises(TransferError, match="closed"):
            rig.copier.save(3, PageCopies([0], [1], [0]))
        rig.copier.close()


def test_unpinning_under_a_copy_is_a_hazard():
    rig = Rig()
    rig.copier.save(1, PageCopies([0], [1], [0]))
    assert rig.copier.launch_next()
    rig.device.unregister(rig.arena.ctypes.data)
    assert "unpinned under" in rig.device.hazards[0]


def test_loads_are_given_to_the_device_first():
    rig = Rig()
    rig.copier.save(1, PageCopies([0], [1], [0]))
    rig.copier.load(2, PageCopies([0], [2], [1]))
    while rig.copier.launch_next():
        pass
    assert [stream for stream, _, _ in rig.device.copies] == ["stream1", "stream2"]
    rig.copier.close()
    assert [c.job_id for c in rig.copier.poll() if c.ok] == [2, 1]


@pytest.mark.parametrize(
    ("block", "slot", "reason"), [(0, 1, "null block"), (NUM_BLOCKS, 1, "beyond"), (1, NUM_SLOTS, "beyond")]
)
def test_bad_entries_give_the_device_nothing(block, slot, reason):
    rig = Rig()
    rig.copier.load(1, PageCopies([0, 0], [1, block], [0, slot]))
    assert rig.copier.wait(1, DEADLINE)
    assert rig.poll() == [1]
    assert reason in rig.done[1].error
    assert rig.device.copies == []
    rig.copier.close()


def test_threads_launch_and_wait_has_a_time_limit():
    rig = Rig(3, threaded=True, steps_per_look=1)
    rig.forward("step", writes=1, value=42)
    rig.copier.save(1, PageCopies([0], [1], [0]))
    with pytest.raises(TransferError, match="job 1 is pending"):
        rig.copier.save(1, PageCopies([0], [1], [0]))
    assert rig.copier.wait(1, DEADLINE)
    assert rig.copier.wait(1, None)
    assert rig.arena[0].tobytes() == bytes([42]) * PAGE
    assert rig.poll() == [1]
    rig.copier.close()
    stuck = Rig(3, threaded=True)
    stuck.copier.load(1, PageCopies([0], [1], [1]))
    assert not stuck.copier.wait(1, 0.01)
    assert stuck.copier.pending() == 1
    stuck.copier.close()
    assert stuck.poll() == [1], "closing ends the copy, or the job if it was not begun"
    assert stuck.device.hazards == []


def group_of(name: str, fragment: int, per_block: int) -> GroupPages:
    """`per_block` pieces of `fragment` bytes per block, apart from each other."""
    cache = torch.zeros(per_block, 20, fragment, dtype=torch.uint8)
    return GroupPages(name, tuple(layer_pages(f"{name}.{i}", cache[i], 20) for i in range(per_block)))


def test_path_is_chosen_by_the_bytes_copied_at_a_time():
    """B85: 2 x 16 KiB and 16 x 4 KiB go through the kernel, 32 KiB at a time does not."""
    groups = [group_of("halves", 16384, 2), group_of("whole", 32768, 1), group_of("many", 4096, 16)]
    packed = torch.zeros(20, 16, 4096, dtype=torch.uint8)
    layers = tuple(layer_pages(f"p{i}", packed[:, i], 20) for i in range(16))
    groups.append(GroupPages("packed", layers))
    groups.append(group_of("odd", 1001, 1))
    copier = CudaCopier(groups, [0] * 5, device=FakeDevice(), threaded=False)
    copier.attach([ArenaView.of(np.zeros(20 << 16, dtype=np.uint8), 1 << 16)])
    paths = [("halves", 2, 0), ("whole", 0, 1), ("many", 16, 0), ("packed", 0, 1), ("odd", 0, 1)]
    assert copier.paths() == [GroupPath(*path) for path in paths]
    for g, want in enumerate([(True, 20), (False, 10), (True, 160), (False, 10), (False, 10)]):
        device = FakeDevice(steps_per_look=100)
        one = CudaCopier(groups, [0] * 5, device=device, threaded=False)
        one.attach([ArenaView.of(np.zeros(20 << 16, dtype=np.uint8), 1 << 16)])
        one.save(1, PageCopies([g] * 10, range(1, 11), range(10)))
        assert one.wait(1, DEADLINE)
        assert [(kernel, pieces) for _, kernel, pieces in device.copies] == [want]
        one.close()
    copier.close()


def test_memory_that_cannot_be_pinned_is_copied_without_the_kernel(caplog):
    device = FakeDevice(pinning=False, steps_per_look=100)
    copier = CudaCopier([group_of("many", 4096, 16)], [0], device=device, threaded=False)
    buffer = np.zeros(20 << 16, dtype=np.uint8)
    copier.attach([ArenaView.of(buffer, 1 << 16)])
    assert "could not be pinned" in caplog.text
    copier.save(1, PageCopies([0] * 10, range(1, 11), range(10)))
    assert copier.wait(1, DEADLINE)
    assert device.copies == [("stream2", False, 160)]
    copier.close()


class BrokenDevice(FakeDevice):
    """Fails at everything once `broken` is set."""

    broken = False

    def record(self, stream):
        if self.broken:
            raise RuntimeError("device lost")
        return super().record(stream)

    def done(self, event):
        if self.broken:
            raise RuntimeError("device lost")
        return super().done(event)


def test_a_lost_device_fails_every_job_and_hangs_nothing():
    device = BrokenDevice()
    copier = CudaCopier([group_of("g", 64, 1)], [0], device=device, threaded=False)
    copier.attach([ArenaView.of(np.zeros(640, dtype=np.uint8), 64)])
    copier.save(1, PageCopies([0], [1], [1]))
    copier.load(2, PageCopies([0], [2], [2]))
    assert copier.launch_next()
    device.broken = True
    assert copier.launch_next()
    assert copier.wait(1, DEADLINE)
    assert copier.wait(2, DEADLINE)
    assert all("device lost" in c.error for c in copier.poll())
    copier.save(3, PageCopies([0], [1], [1]))
    (third,) = copier.poll()
    assert (third.job_id, third.ok, third.error) == (3, False, "RuntimeError: device lost")
    assert copier.pending() == 0
    copier.close()


def test_spans_conflict_where_one_writes():
    assert Span(0, 4, True).conflicts(Span(3, 1, False))
    assert not Span(0, 4, True).conflicts(Span(4, 1, True))
    assert not Span(0, 4, False).conflicts(Span(0, 4, False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fragment", [1000, 4096, 65536])
def test_round_trip_on_a_real_device(fragment):
    cache = torch.randint(0, 255, (3, 20, fragment), dtype=torch.uint8, device="cuda")
    layers = tuple(layer_pages(f"l{i}", cache[i], 20) for i in range(3))
    arena = np.zeros((20, 3 * fragment), dtype=np.uint8)
    copier = CudaCopier([GroupPages("g", layers)], [0])
    copier.attach([ArenaView.of(arena, 3 * fragment)])
    before = cache.clone()
    copier.save(1, PageCopies([0] * 9, range(1, 10), range(9)))
    assert copier.wait(1, DEADLINE)
    copier.load(2, PageCopies([0] * 9, range(10, 19), range(9)), PageCopies([0], [19], [0]))
    assert copier.wait(2, DEADLINE)
    assert [c.ok for c in copier.poll()] == [True, True]
    copier.close()
    assert torch.equal(cache[:, 10:19], before[:, 1:10])
    assert not cache[:, 19].any()
    assert torch.equal(cache[:, :10], before[:, :10])


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_without_cuda_the_error_says_so():
    with pytest.raises(TransferError, match="no CUDA device"):
        CudaCopier([], [])
