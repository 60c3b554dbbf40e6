"""The namespace: one digest over everything that gives stored bytes their meaning.

Two runs that differ in any factor never see each other's pages. Adapters, media and a request's
salt are not factors: the engine's block hashes cover them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from kvquilt.errors import ConfigError

__all__ = [
    "SCHEMA_VERSION",
    "GroupFactors",
    "LayerFactors",
    "NamespaceFactors",
    "canonical_dtype",
    "config_digest",
    "diff",
    "weight_fingerprint",
]

SCHEMA_VERSION = 1

_MIB = 1 << 20
_PAGE = 4096
_NUM_PAGES = 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt")
_DTYPE_NAMES = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"}
_PROCESS_NONCE = os.urandom(32).hex()


def canonical_dtype(dtype: str) -> str:
    """One spelling for each element type. Raises ConfigError for "auto": resolve it first.

    >>> canonical_dtype("torch.bfloat16"), canonical_dtype("half")
    ('bfloat16', 'float16')
    """
    name = dtype.removeprefix("torch.").lower()
    if name in ("auto", ""):
        raise ConfigError(f"dtype={dtype!r}: a namespace needs the dtype as the engine resolved it")
    return _DTYPE_NAMES.get(name, name)


class LayerFactors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Geometry of one layer's cache: per-block shape in elements, and the order of its axes in
    memory, outermost first (equal sizes in another order are other bytes)."""

    name: str
    shape: tuple[int, ...] = ()
    stride_order: tuple[int, ...] = ()


class GroupFactors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cache group. dtype: resolved, never "auto". layers: in the engine's order."""

    name: str
    kind: str
    tokens_per_block: int
    page_bytes: int
    dtype: str
    layers: tuple[LayerFactors, ...]
    window: int | None = None
    chunk: int | None = None
    extra_tokens: int = 0
    draft: bool = False
    cacheable: bool = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "dtype", canonical_dtype(self.dtype))


class NamespaceFactors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All factors of a namespace, in clear.

    model, revision: as given to the engine. config: `config_digest`. weights: `weight_fingerprint`,
    or for made-up weights the load format with its seed. groups: in the engine's order.
    cache_layout: how the engine nests layers, blocks and heads in memory. hash_seed: None if the
    engine draws one per process; then no other process ever shares the namespace.
    ranks: local ranks whose pages a slot holds. salt: the user's.
    """

    model: str
    config: str
    weights: str
    groups: tuple[GroupFactors, ...]
    tokens_per_hash: int
    hash_algorithm: str
    hash_seed: str | None
    cache_layout: str
    revision: str = ""
    cache_quantisation: str = "none"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    ranks: tuple[int, ...] = (0,)
    salt: str = ""
    schema_version: int = SCHEMA_VERSION

    def digest(self) -> bytes:
        """32 bytes: SHA-256 over the canonical encoding. Equal factors, equal digest; nothing else."""
        salt = b"" if self.keys_survive_restart else _PROCESS_NONCE.encode()
        return hashlib.sha256(self.to_json() + salt).digest()

    @property
    def keys_survive_restart(self) -> bool:
        """False if the engine's hashes of this process mean nothing to the next one."""
        return self.hash_seed is not None

    def to_json(self) -> bytes:
        """The factors in clear, keys sorted: for a manifest beside persistent data."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def from_json(cls, data: bytes) -> NamespaceFactors:
        """Read a manifest. Raises ConfigError if it is none, or has fields unknown here."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"not a namespace manifest of this version: {error}") from error


def diff(a: NamespaceFactors, b: NamespaceFactors) -> dict[str, tuple[Any, Any]]:
    """Factors that differ, by dotted path, with both values; empty if the namespaces are one.

    A seed drawn per process is named even where both sides have drawn one: manifests cannot tell.
    """
    one, other = dict(_leaves("", msgspec.to_builtins(a))), dict(_leaves("", msgspec.to_builtins(b)))
    paths = [*one, *(path for path in other if path not in one)]
    found = {p: (one.get(p), other.get(p)) for p in paths if one.get(p) != other.get(p)}
    if a.hash_seed is None and b.hash_seed is None:
        found["hash_seed"] = (None, None)
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        yield f"{path}.length", len(value)
        for i, item in enumerate(value):
            yield from _leaves(f"{path}[{i}]", item)
    else:
        yield path, tuple(value) if isinstance(value, list) else value


def config_digest(config: Mapping[str, Any] | Path) -> str:
    """Hex SHA-256 of a model's config by value: spacing and key order do not count.

    config: the mapping, or the path of a config.json or of the directory that holds it. Raises
    ConfigError if it cannot be read.
    """
    if isinstance(config, Path):
        path = config / "config.json" if config.is_dir() else config
        try:
            config = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path}: cannot read the model's config: {error}") from error
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def weight_fingerprint(model_dir: Path | str) -> str | None:
    """Hex digest that tells two checkpoints at one path apart; None if there are no weight files.

    Over each weight file's relative name, size and modification time, and xxh3 of its first and
    last MiB and of 16 pages of 4 KiB spread over it: headers alone are the same in every fine-tune.
    Reads about 2 MiB a file. Raises ConfigError if a file cannot be read.
    """
    root = Path(model_dir)
    files = sorted(p for p in root.rglob("*") if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not files:
        return None
    total = hashlib.sha256()
    for path in files:
        try:
            facts = path.stat()
            with path.open("rb") as file:
                content = _sample(file, facts.st_size)
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the weights: {error}") from error
        name = path.relative_to(root).as_posix()
        total.update(msgspec.json.encode([name, facts.st_size, facts.st_mtime_ns, content]))
    return total.hexdigest()


def _sample(file: BinaryIO, size: int) -> str:
    digest = xxhash.xxh3_128()
    spread = [size * i // _NUM_PAGES // _PAGE * _PAGE for i in range(_NUM_PAGES)]
    for offset, length in ((0, _MIB), (max(0, size - _MIB), _MIB), *((o, _PAGE) for o in spread)):
        file.seek(offset)
        digest.update(file.read(length))
    return digest.hexdigest()
