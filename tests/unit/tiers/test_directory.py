"""Whose the directory is, what may lie in it, and who has to go."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvquilt.errors import ConfigError
from kvquilt.layout import CacheGroup, CacheLayout
from kvquilt.layout.namespace import GroupFactors, LayerFactors, NamespaceFactors
from kvquilt.store import Chain
from kvquilt.tiers import DiskOptions, NVMeTier, Pages, room
from kvquilt.tiers.locks import LOCK, no_start
from kvquilt.tiers.manifest import MANIFEST
from kvquilt.tiers.namespaces import NamespaceDirectory, list_namespaces, tree_bytes

MIB = 1 << 20
LAYOUT = CacheLayout([CacheGroup("full", kind="full", tokens_per_block=16, page_bytes=4096)])


def factors(**changes: object) -> NamespaceFactors:
    layer = LayerFactors("layer.0", (8, 16, 64), (0, 1, 2))
    group = GroupFactors("full", "full", 16, 4096, "float16", (layer,))
    plain = NamespaceFactors(
        model="m",
        config="c",
        weights="w",
        groups=(group,),
        tokens_per_hash=16,
        hash_algorithm="sha256",
        hash_seed="0",
        cache_layout="nested",
    )
    return msgspec.structs.replace(plain, **changes)


def with_group(**changes: object) -> NamespaceFactors:
    plain = factors()
    return factors(groups=(msgspec.structs.replace(plain.groups[0], **changes),))


Open = Callable[..., NVMeTier]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def tier(root: Path) -> Iterator[Open]:
    made: list[NVMeTier] = []

    def make(namespace: NamespaceFactors | None = None, num_bytes: int = 4 * MIB, **more: object) -> NVMeTier:
        partition = more.pop("partition", "solved")
        options = DiskOptions(root, num_bytes, threads=1, **more)  # type: ignore[arg-type]
        made.append(NVMeTier(LAYOUT, namespace or factors(), options, partition=partition))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


CHAIN = Chain(LAYOUT, [hashlib.sha256(bytes([i])).digest() for i in range(10)])
MEMORY = memoryview(mmap.mmap(-1, 16 * 4096))


def save(tier: NVMeTier, count: int = 10) -> None:
    blocks = np.arange(count, dtype=np.int64)
    tier.save([Pages(CHAIN, 0, blocks, MEMORY, blocks * 4096)], lambda: None)
    assert tier.wait_idle(10)


def found(tier: NVMeTier) -> int:
    return int(tier.present(CHAIN, 0, 0, 10).sum())


def ready(tier: NVMeTier) -> NVMeTier:
    """A tier whose slabs have grown to their full length."""
    slab = tier._opened.slabs[0]  # type: ignore[union-attr]
    while slab.usable_slots < slab.num_slots:
        tier.wait_idle(0.01)
    return tier


def test_it_is_made_private(tier: Open, root: Path) -> None:
    tier()
    modes = {path: path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_one_that_others_may_write_to_is_refused(tier: Open, root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match="writable by nobody else"):
        tier()


def test_one_below_a_directory_that_all_may_write_to_is_refused(tier: Open, root: Path) -> None:
    root.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="could replace it"):
        tier()
    root.parent.chmod(0o1777)
    assert tier().state == "on"


def test_a_file_and_a_relative_path_are_refused(tier: Open, root: Path) -> None:
    root.write_text("not a directory")
    with pytest.raises(ConfigError, match="no directory"):
        tier()
    with pytest.raises(ConfigError, match="absolute"):
        NVMeTier(LAYOUT, factors(), DiskOptions(Path("disk"), MIB))


def test_too_few_bytes_are_refused_with_the_least_that_works(tier: Open) -> None:
    with pytest.raises(
        ConfigError, match=r"disk_bytes=1000 .*the least disk_bytes that works is \d+$"
    ) as error:
        tier(num_bytes=1000)
    least = int(str(error.value).split()[-1])
    with pytest.raises(ConfigError, match=f"works is {least}$"):
        tier(num_bytes=least - 1)
    assert tier(num_bytes=least).state == "on"


def test_its_bytes_are_the_bound_at_full_length(tier: Open, root: Path) -> None:
    ready(tier())
    assert 0.9 * 4 * MIB < tree_bytes(root) <= 4 * MIB


def test_the_least_recently_used_namespace_makes_room(
    tier: Open, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    names = []
    for i in range(3):
        one = ready(tier(factors(model=f"model-{i}"), num_bytes=3 * MIB, dp_size=3))
        names.append(one._opened.claim.path)  # type: ignore[union-attr]
        one.close()
        os.utime(names[-1] / "lock", (i, i))
    os.utime(names[0] / "lock", (10, 10))
    ready(tier(factors(model="new"), num_bytes=3 * MIB)).close()
    assert [name.exists() for name in names] == [False, False, False]
    assert [record.args[1] for record in caplog.records] == ["model-1", "model-2", "model-0"]  # type: ignore[index]
    assert tree_bytes(root) <= 3 * MIB


def test_only_as_many_go_as_have_to(tier: Open, root: Path) -> None:
    kept = []
    for i in range(2):
        one = ready(tier(factors(model=f"model-{i}"), num_bytes=MIB))
        kept.append(one._opened.claim.path)  # type: ignore[union-attr]
        one.close()
        os.utime(kept[-1] / "lock", (i, i))
    # A rank's share is half: there is room beside one of the two.
    ready(tier(factors(model="new"), num_bytes=5 * MIB // 2, dp_size=2)).close()
    assert [name.exists() for name in kept] == [False, True]


def test_refuse_starts_no_engine_that_others_would_have_to_go_for(tier: Open) -> None:
    ready(tier(factors(model="old"))).close()
    with pytest.raises(ConfigError, match='disk_reclaim is "refuse"'):
        tier(reclaim="refuse")
    assert found(tier(factors(model="old"))) == 0


def test_a_live_engine_never_has_to_go_nor_does_what_it_still_will_take(tier: Open, root: Path) -> None:
    live = tier(factors(model="live"), num_bytes=64 * MIB)  # grows in the background
    with pytest.raises(ConfigError, match="of which 0 B are namespaces that nobody uses"):
        tier(num_bytes=66 * MIB)
    assert ready(live).state == "on"
    assert tree_bytes(root) <= 64 * MIB


def test_a_smaller_bound_cuts_and_keeps_what_still_fits(tier: Open, root: Path) -> None:
    one = tier()
    save(one)
    ready(one).close()
    one = tier(num_bytes=MIB)
    assert tree_bytes(root) <= MIB
    assert found(one) == 10  # the lowest slots are used first
    one.close()
    assert found(ready(tier())) == 10


def test_a_second_live_process_on_one_namespace_is_refused_unless_it_only_reads(tier: Open) -> None:
    one = tier()
    save(one)
    with pytest.raises(ConfigError, match="another process uses the same namespace"):
        tier()
    reader = tier(write="never", num_bytes=0)
    assert found(reader) == 10
    assert (
        reader.save([Pages(CHAIN, 0, np.arange(1), MEMORY, np.zeros(1, dtype=np.int64))], lambda: None) == 0
    )
    one.close()
    assert found(tier()) == 10


def test_a_forked_child_does_not_keep_the_lock(tier: Open) -> None:
    one = tier()
    forked, told = os.pipe()
    waits, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begins)
        os.write(told, b"x")  # it has let go: that happens before the fork returns here
        os.read(waits, 1)  # until the parent closes its end
        os._exit(0)
    try:
        assert os.read(forked, 1) == b"x"
        one.close()
        assert tier().state == "on"
    finally:
        os.close(begins)
        os.waitpid(child, 0)
        for end in (forked, told, waits):
            os.close(end)


def test_a_child_that_is_forked_during_a_start_does_not_keep_the_directory(tier: Open, root: Path) -> None:
    tier().close()
    waits, begins = os.pipe()
    with no_start(root, shared=False):
        child = os.fork()
        if child == 0:
            os.close(begins)
            os.read(waits, 1)
            os._exit(0)
    try:
        fd = os.open(root / LOCK, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the child has it
        os.close(fd)
    finally:
        os.close(begins)
        os.waitpid(child, 0)
        os.close(waits)


@pytest.mark.parametrize("which", ["rank", "namespace"])
def test_a_link_to_a_place_that_is_not_counted_is_refused(
    tier: Open, root: Path, tmp_path: Path, which: str
) -> None:
    one = tier()
    one.close()
    path = one.path if which == "namespace" else one.path.parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        tier()


@pytest.mark.parametrize("odd", ["manifest", "lock", "draft"])
def test_another_namespace_that_cannot_be_read_does_not_keep_it_from_starting(
    tier: Open, root: Path, odd: str
) -> None:
    one = tier(factors(model="other"), num_bytes=MIB)
    one.close()
    if odd == "manifest":
        (one.path / MANIFEST).unlink()
        (one.path / MANIFEST).mkdir()
    elif odd == "lock":
        (one.path / LOCK).unlink()
        (one.path / LOCK).symlink_to("nowhere")
    else:
        (one.path / ".x.tmp").mkdir()
    assert tier(num_bytes=4 * MIB, dp_size=2).state == "on"


def test_what_lies_between_its_files_counts_and_stays(tier: Open) -> None:
    one = tier()
    one.close()
    (one.path / "notes").write_bytes(bytes(MIB))
    with pytest.raises(ConfigError, match=r"other files under .* take 1 MiB"):
        tier()
    assert (one.path / "notes").exists()
    assert tier(num_bytes=10 * MIB, dp_size=2).state == "on"


def test_a_namespace_is_used_last_when_its_engine_is_killed(tier: Open) -> None:
    """Whoever is killed does not come to say so at the end."""
    one = tier()
    one.close()
    os.utime(one.path / LOCK, (1.0, 1.0))
    two = tier()
    assert (two.path / LOCK).stat().st_mtime > 1.0
    os.utime(two.path / LOCK, (1.0, 1.0))
    assert two._opened is not None
    two._opened.save_stamps()
    assert (two.path / LOCK).stat().st_mtime > 1.0


def test_two_ranks_may_make_the_directory_at_once(
    tier: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Path.exists

    def too_late(path: Path) -> bool:
        found = there(path)
        if path == root:
            root.mkdir(mode=0o700, exist_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", too_late)
    assert tier().state == "on"


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("order of the axes", with_group(layers=(LayerFactors("layer.0", (8, 16, 64), (0, 2, 1)),))),
        ("packing", factors(cache_layout="packed")),
        ("dtype", with_group(dtype="bfloat16")),
        ("quantised cache", with_group(dtype="fp8")),
        ("other seed", factors(hash_seed="1")),
        ("weights", factors(weights="other")),
        ("salt", factors(salt="mine")),
        ("ranks", factors(tensor_parallel=2)),
    ],
)
def test_b54_b56_b57_another_namespace_finds_nothing_and_going_back_finds_all(
    tier: Open, case: str, other: NamespaceFactors, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = tier(num_bytes=MIB)
    save(one)
    ready(one).close()
    second = tier(other, num_bytes=2 * MIB, dp_size=2)
    assert found(second) == 0, case
    assert any("which differ in" in record.getMessage() for record in caplog.records)
    second.close()
    assert found(tier(num_bytes=2 * MIB, dp_size=2)) == 10


def test_rows_that_groups_share_are_another_namespace(tier: Open) -> None:
    one = tier(num_bytes=MIB)
    save(one)
    one.close()
    assert found(tier(num_bytes=4 * MIB, dp_size=2, partition="shared_rows")) == 0


def test_b57_a_seed_drawn_per_process_is_never_found_by_another(
    tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = factors(hash_seed=None)
    assert not drawn.keys_survive_restart
    one = tier(drawn, num_bytes=4 * MIB, dp_size=2)
    save(one)
    one.close()
    again = tier(drawn, num_bytes=4 * MIB, dp_size=2)
    assert found(again) == 10
    again.close()
    monkeypatch.setattr("kvquilt.layout.namespace._PROCESS_NONCE", "what another process has drawn")
    assert found(tier(drawn, num_bytes=4 * MIB, dp_size=2)) == 0


def test_ranks_have_a_directory_and_a_share_each(tier: Open, root: Path) -> None:
    ranks = [ready(tier(dp_rank=i, dp_size=2)) for i in range(2)]
    assert sorted(path.name for path in root.glob("dp*")) == ["dp0", "dp1"]
    save(ranks[0])
    assert [found(rank) for rank in ranks] == [10, 0]
    assert tree_bytes(root) <= 4 * MIB
    assert all(tree_bytes(root / f"dp{i}") <= 2 * MIB for i in range(2))


def test_a_rank_that_grows_while_another_starts_counts_once(
    tier: Open, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = ready(tier(dp_rank=0, dp_size=2))
    slab = live.path / "arena00.slab"
    length = slab.stat().st_size
    os.truncate(slab, length - MIB)

    def look_and_grow(path: Path) -> list[NamespaceDirectory]:
        there = list_namespaces(path)
        with slab.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, length)
        return there

    monkeypatch.setattr(room, "list_namespaces", look_and_grow)
    assert ready(tier(dp_rank=1, dp_size=2)).state == "on"
    assert tree_bytes(root) <= 4 * MIB


def test_a_lock_that_the_file_system_refuses_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No locks available"), no_start(tmp_path, shared=False):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_smaller_bound_keeps_pages_of_each_rank(tier: Open, root: Path) -> None:
    for rank in (0, 1):
        one = ready(tier(dp_rank=rank, dp_size=2))
        save(one)
        one.close()
    ranks = [tier(num_bytes=5 * MIB // 2, dp_rank=rank, dp_size=2) for rank in (0, 1)]
    assert [found(one) for one in ranks] == [10, 10]
    assert tree_bytes(root) <= 5 * MIB // 2


def test_one_rank_that_becomes_two_leaves_room_for_the_other(tier: Open, root: Path) -> None:
    one = ready(tier())
    save(one)
    one.close()
    first = tier(dp_rank=0, dp_size=2)
    second = tier(dp_rank=1, dp_size=2)
    assert found(first) == 10
    assert ready(second).state == "on"
    assert tree_bytes(root) <= 4 * MIB


def test_leftovers_of_dead_owners_go_and_a_live_owners_stay(tier: Open, root: Path) -> None:
    live = tier(factors(model="live"), num_bytes=MIB)
    path = live._opened.claim.path  # type: ignore[union-attr]
    draft = path / ".manifest.json.x.tmp"
    draft.write_text("{")
    dead = root / "dp0" / ("dead" * 8)
    dead.mkdir()
    (dead / "arena00.slab").write_bytes(bytes(100))
    own = tier(factors(model="own"), num_bytes=4 * MIB, dp_size=2)
    own_draft = own._opened.claim.path / ".probe.tmp"  # type: ignore[union-attr]
    own.close()
    own_draft.write_text("x")
    tier(factors(model="own"), num_bytes=4 * MIB, dp_size=2)
    assert draft.exists()
    assert not dead.exists()
    assert not own_draft.exists()


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`space(bytes)`: so much is free on every file system."""
    real = os.statvfs

    def leave(free: int) -> None:
        def statvfs(path: Path) -> os.statvfs_result:
            given = list(real(path))
            given[4] = free // given[1]  # f_bavail, in units of f_frsize
            return os.statvfs_result(given)

        monkeypatch.setattr(os, "statvfs", statvfs)

    return leave


def test_more_bytes_than_the_file_system_has_are_refused(
    tier: Open, root: Path, space: Callable[[int], None]
) -> None:
    other = tier(factors(salt="other"))
    save(other)
    other.close()
    space(2 * MIB)
    with pytest.raises(ConfigError, match=r"grow by .* MiB, but .* 2 MiB free: lower disk_bytes"):
        tier(num_bytes=8 * MIB - 1)
    assert tier(factors(salt="other")).stats().groups[0].pages == 10  # nobody had to go for that


def test_pages_that_are_there_are_worth_a_start_on_a_full_disk(
    tier: Open, root: Path, space: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = tier()
    save(first)
    first.close()
    space(0)
    again = tier()
    assert again.stats().groups[0].pages == 10
    assert "will be full" not in caplog.text
    again.close()
    assert tier(num_bytes=8 * MIB).stats().groups[0].pages == 10
    assert "0 B free" in caplog.text
    assert "will be full" in caplog.text
