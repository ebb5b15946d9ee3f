"""Whether config.json holds numbers that a model can have, before anything is built from them.

files.py asks, for every model, whoever's code runs it. What the numbers mean together, the families say. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aserve.errors import ConfigError

_LARGEST = 1 << 31
_SIZES = (  # from 1 on
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "word_embed_proj_dim",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
    "original_max_position_embeddings",
)
_COUNTS = (  # from 0 on
    "sliding_window",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_LAYERS = ("num_hidden_layers", "n_layer")
_MOST_LAYERS = 10_000
_POSITIVE = ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_PER_LAYER = ("intermediate_size", "num_experts", "rope_theta", "sliding_window")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")
_SECTIONS = ("text_config", "rope_scaling", "rope_parameters")


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first number of config.json, or of a section of it, that no model has."""
    for key in (*_SIZES, *_COUNTS):
        least, most = int(key in _SIZES), _MOST_LAYERS if key in _LAYERS else _LARGEST
        for value in _each(config, key):
            if type(value) is not int or not least <= value <= most:
                raise _wrong(key, value, f"a whole number from {least} to {most}")
    for key in (*_POSITIVE, *_EPSILONS):
        for value in _each(config, key):
            if type(value) not in (int, float) or not 0 <= value < math.inf or (key in _POSITIVE and value == 0):
                raise _wrong(key, value, "a number from 0 on" if key in _EPSILONS else "a number above 0")
    for key in _FLAGS:
        if not isinstance(value := config.get(key), bool | None):
            raise _wrong(key, value, "true or false")
    for key in _SECTIONS:
        if (section := config.get(key)) is not None and not isinstance(section, dict):
            raise _wrong(key, section, "an object")
        if section:
            check_numbers(section)
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise _wrong("num_key_value_heads", shared, f"a divisor of the {heads} attention heads")


def _each(config: Mapping[str, Any], key: str) -> list[Any]:
    """The values of a key: none, one, or for some keys one per layer."""
    value = config.get(key)
    if isinstance(value, list) and key in _PER_LAYER:
        return value
    return [] if value is None else [value]


def _wrong(key: str, value: Any, expected: str) -> ConfigError:
    shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
    return ConfigError(f"config.json has {shown} for {key!r}, which must be {expected}", param="model")
