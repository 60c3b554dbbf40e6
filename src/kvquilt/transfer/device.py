"""`Device`: the few operations of an accelerator that copying needs, in stream order.

`CudaCopier` holds the logic and knows only this; `TorchDevice` does it on CUDA, and
`kvquilt.testing.fake_device` simulates it with a logical clock.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Addresses", "Device"]

Addresses = NDArray[np.int64]


class Device(Protocol):
    """Streams run concurrently; the work of one stream runs in the order in which it was given.

    Streams and events are opaque. Any call may raise RuntimeError when the device has failed.
    """

    device_type: str
    """The `torch.device.type` of the engine's tensors."""
    has_kernel: bool
    """Whether `copy(..., kernel=True)` works on registered host memory."""

    def bind_thread(self) -> None:
        """Make the calling thread use this device."""

    def current_stream(self) -> Any:
        """The stream on which the calling thread's engine work runs."""

    def new_stream(self) -> Any:
        """A stream of its own."""

    def record(self, stream: Any) -> Any:
        """An event that is done once all work given to `stream` so far is done."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Work given to `stream` from now on begins after `event`. Does not block the caller."""

    def done(self, event: Any) -> bool:
        """Whether `event` has happened. Does not block."""

    def synchronize(self, event: Any) -> None:
        """Block the calling thread until `event` has happened."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory; False if the system refuses (copies still work, slower)."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def copy(
        self, stream: Any, dst: Addresses, src: Addresses, size: Addresses, *, to_host: bool, kernel: bool
    ) -> Any:
        """Give `stream` the copies dst[i] <- src[i] of size[i] bytes.

        kernel: by a compute kernel (addresses and sizes multiples of 8) instead of the copy
        engines. Returns what must stay alive until they are done. If it raises, some of the
        copies may have been given to the stream all the same.
        """

    def zero(self, stream: Any, dst: Addresses, size: Addresses) -> None:
        """Give `stream` the filling of device memory with zeros."""
