"""The directory of the disk tier: whose it is, what may lie in it, and how much.

disk_path/                    0700, ours
  lock                        held while an engine starts
  dp0/                        one per data-parallel rank
    <namespace>/
      lock                    held as long as an engine lives; its time of change is the last use
      manifest.json           all factors of the namespace in clear, and the generation
      arena00.slab .table .stamps
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvquilt.errors import ConfigError
from kvquilt.tiers.files import Files
from kvquilt.tiers.locks import LOCK, Lock, locked, try_lock
from kvquilt.tiers.manifest import MANIFEST, Manifest, diff_of
from kvquilt.tiers.namespaces import check_root, list_namespaces, namespace_path
from kvquilt.tiers.room import Reclaim, cut, discard, make_room, sweep

__all__ = ["Claim", "claim_namespace", "open_for_reading"]

logger = logging.getLogger(__name__)


class Claim:
    """The right to write in one namespace's directory, until `close`. manifest: as on disk."""

    def __init__(self, path: Path, lock: Lock, manifest: Manifest, files: Files) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._files = files

    def still_there(self) -> bool:
        """Is the directory still the one that was claimed?"""
        try:
            now = os.stat(self.path / LOCK)
        except OSError:
            return False
        mine = os.fstat(self._lock.fd)
        return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)

    def next_generation(self) -> None:
        """Forget all pages, for good: on the medium when it returns. Raises OSError."""
        manifest = msgspec.structs.replace(self.manifest, generation=self.manifest.generation + 1)
        self._files.replace(self.path / MANIFEST, manifest.encode())
        self.manifest = manifest

    def close(self) -> None:
        """Give the directory up; the time of it is its last use. May be called twice."""
        self.used()
        self._lock.release()

    def used(self) -> None:
        """Note that the directory is in use now: whoever is killed does not come to say so."""
        if self._lock.fd >= 0:
            with contextlib.suppress(OSError):
                os.utime(self._lock.fd)


def claim_namespace(
    root: Path,
    wanted: Manifest,
    *,
    lengths: Mapping[str, int],
    disk_bytes: int,
    reclaim: Reclaim,
    dp_rank: int = 0,
    files: Files,
) -> Claim:
    """Take the directory of `wanted.digest` under `root`, and make room for what it plans to take.

    wanted: with the generation of a new directory. lengths: of its files, by name: longer ones are cut.
    Others' namespaces go, the one least recently used first, until all of `root` fits `disk_bytes`
    ("auto"); never one that a live engine holds.

    Raises ConfigError for a root that others could write to, a namespace in use, or room that cannot
    be made; OSError for what the medium does.
    """
    check_root(root)
    with locked(root / LOCK):
        path = namespace_path(root, wanted.digest, dp_rank)
        for made in (path.parent, path):
            if made.is_symlink():
                raise ConfigError(
                    f"disk_path: {made} is a symbolic link: disk_bytes could not bound what lies behind it; "
                    "remove it, or let disk_path name the other place"
                )
            made.mkdir(mode=0o700, exist_ok=True)
        lock = try_lock(path / LOCK)
        if lock is None:
            raise ConfigError(
                f"disk_path: another process uses the same namespace ({path}): give each engine a disk_path "
                'of its own, or let this one only read ({"disk_write": "never"})'
            )
        try:
            os.utime(lock.fd)
            sweep(root, path)
            make_room(root, path, lengths, wanted.planned_bytes, disk_bytes, reclaim)
            manifest = _settle_manifest(path, wanted, files)
            for name, length in lengths.items():
                cut(path / name, length)
            _explain_others(root, path, manifest)
        except BaseException:
            lock.release()
            raise
        return Claim(path, lock, manifest, files)


def open_for_reading(root: Path, digest: str, dp_rank: int = 0) -> tuple[Path, Manifest]:
    """The directory of a namespace that somebody else may write to. Raises ConfigError if there is none."""
    check_root(root)
    path = namespace_path(root, digest, dp_rank)
    manifest = Manifest.read(path) if path.is_dir() else None
    if manifest is None or manifest.digest != digest:
        raise ConfigError(f'disk_path: nothing to read ({{"disk_write": "never"}}): no namespace in {path}')
    return path, manifest


def _settle_manifest(path: Path, wanted: Manifest, files: Files) -> Manifest:
    """Take over the generation of what is there; without a manifest nothing there can be trusted."""
    found = Manifest.read(path)
    if found is None or found.digest != wanted.digest:
        for old in path.iterdir():
            if old.name != LOCK:
                discard(old)
        found = wanted
    else:
        found = msgspec.structs.replace(wanted, generation=found.generation)
    if not (path / MANIFEST).exists() or (path / MANIFEST).read_bytes() != found.encode():
        files.replace(path / MANIFEST, found.encode())
    return found


def _explain_others(root: Path, own: Path, manifest: Manifest) -> None:
    """A namespace of the same model beside a new one: say what keeps them apart."""
    for one in reversed(list_namespaces(root)):
        other = one.manifest
        if one.path == own or other is None or other.namespace.model != manifest.namespace.model:
            continue
        reasons = [f"{name}: {a!r} here, {b!r} there" for name, (a, b) in diff_of(manifest, other).items()]
        if reasons:
            logger.info(
                "kvquilt: disk: %s holds other pages of this model, which differ in %s",
                one.path,
                "; ".join(reasons[:4]) + ("; ..." if len(reasons) > 4 else ""),
            )
        return
