"""What a load has just brought is not offered for saving again; anything else still is."""

from __future__ import annotations

import pytest

from harness.connector_support import LAYOUTS, Quilt, tokens

PROMPT_TOKENS = 384  # whole blocks of every group: nothing is saved beyond the hit


def skipped_as_present(quilt: Quilt) -> float:
    return quilt.side.meter.totals["saves_skipped"].get("present", 0)


def saved_pages(quilt: Quilt) -> float:
    return sum(quilt.side.meter.totals["saved_pages"].values())


@pytest.mark.parametrize("name", ["full 32 + sliding 16", "two windows, full last"])
def test_loaded_blocks_are_not_looked_at_again_and_new_ones_are_saved(name: str) -> None:
    with Quilt(LAYOUTS[name]) as quilt:
        quilt.start()
        prompt = tokens(1, PROMPT_TOKENS)
        quilt.serve(prompt)
        quilt.forget()
        present, saved = skipped_as_present(quilt), saved_pages(quilt)
        longer = quilt.serve(prompt + tokens(2, PROMPT_TOKENS))
        assert longer.external_hit > 0
        assert skipped_as_present(quilt) == present
        assert saved_pages(quilt) > saved
        quilt.forget()
        again = quilt.serve(prompt + tokens(2, PROMPT_TOKENS))
        assert again.external_hit == quilt.layout.max_boundary(2 * PROMPT_TOKENS)
        quilt.check_end()


def test_after_a_failed_load_every_block_is_looked_at() -> None:
    with Quilt(LAYOUTS["full 32 + sliding 16"]) as quilt:
        quilt.start()
        prompt = tokens(1, PROMPT_TOKENS)
        quilt.serve(prompt)
        quilt.forget()
        present = skipped_as_present(quilt)
        quilt.fault_at_next("fail")
        quilt.serve(prompt)
        assert skipped_as_present(quilt) > present
        quilt.check_end()
