"""Checks a directory of the disk tier, as it is: every page of every namespace; drops what is bad on request.

docs/disk.md says what counts as bad and what as orphaned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from kvquilt.errors import ConfigError
from kvquilt.tiers.files import Files
from kvquilt.tiers.format import FORMAT_VERSION
from kvquilt.tiers.locks import LOCK, hold_namespace, is_locked, no_start
from kvquilt.tiers.manifest import MANIFEST, Manifest, disk_digest
from kvquilt.tiers.namespaces import check_ours, namespace_paths, remove_namespace, tree_bytes
from kvquilt.tiers.verify import CheckedSlab, check_slabs, drop_pages, layout_of, slab_facts

__all__ = ["FsckReport", "GroupReport", "NamespaceReport", "Progress", "fsck"]

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""Called with (path of a namespace, pages read, pages to read)."""
ManifestState = Literal["ok", "missing", "damaged", "other_version", "unreadable"]

_TRIES = 3  # a reset by a live owner while its namespace is read
_RANK = re.compile(r"dp\d+")


class GroupReport(msgspec.Struct):
    """One group's pages of the present generation.

    bytes: of their slots. bad: pages that failed. orphaned: intact ones that nothing can use, by reason;
    those of an older "generation" are not among `pages`.
    """

    name: str
    pages: int
    bytes: int
    bad: int
    orphaned: int
    orphaned_by: dict[str, int]


class NamespaceReport(msgspec.Struct, kw_only=True):
    """One namespace. bad: also 1 for a manifest that is missing or damaged, and for a slab that is.

    in_use: a live process holds it. leftovers: drafts of files that a dead process left. disk_bytes: of
    all files. repaired: it was cleared of what is bad and orphaned after it was counted.
    """

    path: str
    manifest: ManifestState
    model: str | None = None
    digest: str | None = None
    generation: int | None = None
    partition: str | None = None
    in_use: bool
    disk_bytes: int
    pages: int = 0
    bytes: int = 0
    bad: int = 0
    orphaned: int = 0
    leftovers: list[str] = []
    problems: list[str] = []
    repaired: bool = False
    groups: list[GroupReport] = []


class FsckReport(msgspec.Struct):
    """A whole directory: totals over its namespaces. sound: nothing bad was found, or all was repaired.

    removed: directories of namespaces that were removed.
    """

    path: str
    format_version: int
    sound: bool
    pages: int
    bytes: int
    bad: int
    orphaned: int
    leftovers: int
    disk_bytes: int
    removed: list[str]
    namespaces: list[NamespaceReport]


def fsck(
    root: Path,
    *,
    repair: bool = False,
    remove: str | None = None,
    files: Files | None = None,
    progress: Progress = lambda path, done, total: None,
) -> FsckReport:
    """Check all namespaces under `root`, a `disk_path`; without `repair` and `remove` nothing is changed.

    repair: drop what is bad or orphaned and what dead processes left; not in a namespace that a live
    process holds. remove: first remove one namespace, named by its path or the start of its digest.
    No symbolic link is followed.

    Raises ConfigError for a directory that is missing, is not ours or none of the disk tier's, and
    for a namespace to remove that does not exist, is not the only one, or is in use; OSError where a
    directory can't be listed or changed.
    """
    root = Path(os.path.abspath(root))
    _check_root(root)
    files = files or Files()
    removed = _remove(root, remove) if remove is not None else []
    reports = []
    for path in namespace_paths(root):
        report = _check(root, path, files, progress, repair=repair)
        if report is not None:
            reports.append(report)
    return FsckReport(
        str(root),
        FORMAT_VERSION,
        all(one.repaired or not one.bad for one in reports),
        sum(one.pages for one in reports),
        sum(one.bytes for one in reports),
        sum(one.bad for one in reports),
        sum(one.orphaned for one in reports),
        sum(len(one.leftovers) for one in reports),
        tree_bytes(root),
        removed,
        reports,
    )


def _check_root(root: Path) -> None:
    try:
        facts = root.lstat()
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror}") from error
    if stat.S_ISLNK(facts.st_mode):
        raise ConfigError(f"{root}: is a symbolic link to {os.readlink(root)}: name the directory itself")
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"{root}: is no directory")
    try:
        names = {entry.name for entry in os.scandir(root)}
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror}") from error
    ranks = [name for name in names if _RANK.fullmatch(name) and (root / name).is_dir()]
    if not ranks and names != {LOCK}:
        inside = _RANK.fullmatch(root.name) or MANIFEST in names
        hint = ": it lies inside one; name the disk_path itself" if inside else ""
        raise ConfigError(f"{root}: is no directory of the disk tier{hint}")
    check_ours(root)


def _remove(root: Path, wanted: str) -> list[str]:
    paths = _find(root, wanted)
    with no_start(root, shared=False):
        for path in paths:
            if is_locked(path):
                raise ConfigError(f"{path}: in use by a live process: nothing was removed")
        for path in paths:
            remove_namespace(path)
            logger.warning("kvquilt: fsck: removed %s", path)
    return [str(path) for path in paths]


def _find(root: Path, wanted: str) -> list[Path]:
    """Directories of the one namespace meant: one for each data-parallel rank, if named by its digest."""
    known = namespace_paths(root)
    by_path = [path for path in known if Path(os.path.abspath(wanted)) == path]
    if by_path:
        return by_path
    text = wanted.lower()
    found = [path for path in known if text and _full_digest(path).startswith(text)]
    digests = {path.name for path in found}
    if not digests:
        raise ConfigError(
            f"no namespace {wanted!r} under {root}; there are {', '.join(p.name for p in known) or 'none'}"
        )
    if len(digests) > 1:
        raise ConfigError(f"{wanted!r} may mean {', '.join(sorted(digests))}: give more of the digest")
    return found


def _full_digest(path: Path) -> str:
    manifest, _ = _read_manifest(path)
    return manifest.digest if manifest is not None else path.name


def _read_manifest(path: Path) -> tuple[Manifest | None, ManifestState]:
    """The manifest, if it is whole and belongs to this directory."""
    try:
        if (path / MANIFEST).is_symlink():
            return None, "damaged"
        data = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None, "missing"
    with contextlib.suppress(ValueError):
        if msgspec.json.decode(data, type=_Version).format_version != FORMAT_VERSION:
            return None, "other_version"
    manifest = Manifest.parse(data)
    if manifest is None:
        return None, "damaged"
    try:
        digest = bytes.fromhex(manifest.digest)
    except ValueError:
        return None, "damaged"
    named = len(digest) == 32 and manifest.digest[:32] == path.name and manifest.generation > 0
    # A digest that goes with the process can be made by that process alone.
    meant = manifest.namespace
    same = not meant.keys_survive_restart or disk_digest(meant, manifest.partition) == digest
    return (manifest, "ok") if named and same else (None, "damaged")


class _Version(msgspec.Struct):
    format_version: int


def _check(
    root: Path, path: Path, files: Files, progress: Progress, *, repair: bool
) -> NamespaceReport | None:
    """One namespace; None if it has gone meanwhile. What the medium refuses is told of it, and no more."""
    try:
        for _ in range(_TRIES):
            if repair:
                report = _check_and_repair(root, path, files, progress)
            else:
                with no_start(root, shared=True):
                    in_use = is_locked(path)
                report = _survey(path, files, progress, in_use)[0]
            if report.manifest != "missing" or report.repaired:
                break
            with no_start(root, shared=True):  # a start may have been removing it, or making it anew
                if not path.is_dir():
                    return None
                if not (path / MANIFEST).exists():
                    break
        return report
    except OSError as error:
        if not path.is_dir():
            return None
        return NamespaceReport(
            path=str(path),
            manifest="unreadable",
            digest=path.name,
            in_use=False,
            disk_bytes=tree_bytes(path),
            bad=1,
            problems=[str(error)],
        )


def _check_and_repair(root: Path, path: Path, files: Files, progress: Progress) -> NamespaceReport:
    held = hold_namespace(root, path)
    if held is None:
        logger.warning("kvquilt: fsck: %s is in use by a live process: checked, not repaired", path)
        return _survey(path, files, progress, True)[0]
    try:
        report, checked = _survey(path, files, progress, False)
        _repair(root, path, report, checked, files)
    finally:
        held.release()
    return report


def _survey(
    path: Path, files: Files, progress: Progress, in_use: bool
) -> tuple[NamespaceReport, list[CheckedSlab]]:
    """Count, without changing anything."""
    for _ in range(_TRIES):
        manifest, state = _read_manifest(path)
        report = NamespaceReport(
            path=str(path), manifest=state, in_use=in_use, disk_bytes=tree_bytes(path), digest=path.name
        )
        if not in_use:
            report.leftovers = sorted(str(draft) for draft in path.glob(".*.tmp"))
        checked = _count(path, manifest, report, files, progress) if manifest is not None else []
        if manifest is None:
            report.problems = [f"{MANIFEST}: {state.replace('_', ' ')}"]
            report.bad = int(state in ("missing", "damaged"))
        if _read_manifest(path)[0] == manifest:
            break
    return report, checked


def _count(
    path: Path, manifest: Manifest, report: NamespaceReport, files: Files, progress: Progress
) -> list[CheckedSlab]:
    report.model, report.digest = manifest.namespace.model, manifest.digest
    report.generation, report.partition = manifest.generation, manifest.partition
    layout = layout_of(manifest)
    facts = [found for arena in manifest.arenas if (found := slab_facts(manifest, arena)) is not None]
    if layout is None or len(facts) != len(manifest.arenas):
        report.manifest, report.bad = "damaged", 1
        report.problems = [f"{MANIFEST}: describes no slabs that could be"]
        return []
    checked = check_slabs(
        path, manifest, facts, layout, files, lambda done, total: progress(str(path), done, total)
    )
    dead = not manifest.namespace.keys_survive_restart and not report.in_use
    for slab in checked:
        if dead:  # the seed of its hashes has gone with the process
            orphaned = slab.orphaned
            slab.orphans["seed"] = slab.good & ~orphaned
        report.problems += slab.problems
        report.groups += _group_reports(slab)
    for total in ("pages", "bytes", "bad", "orphaned"):
        setattr(report, total, sum(getattr(group, total) for group in report.groups))
    # What a lost slab held is counted where its table tells; that it is lost is counted anyhow.
    report.bad += sum(slab.lost and not slab.bad.any() for slab in checked)
    return checked


def _group_reports(slab: CheckedSlab) -> list[GroupReport]:
    own = slab.entries["group"]
    known = [index for index, _ in slab.groups]
    reports = []
    for index, name in slab.groups:
        # What is of no group of this slab is bad, and counted with the first.
        mine = (own == index) | (~np.isin(own, known) if index == known[0] else False)
        pages = int((mine & (slab.good | slab.bad)).sum())
        by = {why: int((mine & which).sum()) for why, which in slab.orphans.items()}
        reports.append(
            GroupReport(
                name,
                pages,
                pages * slab.facts.slot_bytes,
                int((mine & slab.bad).sum()),
                sum(by.values()),
                {why: count for why, count in by.items() if count},
            )
        )
    return reports


def _repair(
    root: Path, path: Path, report: NamespaceReport, checked: list[CheckedSlab], files: Files
) -> None:
    """Drop what was found; the caller holds the namespace's lock."""
    if report.manifest in ("missing", "damaged"):
        with no_start(root, shared=False):
            # Without it nothing there can be trusted: an engine would empty it, too.
            shutil.rmtree(path)
        logger.warning("kvquilt: fsck: removed %s: its manifest is %s", path, report.manifest)
        report.repaired = True
        return
    for draft in report.leftovers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    for slab in checked:
        if slab.problems or slab.bad.any() or slab.orphaned.any():
            drop_pages(path, slab, files, report.generation or 0)
    report.repaired = True
