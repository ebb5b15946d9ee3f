"""M07: no end id of any kind comes before min_tokens."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import END, EOS, drawing

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("ends", [(EOS,), (END,), (EOS, END)])
async def test_a_forced_end_waits_for_the_minimum(ends: tuple[int, ...]) -> None:
    bias = {str(end): 100 for end in ends}
    request = {"prompt": "a prompt that is longer than the minimum", "min_tokens": 4, "max_tokens": 20}
    async with drawing() as app:
        reply = await post(app, "/v1/completions", request | {"logit_bias": bias, "temperature": 0})
    body = reply.json()
    assert body["usage"]["completion_tokens"] == 5  # four others, then the end
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_the_users_own_stop_ids_wait_too() -> None:
    request = {"prompt": "hello", "min_tokens": 4, "max_tokens": 20, "temperature": 0}
    async with drawing() as app:
        reply = await post(app, "/v1/completions", request | {"logit_bias": {"50": 100}, "stop_token_ids": [50]})
    body = reply.json()
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["stop_reason"] == 50
