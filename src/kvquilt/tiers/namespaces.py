"""The directories of namespaces under one `disk_path`: where they are, how large, and whose."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvquilt.errors import ConfigError
from kvquilt.tiers.locks import LOCK, try_lock
from kvquilt.tiers.manifest import Manifest

__all__ = [
    "NamespaceDirectory",
    "check_ours",
    "check_root",
    "file_bytes",
    "list_namespaces",
    "namespace_path",
    "namespace_paths",
    "remove_namespace",
    "tree_bytes",
]

_RANK = re.compile(r"dp\d+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


def namespace_path(root: Path, digest: str, dp_rank: int) -> Path:
    """Where a namespace's files lie. digest: of `disk_digest`, in hex."""
    return root / f"dp{dp_rank}" / digest[:32]


@dataclass(frozen=True)
class NamespaceDirectory:
    """A namespace's directory as found. manifest: None if it can't be read."""

    path: Path
    manifest: Manifest | None
    num_bytes: int
    last_used: float


def namespace_paths(root: Path) -> list[Path]:
    """Directories under `root` that have the names of namespaces; whatever else lies there is not ours."""
    return [
        path
        for parent in sorted(root.iterdir())
        if _RANK.fullmatch(parent.name) and parent.is_dir() and not parent.is_symlink()
        for path in sorted(parent.iterdir())
        if _NAMESPACE.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def list_namespaces(root: Path) -> list[NamespaceDirectory]:
    """All namespaces under `root`, least recently used first. Raises OSError."""
    found = []
    for path in namespace_paths(root):
        try:
            used = (path / LOCK).stat().st_mtime
        except OSError:
            used = 0.0
        manifest = None
        with contextlib.suppress(OSError):  # another namespace's bad block is no reason not to start
            manifest = Manifest.read(path)
        found.append(NamespaceDirectory(path, manifest, tree_bytes(path), used))
    return sorted(found, key=lambda one: one.last_used)


def tree_bytes(path: Path, *, without: Collection[Path] = ()) -> int:
    """Bytes of all files under `path`, but those under `without`: lengths, or the space they take where that
    is more."""
    total, others = 0, set(map(str, without))
    for directory, folders, names in os.walk(path):
        folders[:] = [name for name in folders if os.path.join(directory, name) not in others]
        for name in names:
            total += file_bytes(os.path.join(directory, name))
    return total


def file_bytes(path: Path | str) -> int:
    with contextlib.suppress(OSError):
        facts = os.lstat(path)
        return max(facts.st_size, facts.st_blocks * 512)
    return 0


def check_root(root: Path) -> None:
    if not root.is_absolute():
        raise ConfigError(f"disk_path={str(root)!r}: must be an absolute path")
    if not root.exists():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # another rank may do the same now
    check_ours(root)


def check_ours(root: Path) -> None:
    """Raises ConfigError for a path that is no directory, or that somebody else could write to or replace."""
    facts = root.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"disk_path={str(root)!r}: is no directory")
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise ConfigError(
            f"disk_path={str(root)!r}: must belong to this user and be writable by nobody else "
            f"(owner {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):o})"
        )
    for parent in root.resolve().parents:
        mode = parent.stat().st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"disk_path={str(root)!r}: {parent} is writable by every user, who could replace it"
            )


def remove_namespace(path: Path) -> None:
    """Remove a namespace's directory. Raises ConfigError if a live process holds it."""
    lock = try_lock(path / LOCK)
    if lock is None:
        raise ConfigError(f"{path}: in use by a live process")
    try:
        shutil.rmtree(path)
    finally:
        lock.release()
