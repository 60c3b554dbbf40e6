"""The page oracle: what it reads, and that it notices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from kvquilt.testing import PageRecorder, page_digest, page_digests, zero_pages

torch = pytest.importorskip("torch")

BLOCKS = 6


def config(*groups: list[str]) -> Any:
    return SimpleNamespace(
        num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=names) for names in groups]
    )


def caches() -> dict[str, Any]:
    """Two groups of different page shapes over one storage, as the engine has them."""
    storage = torch.arange(BLOCKS * 64, dtype=torch.float32)
    return {
        "wide": storage.view(BLOCKS, 2, 4, 8),
        "tall": storage.view(BLOCKS, 1, 4, 16),
    }


def test_digest_is_of_the_bytes_of_the_block() -> None:
    kv_caches = caches()
    expected = xxhash.xxh3_128(kv_caches["wide"][3].numpy().tobytes()).hexdigest()
    assert page_digest(kv_caches, config(["wide"]), 0, 3) == expected


def test_digest_covers_every_layer_in_order() -> None:
    kv_caches = {"a": torch.ones(BLOCKS, 4), "b": torch.zeros(BLOCKS, 4)}
    forward = page_digest(kv_caches, config(["a", "b"]), 0, 1)
    assert forward != page_digest(kv_caches, config(["b", "a"]), 0, 1)
    kv_caches["b"][1, 3] = 5.0
    assert forward != page_digest(kv_caches, config(["a", "b"]), 0, 1)


def test_batch_equals_one_by_one_across_batches() -> None:
    kv_caches = caches()
    blocks = [1, 5, 1, 2] * 100
    single = [page_digest(kv_caches, config(["tall"]), 0, block) for block in blocks]
    assert page_digests(kv_caches, config(["tall"]), 0, blocks) == single
    assert len(set(single)) == 3
    assert page_digests(kv_caches, config(["tall"]), 0, []) == []


def test_kernel_blocks_are_joined_into_engine_blocks() -> None:
    whole = torch.arange(BLOCKS * 8, dtype=torch.float32).view(BLOCKS, 8)
    split = {"a": whole.view(BLOCKS * 2, 4)}
    assert page_digest(split, config(["a"]), 0, 4) == page_digest({"a": whole}, config(["a"]), 0, 4)
    with pytest.raises(ValueError, match="multiple of 6 blocks"):
        page_digest({"a": torch.zeros(BLOCKS + 1, 4)}, config(["a"]), 0, 0)


def test_strided_views_and_lists_of_tensors_are_read_logically() -> None:
    padded = torch.arange(BLOCKS * 10, dtype=torch.int8).view(BLOCKS, 10)[:, :7]
    parts = [padded[:, :3], padded[:, 3:]]
    digest = xxhash.xxh3_128(padded[2].contiguous().numpy().tobytes()).hexdigest()
    assert page_digest({"a": padded}, config(["a"]), 0, 2) == digest
    assert page_digest({"a": parts}, config(["a"]), 0, 2) == digest


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_block_outside_the_pool_is_refused(block: int) -> None:
    with pytest.raises(IndexError, match="outside the pool of 6"):
        page_digest(caches(), config(["wide"]), 0, block)


def test_zero_pages_touches_only_its_blocks() -> None:
    kv_caches = caches()
    before = page_digests(kv_caches, config(["wide"]), 0, range(BLOCKS))
    zero_pages(kv_caches, config(["wide"]), 0, [2, 4])
    after = page_digests(kv_caches, config(["wide"]), 0, range(BLOCKS))
    assert [i for i in range(BLOCKS) if before[i] != after[i]] == [2, 4]
    assert not kv_caches["wide"][[2, 4]].any()


def test_recorder_sees_a_page_that_came_back_elsewhere_unchanged() -> None:
    kv_caches = caches()
    recorder = PageRecorder(kv_caches, config(["wide"], ["tall"]))
    recorder.on_saved([(0, 1, b"k1"), (1, 2, b"k1")])
    kv_caches["wide"][4] = kv_caches["wide"][1].clone()
    kv_caches["tall"][5] = kv_caches["tall"][2].clone()
    recorder.on_loaded([(0, 4, b"k1"), (1, 5, b"k1")])
    report = recorder.report()
    assert (report.recorded, report.compared, report.equal, report.unknown) == (2, 2, 2, 0)
    assert report.compared_by_group == {0: 1, 1: 1}
    assert report.covers(2, [0, 1])
    assert not report.covers(3, [0, 1])
    assert not report.covers(1, [0, 1, 2])


def test_recorder_sees_one_wrong_bit_and_the_wrong_block() -> None:
    kv_caches = caches()
    recorder = PageRecorder(kv_caches, config(["wide"]))
    recorder.on_saved([(0, 1, b"k1"), (0, 2, b"k2")])
    kv_caches["wide"][1].view(torch.int32)[0, 0, 0] ^= 1
    recorder.on_loaded([(0, 1, b"k1"), (0, 1, b"k2")])
    report = recorder.report()
    assert (report.compared, report.equal) == (2, 0)
    assert report.mismatches == ((0, 1, b"k1".hex()), (0, 1, b"k2".hex()))


def test_recorder_counts_loads_that_nobody_saved() -> None:
    recorder = PageRecorder(caches(), config(["wide"]))
    recorder.on_loaded([(0, 1, b"k1")])
    assert (recorder.report().compared, recorder.report().unknown) == (0, 1)


def test_recorder_forgets_what_a_later_save_replaced() -> None:
    kv_caches = caches()
    recorder = PageRecorder(kv_caches, config(["wide"]))
    recorder.on_saved([(0, 1, b"k")])
    recorder.on_saved([(0, 2, b"k")])
    recorder.on_loaded([(0, 2, b"k")])
    assert recorder.report().equal == 1


def test_damage_before_the_comparison_is_seen() -> None:
    kv_caches, layout = caches(), config(["wide"])
    recorder = PageRecorder(
        kv_caches,
        layout,
        before_compare=lambda pages: zero_pages(kv_caches, layout, 0, [block for _, block, _ in pages]),
    )
    recorder.on_saved([(0, 1, b"k")])
    recorder.on_loaded([(0, 1, b"k")])
    assert (recorder.report().compared, recorder.report().equal) == (1, 0)


def page_list(groups: list[int], blocks: list[int], keys: bytes) -> Any:
    return SimpleNamespace(
        group=np.array(groups, np.int32).tobytes(), block=np.array(blocks, np.int64).tobytes(), keys=keys
    )


def test_recorder_observes_page_lists() -> None:
    recorder = PageRecorder(caches(), config(["wide"], ["tall"]))
    keys = b"a" * 32 + b"b" * 32
    recorder.saved(page_list([0, 1], [1, 2], keys))
    recorder.loaded(page_list([0, 1], [1, 2], keys))
    recorder.loaded(page_list([], [], b""))
    assert recorder.report().equal == 2
    with pytest.raises(ValueError, match="does the connector send keys"):
        recorder.saved(page_list([0, 1], [1, 2], b""))


def test_digests_outlive_their_recorder() -> None:
    kv_caches = caches()
    first = PageRecorder(kv_caches, config(["wide"], ["tall"]))
    first.on_saved([(0, 1, b"one"), (1, 2, b"two")])
    second = PageRecorder(kv_caches, config(["wide"], ["tall"]))
    second.recall(first.digests())
    kv_caches["tall"][2, 0, 0, 0] += 1
    second.on_loaded([(0, 1, b"one"), (1, 2, b"two"), (1, 1, b"one")])
    report = second.report()
    assert (report.recorded, report.compared, report.equal, report.unknown) == (2, 2, 1, 1)
