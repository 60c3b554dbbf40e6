"""Processes that are killed with SIGKILL while they write, and what the next one finds.

Twelve kills; KVQUILT_STRESS=25 makes it 300.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvquilt.tiers import NVMeTier
from kvquilt.tiers.files import Files
from kvquilt.tiers.fsck import fsck
from kvquilt.tiers.namespaces import tree_bytes
from unit.tiers import killed_writer
from unit.tiers.disk_support import (
    LIMIT_SECONDS,
    kept_groups,
    load,
    load_all,
    make_tier,
    namespace_path,
    prompt,
    save,
    three_kinds,
    whole,
)
from unit.tiers.killed_writer import AT_ONCE, MOST_UNITS, chain_number

MORE = int(os.environ.get("KVQUILT_STRESS", "1"))
LAYOUT = three_kinds()
BUDGET = 1 << 20
FILES = {"lock", "manifest.json"} | {
    f"arena0{i}.{kind}" for i in range(3) for kind in ("slab", "table", "stamps")
}
TESTS = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
Make = Callable[..., "Writer"]


class Writer:
    """A writing process, and what it has said. shares: engines that the budget is for."""

    def __init__(
        self, root: Path, first: int = 0, *, salt: str = "", task: str = "loop", shares: int = 1
    ) -> None:
        self._root = root
        self._budget = BUDGET * shares
        self._rest = b""
        self.said: list[list[str]] = []
        self.process = subprocess.Popen(
            [
                *(sys.executable, killed_writer.__file__, str(root), str(self._budget)),
                *(str(shares), str(first), salt, task),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        self._pipe = self.process.stdout.fileno()

    def hear(self, seconds: float) -> bool:
        """Read what it says within that time, and weigh the directory; False if it has ended."""
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        if self._root.exists():
            assert tree_bytes(self._root) <= self._budget
        if not ready:
            return True
        data = os.read(self._pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [line.decode().split() for line in lines]
        return bool(data)

    def wait_for(self, word: str, times: int = 1) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while sum(line[0] == word for line in self.said) < times:
            assert time.monotonic() < deadline, f"never said {word!r}"
            assert self.hear(0.05), f"ended with {self.process.wait()} before it said {word!r}"

    def hear_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            assert self.hear(min(left, 0.01)), f"ended by itself with {self.process.wait()}"

    def kill(self) -> None:
        """SIGKILL; then read the rest of what it has said."""
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Hear it out until it has been killed."""
        while self.hear(LIMIT_SECONDS):
            pass
        assert self.process.wait(LIMIT_SECONDS) == -signal.SIGKILL
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def numbers(self, word: str) -> list[int]:
        return [int(number) for line in self.said if line[0] == word for number in line[1:]]


@pytest.fixture
def writers() -> Iterator[Make]:
    """Makes writers; none outlives its test."""
    made: list[Writer] = []

    def make(*args: object, **more: object) -> Writer:
        made.append(Writer(*args, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for writer in made:
        if writer.process.poll() is None:
            writer.kill()


def test_the_writer_is_light() -> None:
    code = "import unit.tiers.killed_writer, sys; assert not {'torch', 'vllm', 'pytest'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)


@dataclass
class Ledger:
    """What must be there, and what must not, after all the kills so far.

    next: number of the first prompt that no writer has begun. forgotten: prompts below it were reset.
    """

    next: int = 0
    forgotten: int = 0
    hits: int = 0
    resets: int = 0
    written: list[int] = field(default_factory=list)

    def note(self, writer: Writer) -> None:
        self.written = writer.numbers("wrote")
        begun = max(self.written, default=self.next - 1) + 1
        for number in writer.numbers("reset"):
            self.forgotten = max(self.forgotten, number)
            self.resets += 1
        maybe = max(writer.numbers("resetting"), default=0)
        self.written = [number for number in self.written if number >= max(self.forgotten, maybe)]
        self.next = max(self.next, begun) + AT_ONCE

    def surely_kept(self, tier: NVMeTier) -> list[int]:
        """Prompts of the last writer that nothing can have evicted yet."""
        groups = kept_groups(LAYOUT)
        room = {
            g: tier.plan.slots[LAYOUT.groups[g].name]
            - AT_ONCE * MOST_UNITS // LAYOUT.hashes_per_block(LAYOUT.groups[g])
            for g in groups
        }
        kept = []
        for number in reversed(self.written):
            chain = chain_number(LAYOUT, number)
            for g in groups:
                room[g] -= chain.num_blocks(g)
            if min(room.values()) < 0:
                break
            kept.append(number)
        return kept


def read_everything(root: Path, ledger: Ledger) -> None:
    """Open, read every page that there is, compare each byte, and look at the directory."""
    tier = make_tier(root, LAYOUT, BUDGET)
    try:
        assert tier.state == "on"
        assert tree_bytes(root) <= BUDGET
        kept = set(ledger.surely_kept(tier))
        for number in range(max(0, ledger.next - 500), ledger.next + AT_ONCE):
            chain = chain_number(LAYOUT, number)
            for g in kept_groups(LAYOUT):
                there = tier.present(chain, g, 0, chain.num_blocks(g)).nonzero()[0].tolist()
                assert not (there and number < ledger.forgotten), f"prompt {number} came back after a reset"
                assert load(tier, chain, g, there) == there if there else True
                assert number not in kept or len(there) == chain.num_blocks(g), f"prompt {number} is lost"
                ledger.hits += len(there)
        assert sum(group.bad for group in tier.stats().groups) == 0
        tier.audit()
        assert tree_bytes(root) <= BUDGET
        assert {path.name for path in namespace_path(tier).iterdir()} == FILES
        assert [path.name for path in (root / "dp0").iterdir()] == [namespace_path(tier).name]
        assert {path.name for path in root.iterdir()} == {"lock", "dp0"}
    finally:
        tier.close()
    report = fsck(root)
    assert (report.bad, report.leftovers, report.sound) == (0, 0, True)


@pytest.mark.parametrize("run", range(MORE))
def test_killed_at_any_moment_nothing_wrong_is_ever_read(tmp_path: Path, writers: Make, run: int) -> None:
    """Each time: no wrong byte, all that was reported as written and not evicted, never more than
    `disk_bytes`, no file left over, and nothing from before a reset."""
    rng, root, ledger = random.Random(run), tmp_path / "kv", Ledger()
    kept = 0
    for kill in range(12):
        writer = writers(root, ledger.next)
        at_start = kill % 4 == 0
        writer.wait_for("starting" if at_start else "open")
        writer.wait_for("wrote", 0 if at_start else rng.randrange(12))
        writer.hear_for(rng.uniform(0, 0.05))
        writer.kill()
        ledger.note(writer)
        read_everything(root, ledger)
        kept += len(ledger.written)
    assert ledger.hits > 100
    assert kept > 10


def files_of(path: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_size) for file in path.iterdir()}


def test_b60_regions_of_killed_engines_do_not_pile_up(tmp_path: Path, writers: Make) -> None:
    """B60: each crash left a region behind, until no further one could be made. Here the room is for two
    engines: three die by SIGKILL, each in a namespace of its own, and each makes way for the next,
    while a live engine keeps what it has."""
    owner = make_tier(tmp_path, LAYOUT, 2 * BUDGET, dp_size=2, salt="live")
    try:
        save(owner, prompt(LAYOUT, 0))
        mine = files_of(namespace_path(owner))
        dead: set[str] = set()
        for number in range(3):
            killed = writers(tmp_path, salt=f"dead{number}", task="hold", shares=2)
            killed.wait_for("wrote")
            killed.kill()
            there = {path.name for path in (tmp_path / "dp0").iterdir()} - {namespace_path(owner).name}
            assert len(there) == 1
            assert not there & dead
            dead |= there
        last = make_tier(tmp_path, LAYOUT, 2 * BUDGET, dp_size=2, salt="next")
        save(last, prompt(LAYOUT, 1))
        last.close()
        assert tree_bytes(tmp_path) <= 2 * BUDGET
        assert not {path.name for path in (tmp_path / "dp0").iterdir()} & dead
        assert files_of(namespace_path(owner)) == mine
        assert load_all(owner, prompt(LAYOUT, 0)) == whole(LAYOUT, prompt(LAYOUT, 0))
    finally:
        owner.close()


def killed_before_the_rename(path: Path) -> None:
    """A process writes a new version of the file, and dies by SIGKILL before it takes its place."""
    child = os.fork()
    if child == 0:
        os.fsync = lambda fd: None  # type: ignore[assignment]
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        try:
            Files().replace(path, b"half a manifest")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


class StallsBeforeTheRename(Files):
    """Writes the new version of a file, and then hangs."""

    def __init__(self) -> None:
        self.stalled, self.go_on = threading.Event(), threading.Event()

    def replace(self, path: Path, data: bytes) -> None:
        if not path.exists():
            return super().replace(path, data)
        draft = path.with_name(f".{path.name}.stalled.tmp")
        draft.write_bytes(data)
        self.stalled.set()
        assert self.go_on.wait(LIMIT_SECONDS)
        os.replace(draft, path)
        return None


def test_b65_drafts_of_the_dead_go_and_a_live_writers_stay(tmp_path: Path) -> None:
    """B65: temporary files of killed writers ate the disk's budget, and those of live ones must not be
    taken for such. A hundred kills between write and rename; meanwhile a second writer, in another
    namespace, hangs at the same place."""
    space = dead_path(tmp_path, "dead")
    gone = dead_path(tmp_path, "gone")
    for number in range(100):
        killed_before_the_rename((gone if number % 4 == 0 else space) / "manifest.json")
    assert len(list(tmp_path.rglob(".*.tmp"))) == 100
    files = StallsBeforeTheRename()
    live = make_tier(tmp_path, LAYOUT, 4 * BUDGET, dp_size=4, salt="live", files=files)
    save(live, prompt(LAYOUT, 0))
    told: list[bool] = []
    reset = threading.Thread(target=lambda: told.append(live.reset()))
    reset.start()
    assert files.stalled.wait(LIMIT_SECONDS)
    draft = namespace_path(live) / ".manifest.json.stalled.tmp"
    before = files_of(namespace_path(live))
    started = make_tier(tmp_path, LAYOUT, 4 * BUDGET, dp_size=4, salt="dead")
    assert started.state == "on"
    assert fsck(tmp_path, repair=True).leftovers == 0
    assert list(tmp_path.rglob(".*.tmp")) == [draft]
    assert files_of(namespace_path(live)) == before
    files.go_on.set()
    reset.join(LIMIT_SECONDS)
    assert told == [True]
    assert list(tmp_path.rglob(".*.tmp")) == []
    for tier in (started, live):
        tier.close()
    again = make_tier(tmp_path, LAYOUT, 4 * BUDGET, dp_size=4, salt="live")
    assert load_all(again, prompt(LAYOUT, 0)) == {g: [] for g in kept_groups(LAYOUT)}
    again.close()


def dead_path(root: Path, salt: str) -> Path:
    """A namespace's directory whose owner has ended."""
    tier = make_tier(root, LAYOUT, 4 * BUDGET, dp_size=4, salt=salt)
    tier.close()
    return namespace_path(tier)


def test_b66_pages_are_found_after_a_restart_and_after_a_crash_in_mid_write(
    tmp_path: Path, writers: Make
) -> None:
    """B66: the files were there, and no token was reused, since the index was lost with the process. Eight
    blocks and a clean restart: eight hits. Killed half-way through block 7: blocks 0 to 6."""
    chain = prompt(LAYOUT, 0, 16)
    for root, blocks in ((tmp_path / "clean", 8), (tmp_path / "crash", 7)):
        if blocks == 8:
            tier = make_tier(root, LAYOUT, BUDGET)
            save(tier, chain, {0: range(8)})
            tier.close()
        else:
            killed = writers(root, 7, task="half")
            killed.end()
            assert killed.numbers("wrote") == list(range(7))
        tier = make_tier(root, LAYOUT, BUDGET)
        assert tier.stats().groups[0].pages == blocks
        assert tier.present(chain, 0, 0, 8).tolist() == [True] * blocks + [False] * (8 - blocks)
        assert load(tier, chain, 0, range(8)) == list(range(blocks))
        assert tier.stats().groups[0].bad == 0
        tier.close()
        assert fsck(root).bad == 0
