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
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from kvquilt.errors import ConfigError
from kvquilt.layout.namespace import NamespaceFactors, diff
from kvquilt.tiers.files import Files
from kvquilt.tiers.format import FORMAT_VERSION
from kvquilt.units import format_bytes

__all__ = [
    "Claim",
    "Manifest",
    "ManifestArena",
    "NamespaceDirectory",
    "Reclaim",
    "check_ours",
    "claim_namespace",
    "disk_digest",
    "hold_namespace",
    "is_locked",
    "list_namespaces",
    "namespace_path",
    "namespace_paths",
    "no_start",
    "open_for_reading",
    "remove_namespace",
    "tree_bytes",
    "unlock",
]

logger = logging.getLogger(__name__)
Reclaim = Literal["auto", "refuse"]
_START_SECONDS = 60.0
MANIFEST = "manifest.json"
LOCK = "lock"
_RANK = re.compile(r"dp\d+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


class ManifestArena(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One slab: the groups whose pages lie in it, and its geometry. groups: (index, name)."""

    name: str
    groups: list[tuple[int, str]]
    num_slots: int
    slot_bytes: int
    span_keys: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies beside the slabs. generation: pages of any other are forgotten. planned_bytes: what all
    files of the namespace take when the slabs have grown to their full length. check: xxh3-64 in hex
    over the rest: a bit that flips in the generation would bring back what a reset has forgotten."""

    format_version: int
    generation: int
    digest: str
    partition: str
    num_ranks: int
    planned_bytes: int
    arenas: list[ManifestArena]
    namespace: NamespaceFactors
    check: str = ""

    def encode(self) -> bytes:
        """The file's content."""
        sealed = msgspec.structs.replace(self, check=self._digest())
        return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n"

    def _digest(self) -> str:
        rest = msgspec.structs.replace(self, check="")
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(rest))

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest in `directory`; None if there is no intact one of this version. Raises OSError."""
        try:
            data = (directory / MANIFEST).read_bytes()
        except FileNotFoundError:
            return None
        return cls.parse(data)

    @classmethod
    def parse(cls, data: bytes) -> Manifest | None:
        """The manifest in a file's content; None as for `read`."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None
        if manifest.format_version != FORMAT_VERSION or manifest.check != manifest._digest():
            return None
        return msgspec.structs.replace(manifest, check="")


def disk_digest(namespace: NamespaceFactors, partition: str) -> bytes:
    """32 bytes that name what may lie in one slab: the namespace, how groups share slots, the format."""
    facts = f"{FORMAT_VERSION} {partition} ".encode() + namespace.digest()
    return hashlib.sha256(facts).digest()


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


class Claim:
    """The right to write in one namespace's directory, until `close`. manifest: as on disk."""

    def __init__(self, path: Path, lock_fd: int, manifest: Manifest, files: Files) -> None:
        self.path = path
        self.manifest = manifest
        self._lock_fd = lock_fd
        self._files = files
        _claims.add(self)

    def still_there(self) -> bool:
        """Is the directory still the one that was claimed?"""
        try:
            now = os.stat(self.path / LOCK)
        except OSError:
            return False
        mine = os.fstat(self._lock_fd)
        return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)

    def next_generation(self) -> None:
        """Forget all pages, for good: on the medium when it returns. Raises OSError."""
        manifest = msgspec.structs.replace(self.manifest, generation=self.manifest.generation + 1)
        self._files.replace(self.path / MANIFEST, manifest.encode())
        self.manifest = manifest

    def close(self) -> None:
        """Give the directory up; the time of it is its last use. May be called twice."""
        if self._lock_fd >= 0:
            self.used()
            unlock(self._lock_fd)
            self._lock_fd = -1

    def used(self) -> None:
        """Note that the directory is in use now: whoever is killed does not come to say so."""
        with contextlib.suppress(OSError):
            os.utime(self._lock_fd)


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_locks: set[int] = set()  # descriptors that hold a lock


def _let_go_in_child() -> None:
    # A forked child shares the locks, and would keep them when this process is killed. To close the child's
    # descriptors leaves the parent's locks alone.
    for fd in _locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locks.clear()
    for claim in list(_claims):
        claim._lock_fd = -1


os.register_at_fork(after_in_child=_let_go_in_child)


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
    _check_root(root)
    with _locked(root / LOCK):
        path = namespace_path(root, wanted.digest, dp_rank)
        for made in (path.parent, path):
            if made.is_symlink():
                raise ConfigError(
                    f"disk_path: {made} is a symbolic link: disk_bytes could not bound what lies behind it; "
                    "remove it, or let disk_path name the other place"
                )
            made.mkdir(mode=0o700, exist_ok=True)
        lock_fd = _try_lock(path / LOCK)
        if lock_fd is None:
            raise ConfigError(
                f"disk_path: another process uses the same namespace ({path}): give each engine a disk_path "
                'of its own, or let this one only read ({"disk_write": "never"})'
            )
        try:
            os.utime(lock_fd)
            _sweep(root, path)
            _cut_other_ranks(root, path, lengths)
            own_bytes = tree_bytes(path) - _foreign_bytes(path, lengths)
            _make_room(root, path, own_bytes, wanted.planned_bytes, disk_bytes, reclaim)
            manifest = _settle_manifest(path, wanted, files)
            for name, length in lengths.items():
                _cut(path / name, length)
            _explain_others(root, path, manifest)
        except BaseException:
            unlock(lock_fd)
            raise
        return Claim(path, lock_fd, manifest, files)


def open_for_reading(root: Path, digest: str, dp_rank: int = 0) -> tuple[Path, Manifest]:
    """The directory of a namespace that somebody else may write to. Raises ConfigError if there is none."""
    _check_root(root)
    path = namespace_path(root, digest, dp_rank)
    manifest = Manifest.read(path) if path.is_dir() else None
    if manifest is None or manifest.digest != digest:
        raise ConfigError(f'disk_path: nothing to read ({{"disk_write": "never"}}): no namespace in {path}')
    return path, manifest


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


def tree_bytes(path: Path) -> int:
    """Bytes of all files under `path`: lengths, or the space they take where that is more."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            total += _file_bytes(os.path.join(directory, name))
    return total


def _file_bytes(path: Path | str) -> int:
    with contextlib.suppress(OSError):
        facts = os.lstat(path)
        return max(facts.st_size, facts.st_blocks * 512)
    return 0


def is_locked(path: Path) -> bool:
    """Does a live process hold this namespace? To be asked where no engine can be starting (`no_start`):
    it could not have the namespace for the moment that this takes."""
    with contextlib.suppress(FileNotFoundError):
        fd = _try_lock(path / LOCK, shared=True)
        if fd is None:
            return True
        unlock(fd)
    return False


def _may_be_in_use(path: Path) -> bool:
    """Also True where that can't be said: it is left alone, and does not keep others from starting."""
    try:
        return is_locked(path)
    except OSError:
        return True


def _check_root(root: Path) -> None:
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


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of the whole directory, for a start: they are short."""
    deadline = time.monotonic() + _START_SECONDS
    while (fd := _try_lock(path, shared=shared)) is None:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"disk_path: {path} has been locked for {_START_SECONDS:.0f} s by another start"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        unlock(fd)


@contextlib.contextmanager
def no_start(root: Path, *, shared: bool) -> Iterator[None]:
    """Keep engines from starting meanwhile: they wait. shared: others may do the same, and nothing is made.

    Raises ConfigError if a start takes too long.
    """
    if shared and not (root / LOCK).exists():
        yield
        return
    with _locked(root / LOCK, shared=shared):
        yield


def hold_namespace(root: Path, path: Path) -> int | None:
    """A descriptor that holds a namespace's lock, as an engine does, until `unlock`; None if a live process
    has it."""
    with _locked(root / LOCK):
        return _try_lock(path / LOCK)


def _try_lock(path: Path, *, shared: bool = False) -> int | None:
    """A descriptor that holds the lock; None if another has it. The system frees it with its process.

    shared: only asks, and makes nothing: raises FileNotFoundError if there is no such file.
    """
    flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _locks.add(fd)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        _locks.discard(fd)
        os.close(fd)
        return None
    return fd


def unlock(fd: int) -> None:
    """Give up a lock and its descriptor; also what a child that was forked meanwhile still has of it."""
    if fd not in _locks:
        return  # this is such a child
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    _locks.discard(fd)
    os.close(fd)


def _sweep(root: Path, own: Path) -> None:
    """Remove what dead owners left half made. A live one's is locked, and stays."""
    for path in namespace_paths(root):
        if path != own and _may_be_in_use(path):
            continue
        for draft in path.glob(".*.tmp"):
            logger.info("kvquilt: disk: removing %s, left by a process that died", draft)
            _discard(draft)
        if path != own and not (path / MANIFEST).exists():
            logger.info("kvquilt: disk: removing %s, which has no manifest", path)
            shutil.rmtree(path, ignore_errors=True)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _foreign_bytes(own: Path, lengths: Mapping[str, int]) -> int:
    """Bytes of what somebody else has put into a namespace's directory: it stays, and counts."""
    known = {*lengths, LOCK, MANIFEST}
    return sum(
        tree_bytes(path) if path.is_dir() else _file_bytes(path)
        for path in own.iterdir()
        if path.name not in known
    )


def _make_room(root: Path, own: Path, own_bytes: int, needed: int, disk_bytes: int, reclaim: Reclaim) -> None:
    found = [one for one in list_namespaces(root) if one.path != own]
    free = [one for one in found if not _may_be_in_use(one.path)]
    others = tree_bytes(root) - own_bytes
    for one in found:
        if one not in free and one.manifest is not None:  # it may still be growing
            others += max(0, one.manifest.planned_bytes - one.num_bytes)
    freeable = sum(one.num_bytes for one in free)
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
            others -= one.num_bytes
    _check_space(root, others + needed - tree_bytes(root), disk_bytes, is_new=not (own / MANIFEST).exists())
    for one in going:
        name = one.manifest.namespace.model if one.manifest is not None else "an unknown model"
        logger.warning(
            "kvquilt: disk: removing namespace %s (%s, %s) to make room",
            one.path,
            name,
            format_bytes(one.num_bytes),
        )
        shutil.rmtree(one.path)


_LITTLE_BYTES = 1 << 20  # more than what is planned for manifests and their drafts


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


def _cut(path: Path, length: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_size > length:
            os.truncate(path, length)


def _cut_other_ranks(root: Path, own: Path, lengths: Mapping[str, int]) -> None:
    """The other ranks get the same share of a smaller bound: whoever starts first must not remove their pages
    for room that they are about to give up."""
    for path in namespace_paths(root):
        if path.name == own.name and path != own and not _may_be_in_use(path):
            for name, length in lengths.items():
                _cut(path / name, length)


def _settle_manifest(path: Path, wanted: Manifest, files: Files) -> Manifest:
    """Take over the generation of what is there; without a manifest nothing there can be trusted."""
    found = Manifest.read(path)
    if found is None or found.digest != wanted.digest:
        for old in path.iterdir():
            if old.name != LOCK:
                _discard(old)
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


def diff_of(a: Manifest, b: Manifest) -> dict[str, tuple[object, object]]:
    """What keeps two manifests' pages apart, by name, with both values."""
    found: dict[str, tuple[object, object]] = dict(diff(a.namespace, b.namespace))
    if a.partition != b.partition:
        found["group_partition"] = (a.partition, b.partition)
    return found


def remove_namespace(path: Path) -> None:
    """Remove a namespace's directory. Raises ConfigError if a live process holds it."""
    fd = _try_lock(path / LOCK)
    if fd is None:
        raise ConfigError(f"{path}: in use by a live process")
    try:
        shutil.rmtree(path)
    finally:
        unlock(fd)
