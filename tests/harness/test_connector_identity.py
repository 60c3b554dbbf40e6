"""What the engine's hashes tell apart, the connector never mixes: media, adapters, salts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from harness.helpers import LAYOUTS
from kvquilt.store import Chain, Want
from kvquilt.testing.scheduler_harness import SchedulerHarness

IMAGE_AT, IMAGE_TOKENS = 40, 30
TOKENS = [7 * i % 997 for i in range(200)]
BEFORE_IMAGE = 32  # the last lattice boundary before the image


@pytest.fixture
def harness() -> Iterator[SchedulerHarness]:
    with SchedulerHarness(LAYOUTS["full 32 + sliding 16"], num_blocks=200) as made:
        made.add([1, 2, 3], max_tokens=1)
        made.run_until_idle()  # the workers attach the pools
        yield made


def request(
    harness: SchedulerHarness,
    name: str,
    *,
    image: str | None = None,
    adapter: int | None = None,
    salt: str = "",
) -> Any:
    """A request of the engine's own class, hashed by the engine's own hasher."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    position = PlaceholderRange(offset=IMAGE_AT, length=IMAGE_TOKENS)
    features = image and [MultiModalFeatureSpec(None, "image", image, position)]
    lora = adapter and LoRARequest(f"adapter-{adapter}", adapter, f"/adapters/{adapter}")
    return Request(
        name,
        list(TOKENS),
        SamplingParams(max_tokens=1),
        None,
        mm_features=features or None,
        lora_request=lora or None,
        cache_salt=salt or None,
        block_hasher=harness.engine.hasher,
    )


def keep(harness: SchedulerHarness, kept: Any) -> None:
    """Put all pages of a request into the store."""
    side = harness.connector.scheduler_side
    chain = Chain(side.layout, kept.block_hashes)
    wants = [
        Want(chain, i, np.arange(chain.num_blocks(i), dtype=np.int64)) for i in range(len(side.layout.groups))
    ]
    ticket = side.store.reserve("keeper", wants)
    assert ticket.ticket_id is not None
    side.store.commit(ticket.ticket_id, "keeper")


def hit(harness: SchedulerHarness, asked: Any) -> int:
    """What the connector offers beyond nothing."""
    tokens, _ = harness.connector.get_num_new_matched_tokens(asked, 0)
    harness.connector.request_finished_all_groups(asked, ([], []))
    return int(tokens or 0)


def test_two_images_at_equal_placeholders_share_only_what_precedes_them(harness: SchedulerHarness) -> None:
    """Case B22, invariant 42."""
    keep(harness, request(harness, "kept", image="cat"))
    assert hit(harness, request(harness, "same", image="cat")) == 192
    assert hit(harness, request(harness, "other", image="dog")) == BEFORE_IMAGE
    assert hit(harness, request(harness, "none")) == BEFORE_IMAGE


@pytest.mark.parametrize("by", ["adapter", "salt"])
def test_adapters_and_salts_never_meet(harness: SchedulerHarness, by: str) -> None:
    """Case B22, invariant 42."""
    kinds: dict[str, list[dict[str, Any]]] = {
        "adapter": [{"adapter": 1}, {"adapter": 2}],
        "salt": [{"salt": "x"}, {"salt": "y"}],
    }
    one, other = kinds[by]
    keep(harness, request(harness, "kept", **one))
    assert hit(harness, request(harness, "same", **one)) == 192
    assert hit(harness, request(harness, "other", **other)) == 0
    assert hit(harness, request(harness, "plain")) == 0


def test_a_prompt_of_embeddings_alone_gets_nothing(harness: SchedulerHarness) -> None:
    """Case B22: no token ids, no hashes; the answer is 0, never negative."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    keep(harness, request(harness, "kept"))
    assert hit(harness, request(harness, "same")) == 192
    import torch

    embeddings = Request(
        "embeddings", None, SamplingParams(max_tokens=1), None, prompt_embeds=torch.zeros(200, 8)
    )
    assert hit(harness, embeddings) == 0
