"""A tiny EAGLE head, as its checkpoints are: one layer and a projection, embedding and head the target's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvquilt.testing.specs.base import base_config, rope

__all__ = ["write_eagle_head"]


def write_eagle_head(folder: Path, hidden_size: int, head_dim: int, seed: int = 0) -> Path:
    """Write one for a target with this hidden size into `folder`, with one KV head; returns `folder`."""
    num_heads, intermediate = 2, 2 * hidden_size
    config = base_config(
        "LlamaForCausalLM",
        "llama",
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        head_dim=head_dim,
        hidden_act="silu",
        rope_parameters=rope(),
        tie_word_embeddings=True,
    )
    shapes = {
        "fc": (hidden_size, 2 * hidden_size),
        "layers.0.self_attn.q_proj": (num_heads * head_dim, hidden_size),
        "layers.0.self_attn.k_proj": (head_dim, hidden_size),
        "layers.0.self_attn.v_proj": (head_dim, hidden_size),
        "layers.0.self_attn.o_proj": (hidden_size, num_heads * head_dim),
        "layers.0.mlp.gate_proj": (intermediate, hidden_size),
        "layers.0.mlp.up_proj": (intermediate, hidden_size),
        "layers.0.mlp.down_proj": (hidden_size, intermediate),
    }
    draw = np.random.default_rng(seed)
    tensors = {
        f"{name}.weight": draw.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = np.ones(hidden_size, dtype=np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
