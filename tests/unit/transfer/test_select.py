"""The copier follows the memory of the tensors."""

from __future__ import annotations

import pytest
import torch

from kvquilt.errors import TransferError
from kvquilt.transfer import GroupPages, HostCopier, copier_for, layer_pages


def group(device: str) -> GroupPages:
    return GroupPages(device, (layer_pages(device, torch.zeros(4, 64, device=device), 4),))


def test_host_memory_gets_the_host_copier():
    copier = copier_for([group("cpu"), None], [0, None], num_threads=1, cpus={0})
    assert isinstance(copier, HostCopier)
    copier.close()


@pytest.mark.parametrize("devices", [["meta"], ["cpu", "meta"]])
def test_other_memory_is_refused(devices):
    with pytest.raises(TransferError, match="meta"):
        copier_for([group(device) for device in devices], [0, 0])
