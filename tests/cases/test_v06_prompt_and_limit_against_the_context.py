"""V06: what does not fit the context is 400 with both lengths; exactly full works."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_and_limit_that_do_not_fit_are_400(stream: bool) -> None:
    async with application(max_model_len=64) as app:
        long = await post(app, "/v1/completions", {"prompt": "x" * 70, "stream": stream})
        both = await post(app, "/v1/completions", {"prompt": "x" * 60, "max_tokens": 5, "stream": stream})
        full = await post(app, "/v1/completions", {"prompt": "x" * 60, "max_tokens": 4, "temperature": 0})
        free = await post(app, "/v1/completions", {"prompt": "x" * 60, "temperature": 0})
    for reply, numbers in ((long, ("70", "64")), (both, ("60", "5", "64"))):
        assert reply.status == 400
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in numbers)
        assert "-" not in error["message"]
    assert full.json()["usage"]["completion_tokens"] == free.json()["usage"]["completion_tokens"] == 4
    assert free.json()["choices"][0]["finish_reason"] == "length"
