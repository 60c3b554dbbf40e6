"""What of the CUDA device can be shown without one: the driver's arguments, and the kernel."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvquilt.transfer.torch_device import IN_ANY_ORDER, IN_STREAM_ORDER, TorchDevice

STREAM = SimpleNamespace(cuda_stream=0x7F)


class Driver:
    """Stands for libcuda: reads its arguments as the C declarations in cuda.h say, and copies."""

    def __init__(self, result: int = 0):
        self.result, self.order, self.singles = result, None, 0

    def cuMemcpyBatchAsync(self, dsts, srcs, sizes, count, attrs, attr_idxs, num_attrs, fail_idx, stream):
        assert (num_attrs.value, stream.value) == (1, STREAM.cuda_stream)
        assert ctypes.sizeof(attrs._obj) == 24
        assert attr_idxs._obj.value == 0
        assert fail_idx._obj.value == 0
        self.order = attrs._obj.src_access_order
        columns = [(ctypes.c_uint64 * count.value).from_address(p.value) for p in (dsts, srcs, sizes)]
        for dst, src, size in zip(*columns, strict=True):
            ctypes.memmove(dst, src, size)
        return self.result

    def cuMemcpyAsync(self, dst, src, size, stream):
        assert stream.value == STREAM.cuda_stream
        self.singles += 1
        ctypes.memmove(dst.value, src.value, size.value)
        return self.result

    def cuMemsetD8Async(self, dst, byte, count, stream):
        assert stream.value == STREAM.cuda_stream
        ctypes.memset(dst.value, byte.value, count.value)
        return self.result


def device_on(driver: Driver, *, batch: bool = True) -> TorchDevice:
    device = TorchDevice.__new__(TorchDevice)
    device._driver, device._word_copy = driver, None
    device._batch = driver.cuMemcpyBatchAsync if batch else None
    return device


def pieces():
    src = np.arange(300, dtype=np.uint8)
    dst = np.zeros(300, dtype=np.uint8)
    at, size = np.array([0, 50, 200]), np.array([7, 100, 3])
    want = np.zeros(300, dtype=np.uint8)
    for a, n in zip(at, size, strict=True):
        want[a : a + n] = src[a : a + n]
    return src, dst, dst.ctypes.data + at, src.ctypes.data + at, size, want


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize(("to_host", "order"), [(True, IN_STREAM_ORDER), (False, IN_ANY_ORDER)])
def test_all_pieces_go_to_the_driver(batch, to_host, order):
    """A save must read in the stream's order; only a load's sources, which nobody writes, may be
    read early."""
    driver = Driver()
    src, dst, to, at, size, want = pieces()
    device_on(driver, batch=batch).copy(STREAM, to, at, size, to_host=to_host, kernel=True)
    assert (dst == want).all()
    assert (driver.order, driver.singles) == ((order, 0) if batch else (None, 3))
    assert src.any()


def test_zeroing_and_errors_of_the_driver():
    src, _, _, at, size, want = pieces()
    device_on(Driver()).zero(STREAM, at, size)
    assert (src == np.where(want > 0, 0, np.arange(300, dtype=np.uint8))).all()
    for batch, name in ((True, "cuMemcpyBatchAsync"), (False, "cuMemcpyAsync")):
        with pytest.raises(RuntimeError, match=f"{name} failed with CUDA error 700"):
            device_on(Driver(700), batch=batch).copy(STREAM, at, at, size, to_host=True, kernel=False)


KERNEL = """
import numpy as np, torch
from kvquilt.transfer import triton_copy as t
src = np.random.default_rng(0).integers(1, 1 << 60, 20_000)
dst, want = np.zeros_like(src), np.zeros_like(src)
rows = [(0, 1), (100, 1000), (3000, 3000), (9000, 1024), (11_000, 1025)]
for at, words in rows:
    want[at : at + words] = src[at : at + words]
table = [[dst.ctypes.data + 8 * at, src.ctypes.data + 8 * at, words] for at, words in rows]
t._copy_words[(2,)](torch.tensor(table), len(rows), words_per_step=t.WORDS_PER_STEP)
assert (dst == want).all()
"""


def test_kernel_copies_every_word_and_no_other():
    """Under Triton's interpreter, in a process of its own: the choice is made at import."""
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
