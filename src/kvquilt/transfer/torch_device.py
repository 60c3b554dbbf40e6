"""`TorchDevice`: CUDA behind the `Device` protocol, by torch and the CUDA driver."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np
import torch

from kvquilt.errors import TransferError
from kvquilt.transfer.device import Addresses

__all__ = ["TorchDevice"]

logger = logging.getLogger(__name__)

IN_STREAM_ORDER = 1
IN_ANY_ORDER = 3
"""Values of CUmemcpySrcAccessOrder in cuda.h."""
REGISTER_FLAGS = 3
"""Portable and mapped: every context, and kernels too, may use the memory at its own address."""

_cuda: Any = torch.cuda  # its classes have no types


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cuda.h: CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


class TorchDevice:
    """One CUDA device. Raises TransferError if there is none."""

    device_type = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise TransferError("no CUDA device is available to torch")
        self._device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        torch.empty(1, device=self._device)  # makes torch create the device's context
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._batch = getattr(self._driver, "cuMemcpyBatchAsync", None)  # drivers from CUDA 12.8 on
        self._word_copy = _load_kernel(self._device)
        self.has_kernel = self._word_copy is not None

    def bind_thread(self) -> None:
        """See `Device`. The driver's calls need the context, torch's need its own notion."""
        torch.cuda.set_device(self._device)
        self._call("cuCtxSetCurrent", self._context)

    def current_stream(self) -> torch.cuda.Stream:
        """See `Device`."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        """See `Device`."""
        stream: torch.cuda.Stream = _cuda.Stream(self._device)
        return stream

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See `Device`."""
        event: torch.cuda.Event = _cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `Device`."""
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        """See `Device`."""
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See `Device`."""
        event.synchronize()

    def register(self, address: int, num_bytes: int) -> bool:
        """See `Device`."""
        if num_bytes == 0:
            return True
        error = _cuda.cudart().cudaHostRegister(address, num_bytes, REGISTER_FLAGS)
        if int(error) == 0:
            return True
        self._batch = None  # made for pinned memory; single copies take any
        logger.warning("cudaHostRegister of %d bytes: %s", num_bytes, error)
        return False

    def unregister(self, address: int) -> None:
        """See `Device`."""
        error = _cuda.cudart().cudaHostUnregister(address)
        if int(error) != 0:
            logger.warning("cudaHostUnregister: %s", error)

    def copy(
        self,
        stream: torch.cuda.Stream,
        dst: Addresses,
        src: Addresses,
        size: Addresses,
        *,
        to_host: bool,
        kernel: bool,
    ) -> Any:
        """See `Device`. One kernel launch, or one driver call where the driver has it."""
        if kernel and self._word_copy is not None:
            return self._word_copy(self._device, stream, dst, src, size)
        arrays = [np.ascontiguousarray(column, dtype=np.uint64) for column in (dst, src, size)]
        # A load reads slots that nobody writes, so its sources may be read early. A save reads
        # what the forward pass has just written and must keep to the stream's order.
        order = IN_STREAM_ORDER if to_host else IN_ANY_ORDER
        if self._batch is None:
            return self._copy_each(stream, *arrays)
        attributes = _Attributes(src_access_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(column.ctypes.data) for column in arrays),
            ctypes.c_size_t(len(dst)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream.cuda_stream),
        )
        return arrays

    def _copy_each(self, stream: torch.cuda.Stream, *arrays: Any) -> Any:
        handle = ctypes.c_void_p(stream.cuda_stream)
        for dst, src, size in zip(*(column.tolist() for column in arrays), strict=True):
            self._call(
                "cuMemcpyAsync", ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(size), handle
            )
        return arrays

    def zero(self, stream: torch.cuda.Stream, dst: Addresses, size: Addresses) -> None:
        """See `Device`."""
        handle = ctypes.c_void_p(stream.cuda_stream)
        for address, count in zip(dst.tolist(), size.tolist(), strict=True):
            self._call(
                "cuMemsetD8Async",
                ctypes.c_uint64(address),
                ctypes.c_ubyte(0),
                ctypes.c_size_t(count),
                handle,
            )

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


def _load_kernel(device: torch.device) -> Any | None:
    """The Triton kernel for small pieces, compiled; None where Triton is missing or fails."""
    try:
        from kvquilt.transfer.triton_copy import word_copy

        words = torch.zeros(2, 1, dtype=torch.int64, device=device)
        dst, src = (np.array([row.data_ptr()], dtype=np.int64) for row in words)
        alive = word_copy(device, torch.cuda.current_stream(device), dst, src, np.array([8], dtype=np.int64))
        torch.cuda.synchronize(device)
        del alive
    except Exception as failure:  # noqa: BLE001 - Triton fails in many ways; copy engines serve too
        logger.info("no kernel for small pieces: %s", failure)
        return None
    return word_copy
