"""A process that writes pages until it is killed; says on stdout what it has done.

python killed_writer.py ROOT BUDGET SHARES FIRST SALT TASK, of a budget for SHARES engines. "loop" saves
prompts FIRST, FIRST + 1, ..., two at a time, reads some of them again, and resets now and then;
"hold" saves two prompts and waits; "half" saves one prompt block by block and dies inside the write of
block FIRST. Loads neither torch nor an engine, and no pytest.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kvquilt.layout import CacheLayout
from kvquilt.store import Chain
from kvquilt.tiers import NVMeTier
from kvquilt.tiers.files import aligned_buffer
from kvquilt.tiers.format import BLOCK_BYTES
from unit.tiers.disk_support import (
    SlabFiles,
    load_all,
    make_tier,
    prompt,
    save,
    save_several,
    three_kinds,
    whole,
)

AT_ONCE = 2
MOST_UNITS = 12


def chain_number(layout: CacheLayout, number: int) -> Chain:
    """Prompt `number`: 4 to 12 hash units."""
    return prompt(layout, number, 4 + number * 7 % (MOST_UNITS - 3))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class DiesInside(SlabFiles):
    """Writes the first `bytes_written` of the page in the given slab write, counted from 0, and is killed."""

    bytes_written = 2 * BLOCK_BYTES

    def __init__(self, page: int) -> None:
        super().__init__()
        self._left = page

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        if self.moves_pages(fd, buffers):
            if self._left == 0:
                part, whole = aligned_buffer(self.bytes_written), b"".join(buffers)
                part[:] = whole[: self.bytes_written]
                super().write(fd, [part], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
        super().write(fd, buffers, offset)


def main(root: str, budget: str, shares: str, first: str, salt: str, task: str) -> None:
    layout = three_kinds()
    say("starting")
    tier = make_tier(
        Path(root),
        layout,
        int(budget),
        dp_size=int(shares),
        salt=salt,
        files=DiesInside(int(first)) if task == "half" else None,
    )
    if tier.state != "on":
        raise SystemExit(f"the tier is {tier.state}: {tier.stats().why}")
    say("open")
    if task == "half":
        chain = prompt(layout, 0, 16)
        for block in range(chain.num_blocks(0)):
            save(tier, chain, {0: [block]})
            say("wrote", block)
    else:
        loop(tier, int(first), task)


def loop(tier: NVMeTier, number: int, task: str) -> None:
    rng = random.Random(number)
    while True:
        chains = [chain_number(tier.layout, number + i) for i in range(AT_ONCE)]
        save_several(tier, chains)
        say("wrote", *range(number, number + AT_ONCE))
        if task == "hold":
            sys.stdin.read()
        if rng.random() < 0.5:  # proves the bytes, too
            found = load_all(tier, chains[0])
            if found != whole(tier.layout, chains[0]):
                raise SystemExit(f"prompt {number}: {found}")
        number += AT_ONCE
        if rng.random() < 0.08:
            say("resetting", number)
            if not tier.reset():
                raise SystemExit("the reset was not recorded")
            say("reset", number)


if __name__ == "__main__":
    main(*sys.argv[1:])
