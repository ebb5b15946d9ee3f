"""L05: exactly as many alternatives as asked for; above the limit is 400."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("k", [0, 1, 5, 20])
async def test_there_are_exactly_k(k: int) -> None:
    request = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": k, "max_tokens": 3}
    async with drawing() as app:
        reply = await post(app, "/v1/chat/completions", request)
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [k] * len(content)


@pytest.mark.parametrize("k", [21, 10**6, -1])
async def test_above_the_limit_is_400(k: int) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": k}
    async with drawing() as app:
        for path, body, param in (
            ("/v1/chat/completions", chat, "top_logprobs"),
            ("/v1/completions", {"prompt": "a", "logprobs": k}, "logprobs"),
        ):
            reply = await post(app, path, body)
            assert reply.status == 400
            assert reply.json()["error"]["param"] == param
