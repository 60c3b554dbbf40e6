"""Typed access to a model's config.json, and the engine settings that shape its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvquilt.errors import ConfigError

__all__ = ["Device", "ModelConfig", "Settings", "dtype_bytes"]

Device = Literal["cuda", "cpu"]

_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
}
_ALIASES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_key_value_heads": (
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
}
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def dtype_bytes(dtype: str, option: str = "kv_dtype") -> int:
    """Bytes of one element; ConfigError names the option and what is allowed."""
    name = dtype.removeprefix("torch.")
    if name not in _BYTES:
        raise ConfigError(f"{option}={dtype!r}: allowed are auto, {', '.join(_BYTES)}")
    return _BYTES[name]


@dataclass(frozen=True)
class Settings:
    """How the engine is run.

    tp: tensor-parallel ranks. block_size: the user's, or None for the engine's default.
    dtype: of the model, resolved. kv_dtype: of attention caches, resolved; kv_dtype_given: False if
    that is just the model's. state_dtype: of recurrent states; "auto" is what the model asks for.
    float32_states: the CPU engine keeps states of accelerated layers in float32 on this machine.
    mla_block: block size that the MLA kernels ask for; None for any.
    """

    tp: int
    block_size: int | None
    dtype: str
    kv_dtype: str
    kv_dtype_given: bool
    state_dtype: str
    device: Device
    float32_states: bool
    mla_block: int | None

    @property
    def kernel_tokens(self) -> int:
        """Attention kernels take blocks of multiples of this many tokens."""
        return 32 if self.device == "cpu" else 16

    @property
    def block(self) -> int:
        """Tokens per block of full attention, before page sizes are made to fit."""
        if self.block_size is not None:
            return self.block_size
        return 128 if self.device == "cpu" else 16


class ModelConfig:
    """The text part of a config.json.

    model_type: of the text part, else of the whole, else None. prefix: what the engine puts before
    the names of the text layers.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"a model config must be an object, not {type(config).__name__}")
        outer = config
        if isinstance(config.get("thinker_config"), Mapping):
            config = config["thinker_config"]
        text = next((config[k] for k in _TEXT_KEYS if isinstance(config.get(k), Mapping)), None)
        self.wrapped = text is not None
        self.values: dict[str, Any] = dict(text if text is not None else config)
        self.outer_type = str(outer.get("model_type") or "")
        self.model_type = str(self.values.get("model_type") or self.outer_type)
        architectures = outer.get("architectures") or self.values.get("architectures") or [""]
        self.architecture = str(architectures[0])
        dtype = self._dtype(self.values) or self._dtype(config) or self._dtype(outer)
        self.dtype = (dtype or "float32").removeprefix("torch.")
        self.prefix = "language_model." if self.wrapped else ""

    @staticmethod
    def _dtype(values: Mapping[str, Any]) -> str | None:
        found = values.get("dtype") or values.get("torch_dtype")
        return str(found) if found else None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is missing or null."""
        found = self.values.get(key)
        return default if found is None else found

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low` under `key` or one of its older names."""
        for name in _ALIASES.get(key, (key,)):
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
                raise self.error(name, value, "must be an integer")
            if value < low:
                raise self.error(name, value, f"must be at least {low}")
            return int(value)
        if default is None:
            raise self.error(key, None, "is missing")
        return default

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """A list of at least `length` items, one a layer; None where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) < length:
            raise self.error(key, value, f"must be a list with one entry for each of {length} layers")
        return list(value)

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", self.integer("num_attention_heads"))

    @property
    def head_dim(self) -> int:
        heads = self.integer("num_attention_heads")
        return self.integer("head_dim", 0, low=0) or self.integer("hidden_size") // heads

    def error(self, key: str, value: object, reason: str) -> ConfigError:
        """A ConfigError that names the model type, the key and what was found."""
        found = "" if value is None else f"={value!r}"
        return ConfigError(f"config.json ({self.model_type or 'no model_type'}): {key}{found} {reason}")
