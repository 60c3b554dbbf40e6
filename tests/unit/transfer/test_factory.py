"""The copier follows the memory of the tensors."""

from __future__ import annotations

import pytest
import torch

from kvquilt.errors import TransferError
from kvquilt.transfer import GroupPages, HostCopier, layer_pages
from kvquilt.transfer.factory import make_copier


def test_host_memory_gets_the_host_copier():
    group = GroupPages("g", (layer_pages("l", torch.zeros(4, 64), 4),))
    copier = make_copier([group, None], [0, None], 0, 1, device_type="cpu", cpus={0})
    assert isinstance(copier, HostCopier)
    copier.close()


def test_other_memory_is_refused():
    with pytest.raises(TransferError, match="'meta' memory"):
        make_copier([], [], 0, 1, device_type="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_cuda_without_a_device_says_so():
    with pytest.raises(TransferError, match="no CUDA device"):
        make_copier([], [], 0, 1, device_type="cuda")
