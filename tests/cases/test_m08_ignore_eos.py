"""M08: ignore_eos holds against the end ids of the generation config."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import END, EOS, drawing

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("end", [EOS, END])
async def test_generation_runs_to_the_cap(end: int) -> None:
    request = {"prompt": "hello", "ignore_eos": True, "max_tokens": 9, "temperature": 0, "logit_bias": {str(end): 100}}
    async with drawing() as app:
        body = (await post(app, "/v1/completions", request)).json()
        stopped = (await post(app, "/v1/completions", request | {"stop_token_ids": [end]})).json()
    assert body["usage"]["completion_tokens"] == 9
    assert body["choices"][0]["finish_reason"] == "length"
    assert stopped["usage"]["completion_tokens"] == 1
    assert stopped["choices"][0]["finish_reason"] == "stop"
