"""Stands for torchvision where it is not installed; see `kvquilt.testing.stubs`."""
