"""Stands for torchvision's second set of transforms."""
