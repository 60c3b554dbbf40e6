"""Byte sizes, read and written."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.errors import ConfigError
from kvquilt.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        (" 1.5 kib ", 1536),
        ("10TB", 10**13),
        ("3", 3),
        ("3B", 3),
        (0, 0),
        (77, 77),
    ],
)
def test_sizes_that_are_read(given: int | str, size: int) -> None:
    assert parse_bytes(given) == size


@pytest.mark.parametrize("given", ["", "GiB", "-1GiB", "8 Gib/s", "8G", "1e9", "0x10", None, 1.5, True, [8]])
def test_anything_else_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="ram_bytes="):
        parse_bytes(given, "ram_bytes")


def test_negative_numbers_and_parts_of_a_byte_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        parse_bytes(-1)
    with pytest.raises(ConfigError, match="not a whole number of bytes"):
        parse_bytes("1.0001KiB")


def test_sizes_are_written_in_the_largest_unit() -> None:
    sizes = (0, 1023, 1024, 1536, 5 << 20, 64 << 30, 10 << 40)
    assert [format_bytes(n) for n in sizes] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "5 MiB",
        "64 GiB",
        "10 TiB",
    ]
