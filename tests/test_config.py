"""An engine's options: what is wrong with one is said before anything is loaded, by the name of its flag."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

import pytest

from aserve.config import EngineConfig
from aserve.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 0),
        ("block_size", 12),
        ("gpu_memory_utilization", 1.5),
        ("swap_space", math.nan),
        ("max_queue", 0),
        ("max_n", 0),
        ("step_timeout", 0.0),
        ("step_timeout", math.nan),
    ],
)
def test_a_value_out_of_range_names_its_option(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} ") as caught:
        EngineConfig(**{option: value})
    assert caught.value.param == option


def test_every_choice_is_one_of_those_there_are() -> None:
    hints = typing.get_type_hints(EngineConfig)
    options = [
        field.name for field in dataclasses.fields(EngineConfig) if typing.get_origin(hints[field.name]) is Literal
    ]
    assert len(options) > 3
    for option in options:
        wrong: dict[str, Any] = {option: "fp8"}
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} must be one of auto, .*'fp8'"):
            EngineConfig(**wrong)
        for value in typing.get_args(hints[option]):
            EngineConfig(**{option: value})
