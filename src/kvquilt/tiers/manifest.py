"""The manifest of a namespace's directory: what lies there, and of which generation."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import xxhash

from kvquilt.layout.namespace import NamespaceFactors, diff
from kvquilt.tiers.format import FORMAT_VERSION

__all__ = ["MANIFEST", "Manifest", "ManifestArena", "diff_of", "disk_digest"]

MANIFEST = "manifest.json"


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


def diff_of(a: Manifest, b: Manifest) -> dict[str, tuple[object, object]]:
    """What keeps two manifests' pages apart, by name, with both values."""
    found: dict[str, tuple[object, object]] = dict(diff(a.namespace, b.namespace))
    if a.partition != b.partition:
        found["group_partition"] = (a.partition, b.partition)
    return found
