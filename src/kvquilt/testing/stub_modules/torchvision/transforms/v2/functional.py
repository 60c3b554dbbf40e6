"""Stands for functions that a text model never calls."""
