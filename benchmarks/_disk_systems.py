"""The systems of `compare_disk.py`, seen from outside: how they are set up, and what is in their files."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquilt.tiers.format import BLOCK_BYTES, header_bytes, parse_page_header
from kvquilt.tiers.manifest import Manifest

__all__ = ["KVQuilt", "NativeFiles", "StoredPage", "System", "flip"]

# Past the middle of a page, so that it lies between no two heads, nor between keys and values.
_PLACE = 5, 8


@dataclass(frozen=True)
class StoredPage:
    """One page on disk. key: the engine's block hash in hex. content: (offset in the file, bytes) of its
    parts, padding left out. taken: bytes of disk for it."""

    group: int
    key: str
    path: Path
    content: Sequence[tuple[int, int]]
    taken: int

    def byte_at(self, numerator: int, denominator: int) -> int:
        """Offset in the file of the first byte of the float32 that lies this far into the content."""
        far = sum(size for _, size in self.content) * numerator // denominator // 4 * 4
        for offset, size in self.content:
            if far < size:
                return offset + far
            far -= size
        raise ValueError(f"{self.path}: nothing lies at {numerator}/{denominator}")


class System:
    """One of them. ram_bytes: host memory for pages."""

    name = ""
    capped = False

    def __init__(self, ram_bytes: int) -> None:
        self.ram_bytes = ram_bytes

    def connector(self, folder: Path, disk_bytes: int) -> dict[str, Any]:
        """What `Engine` takes as its connector."""
        raise NotImplementedError

    def pages(self, folder: Path, groups: Sequence[Mapping[str, Any]]) -> list[StoredPage]:
        """What lies in `folder`. groups: as the engine's process tells them."""
        raise NotImplementedError


class NativeFiles(System):
    """vLLM's tiering spec with its file tier, defaults but for sizes and paths."""

    name = "vLLM's file tier"

    def connector(self, folder: Path, disk_bytes: int) -> dict[str, Any]:
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieredMemcpySpec",
                "spec_module_path": "_native_spec",
                "cpu_bytes_to_use": self.ram_bytes,
                "secondary_tiers": [{"type": "fs", "root_dir": os.fspath(folder)}],
            },
        }

    def pages(self, folder: Path, groups: Sequence[Mapping[str, Any]]) -> list[StoredPage]:
        found = []
        for path in sorted(folder.rglob("*.bin")):
            group = int(path.parent.name.rpartition("_g")[2])
            content = [(offset, size) for offset, size in groups[group]["content"]]
            found.append(StoredPage(group, path.stem, path, content, path.stat().st_size))
        return found


class KVQuilt(System):
    """kvquilt, defaults but for sizes, paths and what `options` says."""

    capped = True

    def __init__(self, ram_bytes: int, name: str, **options: Any) -> None:
        super().__init__(ram_bytes)
        self.name = name
        self._options = options

    def connector(self, folder: Path, disk_bytes: int) -> dict[str, Any]:
        paths = {"disk_path": os.fspath(folder), "disk_bytes": disk_bytes}
        return {"ram_bytes": self.ram_bytes, **paths, **self._options}

    def pages(self, folder: Path, groups: Sequence[Mapping[str, Any]]) -> list[StoredPage]:
        found = []
        for directory in sorted(folder.glob("dp*/*")):
            manifest = Manifest.read(directory) if directory.is_dir() else None
            for arena in manifest.arenas if manifest is not None else ():
                size, header = arena.slot_bytes, header_bytes(arena.span_keys)
                path = directory / f"{arena.name}.slab"
                with path.open("rb") as file:
                    for start in range(BLOCK_BYTES, path.stat().st_size - size + 1, size):
                        file.seek(start)
                        page = parse_page_header(file.read(header))
                        if page is None:
                            continue
                        content = [
                            (start + header + offset, length)
                            for offset, length in groups[page.group]["content"]
                        ]
                        found.append(StoredPage(page.group, page.key.hex(), path, content, size))
        return found


def flip(pages: Sequence[StoredPage], *, anywhere: bool) -> None:
    """Flip one bit of each page's content: the top exponent bit of one float32, or any bit at any place."""
    rng = random.Random(0)
    for page in pages:
        if anywhere:
            at, bit = page.byte_at(rng.randrange(1 << 30), 1 << 30) + rng.randrange(4), rng.randrange(8)
        else:
            at, bit = page.byte_at(*_PLACE) + 3, 6
        with page.path.open("r+b") as file:
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ 1 << bit]))
