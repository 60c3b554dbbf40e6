"""How a start makes room: what dead owners left goes, and others' namespaces while the bound asks for it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kvquilt.errors import ConfigError
from kvquilt.tiers.locks import LOCK, may_be_in_use
from kvquilt.tiers.manifest import MANIFEST
from kvquilt.tiers.namespaces import file_bytes, list_namespaces, namespace_paths, tree_bytes
from kvquilt.units import format_bytes

__all__ = ["Reclaim", "cut", "discard", "make_room", "sweep"]

logger = logging.getLogger(__name__)
Reclaim = Literal["auto", "refuse"]
_LITTLE_BYTES = 1 << 20  # more than what is planned for manifests and their drafts


def sweep(root: Path, own: Path) -> None:
    """Remove what dead owners left half made. A live one's is locked, and stays."""
    for path in namespace_paths(root):
        if path != own and may_be_in_use(path):
            continue
        for draft in path.glob(".*.tmp"):
            logger.info("kvquilt: disk: removing %s, left by a process that died", draft)
            discard(draft)
        if path != own and not (path / MANIFEST).exists():
            logger.info("kvquilt: disk: removing %s, which has no manifest", path)
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _foreign_bytes(own: Path, lengths: Mapping[str, int]) -> int:
    """Bytes of what somebody else has put into a namespace's directory: it stays, and counts."""
    known = {*lengths, LOCK, MANIFEST}
    return sum(
        tree_bytes(path) if path.is_dir() else file_bytes(path)
        for path in own.iterdir()
        if path.name not in known
    )


def _excess(path: Path, length: int) -> int:
    with contextlib.suppress(OSError):
        return max(0, os.lstat(path).st_size - length)
    return 0


def cut(path: Path, length: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_size > length:
            os.truncate(path, length)


def make_room(
    root: Path, own: Path, lengths: Mapping[str, int], needed: int, disk_bytes: int, reclaim: Reclaim
) -> None:
    """Let all of `root` fit `disk_bytes` with this namespace at its full size; nothing goes if it can't.

    lengths: of its files. The other ranks get the same share of a smaller bound: whoever starts first must
    not remove their pages for room that they are about to give up.
    """
    found = [one for one in list_namespaces(root) if one.path != own]
    free = [one for one in found if not may_be_in_use(one.path)]
    ranks = [one.path for one in free if one.path.name == own.name]
    # Live ones grow meanwhile: each is looked at once, and counts for what it may grow to.
    others = _foreign_bytes(own, lengths) + tree_bytes(root, without=[own, *(one.path for one in found)])
    size_of = {}
    for one in found:
        planned = one.manifest.planned_bytes if one.manifest is not None and one not in free else 0
        given_up = (
            sum(_excess(one.path / name, lengths[name]) for name in lengths) if one.path in ranks else 0
        )
        size_of[one.path] = max(one.num_bytes, planned) - given_up
    others += sum(size_of.values())
    freeable = sum(size_of[one.path] for one in free)
    least = others if reclaim == "refuse" else others - freeable
    if least + needed > disk_bytes:
        raise ConfigError(
            f"disk_bytes={disk_bytes}: this namespace needs {format_bytes(needed)}, other files under {root} "
            f"take {format_bytes(others)}, of which {format_bytes(freeable)} are namespaces that nobody uses"
            + (' (disk_reclaim is "refuse")' if reclaim == "refuse" else "")
            + ": raise disk_bytes, or give this engine a disk_path of its own"
        )
    going = []
    for one in free:
        if others + needed > disk_bytes:
            going.append(one)
            others -= size_of[one.path]
    _check_space(root, others + needed - tree_bytes(root), disk_bytes, is_new=not (own / MANIFEST).exists())
    for rank in ranks:
        for name, length in lengths.items():
            cut(rank / name, length)
    for one in going:
        model = one.manifest.namespace.model if one.manifest is not None else "an unknown model"
        logger.warning(
            "kvquilt: disk: removing namespace %s (%s, %s) to make room",
            one.path,
            model,
            format_bytes(one.num_bytes),
        )
        shutil.rmtree(one.path)


def _check_space(root: Path, more: int, disk_bytes: int, *, is_new: bool) -> None:
    """Slabs are preallocated, so what the file system has would be taken to the last byte. Pages that are
    there already are worth a start with fewer slots."""
    system = os.statvfs(root)
    free = system.f_bavail * system.f_frsize
    if more <= max(free, _LITTLE_BYTES):
        return
    text = (
        f"disk_bytes={disk_bytes}: files under {root} are to grow by {format_bytes(more)}, but the file "
        f"system has {format_bytes(free)} free: lower disk_bytes, or make room"
    )
    if is_new:
        raise ConfigError(text)
    logger.warning("kvquilt: disk: %s; until then it will be full, for everybody else, too", text)
