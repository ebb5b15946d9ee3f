"""What an engine learns of a model before it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aserve.config import EngineConfig
from aserve.loading import find


def test_recommended_sampling_is_used_as_far_as_a_request_could_ask_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stated = {"temperature": 0.6, "top_k": "64", "top_p": 0.0, "min_p": None, "eos_token_id": [7, 9], "max_length": 20}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    model = find(EngineConfig(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True))
    assert model.sampling == {"temperature": 0.6}
    assert model.end_token_ids == (7, 9)
    assert [record.getMessage().split(" must")[0] for record in caplog.records] == [
        "generation_config.json: top_p",
        "generation_config.json: top_k",
    ]
