"""How the pools get from one side to the other: a private socket, descriptors, and what is refused."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

import msgspec

from kvquilt import CacheGroup, CacheLayout
from kvquilt.errors import KVQuiltError
from kvquilt.store import Arena, ArenaInfo, mapping
from kvquilt.vllm.handover import PoolServer, fetch_arenas, layout_fingerprint


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    made = [Arena(0, "a", 4, 4096), Arena(1, "b", 2, 8192)]
    yield made
    for arena in made:
        arena.close()


@pytest.fixture
def server(arenas: list[Arena], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolServer]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = PoolServer(arenas, "print")
    yield server
    server.close()


def test_worker_sees_the_memory_of_the_pools(server: PoolServer, arenas: list[Arena]) -> None:
    views = fetch_arenas(server.path, "print")
    assert [(v.num_slots, v.slot_stride) for v in views] == [(4, 4096), (2, 8192)]
    os.pwrite(arenas[1].fd, b"patch", 8192)
    seen = np.frombuffer(views[1].buffer, dtype=np.uint8)[8192:8197]  # type: ignore[call-overload]
    assert seen.tobytes() == b"patch"


@pytest.mark.parametrize("populate", [True, False])
def test_who_pins_finds_all_memory_there_and_others_do_not_wait_for_it(
    populate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned small pages stay small: so what is to be pinned is put into huge pages first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arena = Arena(0, "a", 100, 44 << 12)
    server = PoolServer([arena], "print")
    (view,) = fetch_arenas(server.path, "print", populate=populate)
    assert os.fstat(arena.fd).st_blocks * 512 == (arena.size_bytes if populate else 0)
    huge = mapping.huge_page_bytes()
    assert not huge or view.address % huge == 0 or huge > arena.size_bytes
    server.close()
    arena.close()


def test_a_worker_attaches_where_not_all_memory_can_be_had(
    server: PoolServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fd: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("kvquilt.vllm.handover.populate_all", fail)
    assert len(fetch_arenas(server.path, "print", populate=True)) == 2
    assert "arena a has no memory for all its slots yet" in caplog.text


def test_only_the_user_can_reach_the_socket(server: PoolServer) -> None:
    path = Path(server.path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.parent.name.startswith("kvquilt-")


def test_several_workers_one_after_another(server: PoolServer) -> None:
    before = open_files()
    kept = [fetch_arenas(server.path, "print") for _ in range(4)]
    assert len(kept) == 4
    assert open_files() == before + 4 * 2, "a mapping keeps its own descriptor, and nothing else stays open"
    kept.clear()
    assert open_files() == before


def test_other_groups_are_refused_and_nothing_stays_open(server: PoolServer) -> None:
    before = open_files()
    with pytest.raises(KVQuiltError, match="different cache groups"):
        fetch_arenas(server.path, "another print")
    assert open_files() == before


def test_closing_removes_the_folder_and_ends_the_thread(server: PoolServer) -> None:
    server.close()
    server.close()
    assert not Path(server.path).parent.exists()
    server._thread.join(10)
    assert not server._thread.is_alive()
    with pytest.raises(KVQuiltError, match="cannot be attached"):
        fetch_arenas(server.path, "print")


def test_worker_that_leaves_at_once_does_not_end_the_server(server: PoolServer) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(server.path)
    assert len(fetch_arenas(server.path, "print")) == 2


def test_another_user_is_refused(server: PoolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(KVQuiltError, match="closed the connection"):
        fetch_arenas(server.path, "print")


class Liar:
    """A server that says what it is told."""

    def __init__(self, folder: Path, message: bytes, fds: list[int], size: int | None = None) -> None:
        self.path = str(folder / "liar.sock")
        self._head = struct.pack("<I", len(message) if size is None else size)
        self._message, self._fds = message, fds
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(self.path)
        self.socket.listen()

    def serve(self) -> None:
        connection, _ = self.socket.accept()
        with connection:
            socket.send_fds(connection, [self._head], self._fds)
            connection.sendall(self._message)


class Pools(msgspec.Struct):
    fingerprint: str
    arenas: list[ArenaInfo]


@pytest.mark.parametrize("lie", ["too few descriptors", "short memory", "no message", "garbage"])
def test_what_does_not_add_up_is_refused(tmp_path: Path, arenas: list[Arena], lie: str) -> None:
    import threading

    infos = [arena.info for arena in arenas]
    fds = [arena.fd for arena in arenas]
    size = None
    if lie == "too few descriptors":
        fds = fds[:1]
    elif lie == "short memory":
        infos[0] = ArenaInfo(0, "a", 5, 4096, 5 * 4096)
    message = msgspec.msgpack.encode(Pools("print", infos))
    if lie == "no message":
        size, message = len(message), b""
    elif lie == "garbage":
        message = b"\xc1" * 20
    liar = Liar(tmp_path, message, fds, size)
    thread = threading.Thread(target=liar.serve)
    thread.start()
    before = open_files()
    with pytest.raises(KVQuiltError):
        fetch_arenas(liar.path, "print")
    thread.join()
    assert open_files() <= before
    liar.socket.close()


def layout(**changes: object) -> CacheLayout:
    options: dict[str, object] = {"tokens_per_block": 16, "page_bytes": 64, "window": 33, "layers": ("l",)}
    return CacheLayout([CacheGroup("g", kind="sliding", **{**options, **changes})], tokens_per_hash=16)  # type: ignore[arg-type]


def test_fingerprint_sees_every_difference_that_matters() -> None:
    same = layout_fingerprint(layout())
    assert same == layout_fingerprint(layout())
    changes: list[dict[str, object]] = [
        {"tokens_per_block": 32},
        {"page_bytes": 128},
        {"window": 34},
        {"layers": ("m",)},
        {"extra_tokens": 1},
        {"draft": True},
    ]
    for change in changes:
        assert layout_fingerprint(layout(**change)) != same, change
