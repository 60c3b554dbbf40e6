"""Draft groups: what must be present and is never loaded, and hits that do without a drafter's pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.brute_force import HitCheck
from harness.connector_support import Quilt, engine_of, full, sliding, states, tokens
from harness.test_all_kinds import loaded, withdraw
from kvquilt.store import kernels
from kvquilt.testing import sim_model
from kvquilt.testing.sim_fingerprint import TokenHashes, fingerprints, layer_constants
from kvquilt.testing.sim_model import WrongKV
from kvquilt.testing.sim_states import Running, StateStep, plan_states

DRAFT_MODEL = [full(32), sliding(32, 64), full(64, drafter="draft_model", bytes_per_token=64)]


def drafting(groups: Any = None, method: str = "draft_model", **more: Any) -> Quilt:
    return Quilt(groups or DRAFT_MODEL, speculation=method, **more)


def hollow_pages(q: Quilt, group: int) -> int:
    """Visible pages of a group in which some token's entry is zero."""
    view = q.store._built.views[group]
    arena = q.store.arenas[view.arena]
    size = q.layout.groups[group].page_bytes
    slots = np.flatnonzero((view.slots.state == kernels.RESIDENT) & (view.slots.group == group))
    pages = [os.pread(arena.fd, size, int(slot) * arena.slot_stride) for slot in slots]
    return sum(bool((np.frombuffer(page, dtype=np.uint64) == 0).any()) for page in pages)


# ---- the peek block ----


@pytest.mark.parametrize(("kept", "hit"), [({2, 3}, 0), ({1, 2, 3}, 6)])
def test_b3_the_peek_block_is_checked_together_with_the_window(kept: set[int], hit: int) -> None:
    """B3: block 2, window 4; at 6 blocks 1 and 2 are the window, and block 3 is the peek."""
    with Quilt([full(2), sliding(2, 4, draft=True)]) as q:
        prompt = tokens(1, 9)
        q.serve(prompt)
        withdraw(q, prompt, 1, kept)
        withdraw(q, prompt, 0, {0, 1, 2, 3})
        q.forget()
        assert q.serve(prompt).external_hit == hit
        assert loaded(q) == ({"full": 3, "sliding": 2} if hit else {})  # the peek block is not loaded
        q.check_end()


def test_b4_the_peek_block_is_given_up_once() -> None:
    """B4: three attention kinds, all ten blocks stored; then random sets against brute force."""
    groups = [full(1), sliding(1, 3), sliding(1, 5, draft=True)]
    with Quilt(groups, num_blocks=200) as q:
        check = HitCheck(q, groups)
        prompt = tokens(1, 11)
        q.serve(prompt)
        for group in range(3):
            withdraw(q, prompt, group, set(range(10)) & set(q.saved_blocks(prompt, group)))
        q.forget()
        assert q.serve(prompt).external_hit == 9
        draw = np.random.default_rng(4)
        hits = set()
        for _ in range(40):
            q.forget()
            q.serve(prompt, skip_reading_prefix_cache=True)
            for group in range(3):
                there = q.saved_blocks(prompt, group)
                withdraw(q, prompt, group, {block for block in there if draw.random() < 0.85})
            q.forget()
            hits.add(q.serve(prompt).external_hit)
        assert len(hits) > 3
        assert check.wrong == []
        q.check_end()


@pytest.mark.parametrize(("length", "hit"), [(1025, 768), (1100, 1024)])
def test_b5_the_writer_keeps_all_that_the_reader_asks_for(length: int, hit: int) -> None:
    """B5: full block 256, draft window group of block 64 and window 128. Without the peek block at
    1,024 (the prompt ends before it is full) the hit is the boundary before it."""
    groups = [full(256), sliding(64, 128, draft=True)]
    with Quilt(groups, retention="prompt_end", max_num_batched_tokens=256) as q:
        prompt = tokens(1, length)
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt).external_hit == hit
        q.check_end()


@pytest.mark.parametrize(("kept", "hit"), [({2}, 0), ({1, 2}, 3072)])
def test_b86_one_dropped_block_of_a_giant_one(kept: set[int], hit: int) -> None:
    """B86 (i), (ii): with the draft flag on the full group the hit ends one block early, and needs
    the state there."""
    groups = [full(1536, draft=True), states(1536, 256)]
    with Quilt(groups, retention_interval=None, max_num_batched_tokens=1536) as q:
        prompt = tokens(1, 3 * 1536 + 1)
        q.serve(prompt)
        withdraw(q, prompt, 1, kept)
        q.forget()
        assert q.serve(prompt).external_hit == hit
        q.check_end()


@pytest.mark.parametrize(("length", "hit"), [(3 * 1536 + 65, 4608), (3 * 1536 + 1, 3072)])
def test_b86_a_peek_block_of_its_own_size(length: int, hit: int) -> None:
    """B86 (iii): drafts in a window group of 64 tokens cost a block of 64."""
    groups = [full(1536), states(1536, 256), sliding(64, 128, draft=True)]
    options: dict[str, Any] = {"retention_interval": None, "max_num_batched_tokens": 1536}
    with Quilt(groups, num_blocks=600, **options) as q:
        prompt = tokens(1, length)
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt).external_hit == hit
        q.check_end()


# ---- hits without the drafter's pages ----


@pytest.mark.parametrize(("draft", "hit"), [("best_effort", 640), ("required", 320)])
def test_missing_pages_of_a_drafter_shorten_a_hit_only_if_drafts_are_required(draft: str, hit: int) -> None:
    with drafting(draft=draft) as q:
        prompt = tokens(1, 700)
        first = q.serve(prompt, max_tokens=20)
        withdraw(q, prompt, 2, set(range(5)))
        q.forget()
        record = q.serve(prompt, max_tokens=20)
        assert (record.external_hit, record.output) == (hit, first.output)
        assert q.connector.lookups()[-1].limited_by == q.layout.groups[2].name
        q.check_end()


def test_zeroed_blocks_of_a_drafter_are_never_saved_as_if_they_were_real() -> None:
    """Nor is what was computed after them, nor what a later request computes after a local hit on
    them; but what is computed from the start is."""
    with drafting() as q:
        prompt = tokens(1, 700)
        q.serve(prompt, max_tokens=20)
        withdraw(q, prompt, 2)
        q.forget()
        assert q.serve(prompt, max_tokens=80).external_hit == 640
        assert q.saved_blocks(prompt, 2) == []
        # The engine's own cache now offers those zeros; this request goes on from there.
        longer = q.serve(prompt + tokens(2, 300), max_tokens=5)
        assert longer.local_hit >= 640
        assert hollow_pages(q, 2) == 0
        q.forget()
        q.serve(prompt, max_tokens=5, skip_reading_prefix_cache=True)
        assert q.saved_blocks(prompt, 2) == list(range(10))
        assert hollow_pages(q, 2) == 0
        q.check_end()


def test_a_draft_model_has_no_peek_block() -> None:
    """All that the prompt's last boundary needs is the prefix itself."""
    with drafting() as q:
        prompt = tokens(1, 641)
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt).external_hit == 640
        assert not any(group.draft for group in q.layout.groups)
        q.check_end()


def test_eagle_without_a_flagged_group_makes_all_attention_groups_peek() -> None:
    groups, options = engine_of("eagle, no group flagged")
    with Quilt(groups, **options) as q:
        assert all(group.draft for group in q.layout.groups)
        prompt = tokens(1, 641)
        q.serve(prompt)
        q.forget()
        assert q.serve(prompt).external_hit == 608
        q.check_end()


# ---- rejected drafts ----


@pytest.mark.parametrize("ahead", [False, True], ids=["one step", "two steps in flight"])
@pytest.mark.parametrize("name", ["mtp", "eagle, no group flagged", "draft model", "mtp with a window"])
def test_rejected_drafts_change_no_output_and_are_never_saved(name: str, ahead: bool) -> None:
    groups, options = engine_of(name)
    options["async_scheduling"] = ahead
    with Quilt(groups, num_draft_tokens=4, retain_generated=True, **options) as q:
        prompt = tokens(1, 300)
        first = q.serve(prompt, max_tokens=200)
        steps = q.h.num_steps
        assert 200 / 5 < steps < 200  # some drafts were accepted, some were not
        q.forget()
        # The generated tokens are a prefix now, and every entry loaded is compared.
        second = q.serve(prompt + first.output[:150], max_tokens=50)
        assert second.external_hit >= 300
        assert second.output == first.output[150:]
        q.check_end()


def test_b43_no_page_is_lost_to_a_rejected_draft() -> None:
    """B43: requests at 254 tokens draft four across the end of a page of 256, again and again; the
    books balance after every step (`Quilt.step`), and in the end nothing is missing."""
    groups = [full(256), sliding(256, 300), full(256, drafter="draft_model")]
    with drafting(groups, num_draft_tokens=4, ram_bytes="256KiB", num_blocks=40) as q:
        for number in range(60):
            q.add(tokens(number, 250 + number % 6), max_tokens=16)
            if number % 4 == 3:
                q.run()
        q.run()
        q.check_end()


# ---- drafts beside recurrent states ----

BESIDE_STATES = ["states, draft model", "small states, mtp", "sliding, states, eagle"]
ENGINES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2, two ranks": {"runner": "v2", "num_ranks": 2},
    "v1, two steps in flight": {"async_scheduling": True},
    "v2, two steps in flight": {"runner": "v2", "async_scheduling": True, "max_num_batched_tokens": 128},
}


def states_in_store(q: Quilt, whole: list[int], group: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(tokens, words stored, words of the state after exactly that many tokens) of each state saved."""
    shape, view = q.h.config.groups[group], q.store._built.views[group]
    arena = q.store.arenas[view.arena]
    keys = q.chain(whole).keys(group)
    values = TokenHashes(whole).values
    ranks = q.h.config.num_ranks
    constants = [
        layer_constants(group, layer, rank, (shape.state_bytes or 0) // 8)
        for rank in range(ranks)
        for layer in range(shape.num_layers)
    ]
    for slot in np.flatnonzero((view.slots.state == kernels.RESIDENT) & (view.slots.group == group)):
        block = [i for i, key in enumerate(keys) if key.tobytes() == view.slots.keys[slot].tobytes()]
        if not block:
            continue
        length = (block[0] + 1) * shape.tokens_per_block
        page = os.pread(arena.fd, ranks * q.layout.groups[group].page_bytes, int(slot) * arena.slot_stride)
        wanted = [fingerprints(values[length - 1 : length], words)[0] for words in constants]
        yield length, np.frombuffer(page, dtype=np.uint64), np.concatenate(wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BESIDE_STATES)
def test_b24_a_state_beside_drafts_is_the_one_after_the_tokens_that_count(name: str, engine: str) -> None:
    """B24: running states move from block to block, four more hold what may be rejected, and requests
    come and go in the batch. What is stored is the state after exactly the boundary's tokens, and a
    request that resumes from it says what a cold one says."""
    groups, options = engine_of(name)
    options |= {"retention_interval": None, "retain_generated": True, **ENGINES[engine]}
    with Quilt(groups, num_draft_tokens=4, **options) as q:
        check = HitCheck(q, groups)
        lengths = [300, 257, 190]
        first = [q.add(tokens(n, length), max_tokens=460 - 90 * n) for n, length in enumerate(lengths)]
        q.run()
        assert 460 / 5 < q.h.num_steps < 460  # some drafts were accepted, some were not
        decoded = 0
        for record in first:
            whole = record.prompt + record.output
            for group in (i for i, shape in enumerate(groups) if shape.kind == "recurrent"):
                saved = list(states_in_store(q, whole, group))
                assert saved
                assert [length for length, stored, wanted in saved if (stored != wanted).any()] == []
                decoded += sum(length > len(record.prompt) for length, _, _ in saved)
        assert decoded >= 3  # states that were left while drafts were verified
        q.forget()
        hits = []
        for record in first:
            again = q.serve(record.prompt + record.output[:-30], max_tokens=30)
            assert again.output == record.output[-30:]
            hits.append(again.external_hit - len(record.prompt))
            q.forget()
        assert max(hits) > 0  # beyond the prompt
        assert (check.wrong, check.num_hits) == ([], len(first))
        q.check_end()


def test_b24_a_state_that_stays_among_the_drafts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here the worker does not put a state back into the block that ended."""

    def forgetful(*args: Any) -> tuple[StateStep, Running]:
        step, running = plan_states(*args)
        if step.after is not None and step.after[1] != step.first:
            step = replace(step, after=None)
        return step, running

    monkeypatch.setattr(sim_model, "plan_states", forgetful)
    groups, options = engine_of("small states, mtp")
    with Quilt(groups, num_draft_tokens=4, retention_interval=None, retain_generated=True, **options) as q:
        first = q.serve(tokens(1, 300), max_tokens=200)
        saved = states_in_store(q, first.prompt + first.output, 0)
        wrong = {length for length, stored, wanted in saved if (stored != wanted).any()}
        assert wrong
        end = min(wrong)
        q.forget()
        withdraw(q, first.prompt + first.output, 0, {end // 16 - 1})
        with pytest.raises(WrongKV, match=f"KV of token {end - 1}"):
            q.serve((first.prompt + first.output)[: end + 20], max_tokens=10)


def test_states_move_as_the_engines_workers_move_them() -> None:
    """Blocks of 4, two drafts: the example in the engine's own comment, and what follows from it."""
    shape = states(4, 8, spare_states=2)
    # Three tokens are computed: their state is in column 0.
    step, running = plan_states(shape, None, 0, 3, 0, 0)
    assert (step.before, step.read, step.first, list(step.positions)) == (None, None, 0, [2])
    assert (step.after, running) == (None, (0, 0))
    # Token 3 and two drafts reach into the next block, where all three states go; both are right. The
    # state after four tokens belongs into column 0.
    step, running = plan_states(shape, running, 3, 3, 2, 2)
    assert (step.before, step.read, step.first, list(step.positions)) == ((0, 1), 1, 1, [3, 4, 5])
    assert (step.after, running) == ((1, 0), (1, 2))
    # The state so far is two columns on. Only one draft is right this time: no block ends.
    step, running = plan_states(shape, running, 6, 2, 1, 0)
    assert (step.before, step.read, step.first, list(step.positions)) == (None, 3, 1, [6, 7])
    assert (step.after, running) == (None, (1, 0))
    # The last token of the block: its state is where the next step, and the hash, expect it.
    step, running = plan_states(shape, running, 7, 1, 0, 0)
    assert (step.before, step.read, step.first, step.after, running) == (None, 1, 1, None, (1, 0))
