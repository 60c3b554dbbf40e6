"""Namespaces: any factor that differs separates; the same values spelled differently do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvquilt.errors import ConfigError
from kvquilt.layout.namespace import (
    SCHEMA_VERSION,
    GroupFactors,
    LayerFactors,
    NamespaceFactors,
    canonical_dtype,
    config_digest,
    diff,
    weight_fingerprint,
)


def layers(
    shape: tuple[int, ...] = (2, 16, 128), order: tuple[int, ...] = (0, 1, 2)
) -> tuple[LayerFactors, ...]:
    return tuple(LayerFactors(f"model.layers.{i}.attn", shape, order) for i in range(2))


def group(**more: Any) -> GroupFactors:
    given = {
        "name": "win",
        "kind": "sliding",
        "tokens_per_block": 16,
        "page_bytes": 16_384,
        "dtype": "bfloat16",
        "layers": layers(),
        "window": 64,
    }
    return GroupFactors(**{**given, **more})


def factors(**more: Any) -> NamespaceFactors:
    given = {
        "model": "some/model",
        "config": "c0",
        "weights": "w0",
        "groups": (group(),),
        "tokens_per_hash": 16,
        "hash_algorithm": "sha256",
        "hash_seed": "0",
        "cache_layout": "LBHNC",
    }
    return NamespaceFactors(**{**given, **more})


def test_equal_factors_share_a_namespace_in_any_process() -> None:
    assert factors().digest() == factors().digest()
    assert len(factors().digest()) == 32
    code = (
        "from kvquilt.layout.namespace import NamespaceFactors; import sys;"
        "print(NamespaceFactors.from_json(sys.stdin.buffer.read()).digest().hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.run(
        [sys.executable, "-c", code], input=factors().to_json(), capture_output=True, check=True, env=env
    )
    assert told.stdout.decode().strip() == factors().digest().hex()


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("model", factors(model="other/model")),
        ("revision", factors(revision="abc")),
        ("config", factors(config="c1")),
        ("weights", factors(weights="w1")),
        ("salt", factors(salt="tenant")),
        ("tokens_per_hash", factors(tokens_per_hash=8)),
        ("hash_algorithm", factors(hash_algorithm="sha256_cbor")),
        ("hash_seed", factors(hash_seed="1")),
        ("cache_layout", factors(cache_layout="BLHNC")),
        ("cache_quantisation", factors(cache_quantisation="fp8_per_tensor")),
        ("tensor_parallel", factors(tensor_parallel=2)),
        ("pipeline_parallel", factors(pipeline_parallel=2)),
        ("decode_context_parallel", factors(decode_context_parallel=2)),
        ("ranks", factors(ranks=(0, 1))),
        ("schema_version", factors(schema_version=SCHEMA_VERSION + 1)),
        ("groups.length", factors(groups=(group(), group(name="full")))),
        ("groups[0].name", factors(groups=(group(name="sliding"),))),
        ("groups[0].kind", factors(groups=(group(kind="chunked"),))),
        ("groups[0].window", factors(groups=(group(window=128),))),
        ("groups[0].chunk", factors(groups=(group(chunk=64),))),
        ("groups[0].extra_tokens", factors(groups=(group(extra_tokens=1),))),
        ("groups[0].draft", factors(groups=(group(draft=True),))),
        ("groups[0].cacheable", factors(groups=(group(cacheable=False),))),
        ("groups[0].tokens_per_block", factors(groups=(group(tokens_per_block=32),))),
        ("groups[0].page_bytes", factors(groups=(group(page_bytes=8192),))),
        ("groups[0].dtype", factors(groups=(group(dtype="float16"),))),
        ("groups[0].layers[0].shape", factors(groups=(group(layers=layers((16, 2, 128))),))),
        ("groups[0].layers[0].stride_order", factors(groups=(group(layers=layers(order=(1, 0, 2))),))),
        ("groups[0].layers[0].name", factors(groups=(group(layers=layers()[::-1]),))),
    ],
)
def test_invariant_41_any_factor_separates_and_is_named(path: str, other: NamespaceFactors) -> None:
    assert other.digest() != factors().digest()
    assert path in diff(factors(), other)
    assert diff(other, other) == {}


def test_no_factor_is_left_out() -> None:
    """Every field of the structures is in the list above: a new one without a case fails here."""
    marks = test_invariant_41_any_factor_separates_and_is_named.pytestmark  # type: ignore[attr-defined]
    paths = {case[0].split(".")[-1].split("[")[0] for case in marks[0].args[1]}
    fields = {
        f.name
        for struct in (NamespaceFactors, GroupFactors, LayerFactors)
        for f in msgspec.structs.fields(struct)
    }
    assert fields - {"groups", "layers"} == paths - {"length"}


def test_a_difference_shows_both_values() -> None:
    assert diff(factors(), factors(tensor_parallel=4)) == {"tensor_parallel": (1, 4)}


def test_b54_physical_order_and_packing_are_factors() -> None:
    """Equal page bytes, another head/token order: other bytes. Going back finds the old namespace."""
    token_major, head_major = factors(), factors(groups=(group(layers=layers(order=(0, 2, 1))),))
    packed = factors(cache_layout="BLHNC")
    assert len({f.digest() for f in (token_major, head_major, packed)}) == 3
    assert factors().digest() == token_major.digest()


def test_b56_dtypes_are_the_resolved_ones() -> None:
    digests = {factors(groups=(group(dtype=d),)).digest() for d in ("float16", "bfloat16", "fp8")}
    assert len(digests) == 3
    spelled = [factors(groups=(group(dtype=d),)).digest() for d in ("bfloat16", "torch.bfloat16")]
    assert spelled[0] == spelled[1]
    assert canonical_dtype("fp8") == canonical_dtype("torch.float8_e4m3fn")
    for unresolved in ("auto", ""):
        with pytest.raises(ConfigError, match="as the engine resolved it"):
            group(dtype=unresolved)


def test_b57_an_unset_seed_never_meets_another_process() -> None:
    fixed, drawn = factors(), factors(hash_seed=None)
    assert fixed.keys_survive_restart
    assert not drawn.keys_survive_restart
    assert drawn.digest() == factors(hash_seed=None).digest(), "one process stays one namespace"
    code = (
        "from kvquilt.layout.namespace import NamespaceFactors; import sys;"
        "print(NamespaceFactors.from_json(sys.stdin.buffer.read()).digest().hex())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], input=drawn.to_json(), capture_output=True, check=True
    )
    assert told.stdout.decode().strip() != drawn.digest().hex()
    assert "hash_seed" in diff(drawn, NamespaceFactors.from_json(drawn.to_json()))


def test_b22_a_salt_separates_tenants() -> None:
    x, y = factors(salt="x"), factors(salt="y")
    assert x.digest() != y.digest()
    assert x.digest() == factors(salt="x").digest()


def test_a_manifest_comes_back_and_foreign_ones_are_refused() -> None:
    assert NamespaceFactors.from_json(factors().to_json()) == factors()
    for bad in (b"", b"{}", b"[1]", factors().to_json().replace(b'"salt"', b'"spice"')):
        with pytest.raises(ConfigError, match="not a namespace manifest"):
            NamespaceFactors.from_json(bad)


def test_config_digest_is_by_value(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"b": [1, 2],\n "a": {"y": 1, "x": 2}}')
    expected = config_digest({"a": {"x": 2, "y": 1}, "b": [1, 2]})
    assert config_digest(tmp_path) == config_digest(tmp_path / "config.json") == expected
    assert config_digest({"a": {"x": 2, "y": 1}, "b": [2, 1]}) != expected
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the model's config"):
        config_digest(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the model's config"):
        config_digest(tmp_path / "none.json")


def weights(root: Path, size: int = 6 << 20) -> Path:
    root.mkdir()
    path = root / "model.safetensors"
    path.write_bytes(bytes(range(256)) * (size // 256))
    os.utime(path, ns=(10**18, 10**18))
    return path


def poke(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xfe")
    os.utime(path, ns=(10**18, 10**18))


def test_weights_of_one_size_name_and_time_are_told_apart(tmp_path: Path) -> None:
    """Two fine-tunes at one path: same header, other values."""
    path = weights(tmp_path / "a")
    first = weight_fingerprint(path.parent)
    assert first == weight_fingerprint(str(path.parent))
    seen = {first}
    size = path.stat().st_size
    for offset in (10, size - 10, size * 5 // 16 // 4096 * 4096 + 7):  # first MiB, last MiB, a spread page
        poke(path, offset)
        seen.add(weight_fingerprint(path.parent))
    assert len(seen) == 4


def test_names_sizes_times_and_further_files_count(tmp_path: Path) -> None:
    path = weights(tmp_path / "a", 1 << 12)
    seen = [weight_fingerprint(path.parent)]
    os.utime(path, ns=(10**18 + 1, 10**18 + 1))
    seen.append(weight_fingerprint(path.parent))
    path = path.rename(path.with_name("other.safetensors"))
    seen.append(weight_fingerprint(path.parent))
    (path.parent / "more.bin").write_bytes(b"")
    seen.append(weight_fingerprint(path.parent))
    assert len(set(seen)) == 4
    (path.parent / "README.md").write_text("not weights")
    assert weight_fingerprint(path.parent) == seen[-1]


def test_no_weights_no_fingerprint(tmp_path: Path) -> None:
    assert weight_fingerprint(tmp_path) is None
    assert weight_fingerprint(tmp_path / "nothing") is None
