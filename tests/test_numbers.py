"""Numbers of config.json that no model has are named; those that models do have pass."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.errors import ConfigError
from aserve.models.numbers import check_numbers

REAL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": [96, 128],
    "vocab_size": 100,
    "max_position_embeddings": 131072,
    "head_dim": None,
    "sliding_window": 0,
    "num_experts": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


def test_a_real_config_passes() -> None:
    check_numbers(REAL)
    check_numbers({})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", "four"),
        ("num_attention_heads", [4]),
        ("num_attention_heads", 4.5),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12),
        ("intermediate_size", [96, 0]),
        ("vocab_size", "many" * 50),
        ("max_position_embeddings", -5),
        ("head_dim", 0),
        ("sliding_window", -2),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_theta": "x"}),
        ("text_config", [1]),
        ("text_config", {"hidden_size": 0}),
        ("tie_word_embeddings", "no"),
    ],
)
def test_a_number_that_no_model_has_is_named_in_one_short_line(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be") as caught:
        check_numbers(REAL | {key: value})
    named = next(iter(value)) if isinstance(value, dict) else key
    assert f"{named!r}" in caught.value.message
    assert len(caught.value.message) < 160
