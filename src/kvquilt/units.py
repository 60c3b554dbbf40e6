"""Byte sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvquilt.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: int | str, name: str = "size") -> int:
    """Bytes of `value`: an integer, or a string such as "8GiB", "512 MiB", "1.5GB", "4096".

    name: what the value is called in the error. Raises ConfigError for anything else, for a
    fraction of a byte and for a negative number.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 KiB"), parse_bytes(4096)
    (8589934592, 1536, 4096)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{name}={value!r}: must not be negative")
        return value
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{name}={value!r}: write an integer or a size such as 8GiB, 512MiB or 1.5GB")
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise ConfigError(f"{name}={value!r}: not a whole number of bytes")
    return int(size)


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit that leaves at least 1, with up to two decimals.

    >>> format_bytes(8 << 30), format_bytes(1536), format_bytes(100)
    ('8 GiB', '1.5 KiB', '100 B')
    """
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= factor:
            return f"{size / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} B"
