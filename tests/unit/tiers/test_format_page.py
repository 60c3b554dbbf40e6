"""docs/format.md against the code that packs and parses."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvquilt.tiers import format as fmt
from kvquilt.tiers.files import Files
from kvquilt.tiers.manifest import Manifest, ManifestArena, disk_digest
from unit.tiers.disk_support import make_tier, namespace_path, three_kinds
from unit.tiers.format_support import pack_page, verify_page

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
KEY, NAMESPACE, SPANS = bytes(range(1, 33)), bytes(range(101, 133)), bytes(range(150, 214))
Field = tuple[int, int]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def fields(title: str) -> dict[str, Field]:
    """Field -> (offset, bytes), of the table in a section; those that fill a gap are `reserved`."""
    rows = re.findall(r"^\| (\d+) \| (\d+)(?: each)? \| (\w+) \|", section(title), re.MULTILINE)
    assert len(rows) > 5
    end = 0
    for offset, size, name in rows:
        assert int(offset) == end, f"{title}: {name} does not follow what is before it"
        end += int(size)
    return {name if name != "reserved" else f"reserved{at}": (int(at), int(size)) for at, size, name in rows}


def at(data: bytes | memoryview, field: Field) -> bytes:
    return bytes(data[field[0] : field[0] + field[1]])


def number(data: bytes | memoryview, field: Field) -> int:
    return int.from_bytes(at(data, field), "little")


@pytest.mark.parametrize(("magic", "entry_bytes"), [(fmt.SLAB_MAGIC, 0), (fmt.TABLE_MAGIC, 128)])
def test_first_blocks_are_as_described(magic: bytes, entry_bytes: int) -> None:
    table = fields("First block of a slab and of a table")
    head = fmt.FileHead(magic, 3, 20480, 1 << 33, 2, entry_bytes, NAMESPACE)
    block = head.pack()
    assert len(block) == fmt.BLOCK_BYTES == 4096
    assert f"`{magic.decode()}`" in PAGE
    told = {name: number(block, table[name]) for name in ("version", "arena", "slot_bytes", "num_slots")}
    assert told == {"version": fmt.FORMAT_VERSION, "arena": 3, "slot_bytes": 20480, "num_slots": 1 << 33}
    assert (number(block, table["span_keys"]), number(block, table["entry_bytes"])) == (2, entry_bytes)
    assert (at(block, table["magic"]), at(block, table["namespace"])) == (magic, NAMESPACE)
    assert number(block, table["check"]) == xxhash.xxh3_64_intdigest(block[: table["check"][0]])
    assert set(block[sum(table["check"]) :]) == {0}
    assert fmt.FileHead.parse(block) == head


def test_slot_headers_are_as_described() -> None:
    table = fields("A slot")
    page = fmt.PageHeader(5, 7, 8192, KEY, NAMESPACE, 1 << 40, SPANS)
    header, payload = memoryview(bytearray(fmt.header_bytes(2))), memoryview(bytes(8192))
    pack_page(header, page, payload)
    assert at(header, table["magic"]) == fmt.PAGE_MAGIC
    assert f"`{fmt.PAGE_MAGIC.decode()}`" in PAGE
    told = {name: number(header, table[name]) for name in ("version", "group", "generation", "payload_bytes")}
    assert told == {"version": fmt.FORMAT_VERSION, "group": 5, "generation": 7, "payload_bytes": 8192}
    assert (number(header, table["slot"]), number(header, table["spans"])) == (1 << 40, 2)
    assert (at(header, table["key"]), at(header, table["namespace"])) == (KEY, NAMESPACE)
    start, size = table["span"]
    assert (bytes(header[start : start + 2 * size]), set(header[start + 2 * size :])) == (SPANS, {0})
    assert {number(header, field) for name, field in table.items() if name.startswith("reserved")} == {0}
    bare = bytearray(header)
    bare[table["page_check"][0] : sum(table["page_check"])] = bytes(16)
    assert at(header, table["page_check"]) == xxhash.xxh3_128_digest(bytes(bare) + bytes(payload))
    bare[table["header_check"][0] : sum(table["header_check"])] = bytes(8)
    assert number(header, table["header_check"]) == xxhash.xxh3_64_intdigest(bytes(bare))
    assert fmt.parse_page_header(header) == page
    assert verify_page(header, payload, page)


@pytest.mark.parametrize("spans", [0, 1, 122, 123, 124])
def test_headers_are_whole_blocks(spans: int) -> None:
    start, size = fields("A slot")["span"]
    least = start + size * spans
    assert least <= fmt.header_bytes(spans) < least + fmt.BLOCK_BYTES
    assert fmt.header_bytes(spans) % fmt.BLOCK_BYTES == 0


def test_entries_are_as_described() -> None:
    table = fields("A table")
    for name, (offset, _) in table.items():
        own = "reserved" if name.startswith("reserved") else name
        assert fmt.entry_dtype(3).fields[own][1] == offset  # type: ignore[index]
    start, size = table["span"]
    assert [fmt.entry_dtype(n).itemsize for n in (0, 1, 3)] == [start, start + size, start + 3 * size]
    entries = np.zeros(2, dtype=fmt.entry_dtype(1))
    entries["key"] = np.frombuffer(KEY, dtype=np.uint64)
    entries["generation"], entries["stamp"], entries["group"] = 9, 1 << 41, 5
    slots = np.asarray([4, 1 << 20], dtype=np.int64)
    fmt.seal_entries(entries, slots)
    data = entries[1].tobytes()
    told = [number(data, table[name]) for name in ("generation", "stamp", "group")]
    assert (at(data, table["key"]), told) == (KEY, [9, 1 << 41, 5])
    assert fmt.intact_entries(entries, slots).tolist() == [True, True]
    for entry, slot in zip(entries, slots.tolist(), strict=True):
        data = entry.tobytes()
        assert number(data, table["check"]) == documented_check(data, table["check"], slot)


def documented_check(data: bytes, check: Field, slot: int) -> int:
    """The steps in the page, with the page's constants."""
    step, mix, again = (int(text, 16) for text in re.findall(r"0x[0-9A-F]{16}", section("A table")))
    assert step == again
    mixed = slot + step
    for place, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        if place != check[0] // 8:
            mixed = (mixed ^ word) * mix % 2**64
            mixed = ((mixed ^ (mixed >> 29)) + step) % 2**64
    return mixed


def test_the_manifest_is_as_described(tmp_path: Path) -> None:
    first, rest = section("manifest.json").split("Of each arena:")
    assert re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE) == list(Manifest.__struct_fields__)
    assert re.findall(r"^\| `(\w+)` \|", rest, re.MULTILINE) == list(ManifestArena.__struct_fields__)
    tier = make_tier(tmp_path, three_kinds(), 4 << 20)
    path = namespace_path(tier)
    tier.close()
    manifest = Manifest.read(path)
    assert manifest is not None
    assert (manifest.format_version, manifest.generation) == (fmt.FORMAT_VERSION, 1)
    assert manifest.digest == disk_digest(manifest.namespace, manifest.partition).hex()
    assert manifest.digest.startswith(path.name)
    tree = section("The directory")
    named = {name.replace("arena00", "arena01") for name in re.findall(r"^ {6}([\w.]+)", tree, re.MULTILINE)}
    assert named - {"arena01.slab"} <= {file.name for file in path.iterdir()}
    for file in path.iterdir():
        assert file.name in tree or re.sub(r"\d\d", "00", file.name) in tree
        assert file.stat().st_mode & 0o777 == 0o600


def test_slots_and_entries_lie_where_the_page_says(tmp_path: Path) -> None:
    assert "`4096 + i * slot_bytes`" in section("A slot")
    assert "`4096 + i * entry_bytes`" in section("A table")
    tier = make_tier(tmp_path, three_kinds(), 4 << 20)
    slabs = tier._opened.slabs  # type: ignore[union-attr]
    for slab in slabs:
        assert slab._offset(3) == 4096 + 3 * slab.facts.slot_bytes
        assert slab.facts.slab_bytes == 4096 + slab.num_slots * slab.facts.slot_bytes
        assert slab.facts.table_bytes == 4096 + slab.num_slots * slab.facts.entry_bytes
        assert slab.facts.stamps_bytes == 8 * slab.num_slots
    tier.close()


def test_a_replaced_file_is_first_a_draft_of_the_name_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = []
    rename = Path.rename
    monkeypatch.setattr("os.replace", lambda old, new: (drafts.append(old), rename(Path(old), new)))
    Files().replace(tmp_path / "manifest.json", b"{}")
    assert re.fullmatch(r"\.manifest\.json\.\w+\.tmp", Path(drafts[0]).name)
    assert "`.manifest.json.<random>.tmp`" in PAGE


def test_the_page_is_of_this_version() -> None:
    assert f"version {fmt.FORMAT_VERSION}, byte by byte" in PAGE
