"""How workers get at the pools: file descriptors over a Unix socket.

The scheduler side listens in a random directory of mode 0700 that it removes when all ranks
have attached, so a SIGKILL later leaves nothing behind. Data never crosses the socket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from kvquilt.errors import KVQuiltError
from kvquilt.layout import CacheLayout
from kvquilt.store import ArenaInfo, SlotSpace, map_memory, populate_all
from kvquilt.transfer import ArenaView

__all__ = ["PoolServer", "fetch_arenas", "layout_fingerprint"]

logger = logging.getLogger(__name__)
_MAX_FDS = 253  # what one SCM_RIGHTS message can carry
_CONNECT_SECONDS = 10.0
_SOCKET_NAME = "pools.sock"
_MAX_SOCKET_PATH = 107  # bytes that a Unix socket's address can hold


def _private_directory() -> Path:
    """A new directory of mode 0700, whose path leaves room for the socket's name."""
    directory = Path(tempfile.mkdtemp(prefix="kvquilt-"))
    if len(str(directory / _SOCKET_NAME).encode()) <= _MAX_SOCKET_PATH:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="kvquilt-", dir="/tmp"))


class _Pools(msgspec.Struct):
    fingerprint: str
    arenas: list[ArenaInfo]


class PoolServer:
    """Hands the arenas' descriptors to every worker that connects and runs as the same user.

    The lock guards nothing but shutdown; the arenas are fixed at construction.
    """

    def __init__(self, arenas: Sequence[SlotSpace], fingerprint: str) -> None:
        self._fds = [arena.fd for arena in arenas]
        self._message = msgspec.msgpack.encode(_Pools(fingerprint, [ArenaInfo.of(arena) for arena in arenas]))
        self._directory = _private_directory()
        self.path = str(self._directory / _SOCKET_NAME)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self.path)
            os.chmod(self.path, 0o600)
            self._socket.listen()
        except OSError:
            self.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="kvquilt-pools", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the directory. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    self._hand_over(connection)
                except OSError as error:
                    logger.warning("kvquilt: a worker left while it was handed the pools: %s", error)

    def _hand_over(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", raw)
        if uid != os.getuid():
            logger.warning("kvquilt: refused the pools to a process of user id %d", uid)
            return
        connection.settimeout(_CONNECT_SECONDS)
        socket.send_fds(connection, [struct.pack("<I", len(self._message))], self._fds)
        connection.sendall(self._message)


def layout_fingerprint(layout: CacheLayout) -> str:
    """Digest of the groups that both sides must agree on before a byte is copied."""
    facts = [dataclasses.asdict(group) for group in layout.groups]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([layout.tokens_per_hash, facts]))


def fetch_arenas(path: str, fingerprint: str, *, populate: bool = False) -> list[ArenaView]:
    """Connect to the scheduler side at `path` and map all arenas.

    populate: give them all their memory first, for whoever pins them: pinned as they are then, they
    would stay small pages.

    Raises KVQuiltError if it cannot be reached, has another layout than `fingerprint`, or
    sends what does not add up.
    """
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(path)
            head, fds, _, _ = socket.recv_fds(connection, 4, _MAX_FDS)
            head += _read(connection, 4 - len(head))
            message = _read(connection, struct.unpack("<I", head)[0])
        pools = msgspec.msgpack.decode(message, type=_Pools)
        infos = pools.arenas
        if pools.fingerprint != fingerprint:
            raise KVQuiltError("the scheduler side and this worker see different cache groups")
        if len(infos) != len(fds):
            raise KVQuiltError(f"{len(infos)} arenas were announced but {len(fds)} descriptors came")
        return [_map(info, fd, populate) for info, fd in zip(infos, fds, strict=True)]
    except (OSError, msgspec.DecodeError) as error:
        raise KVQuiltError(f"the pools cannot be attached: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


def _map(info: ArenaInfo, fd: int, populate: bool) -> ArenaView:
    size = os.fstat(fd).st_size
    if size < info.num_slots * info.slot_stride:
        raise KVQuiltError(f"arena {info.name!r} has {size} bytes, not {info.num_slots} x {info.slot_stride}")
    if populate:
        try:
            populate_all(fd, size)
        except OSError as error:
            logger.warning("kvquilt: arena %s has no memory for all its slots yet: %s", info.name, error)
    mapping = map_memory(fd, size)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    return ArenaView(address=address, num_slots=info.num_slots, slot_stride=info.slot_stride, buffer=mapping)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the scheduler side closed the connection")
        parts += part
    return bytes(parts)
