"""L04: each position has its own alternatives, and the greedy token leads them."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


async def test_the_greedy_token_is_the_best_of_its_own_position() -> None:
    request = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    async with drawing() as app:
        reply = await post(app, "/v1/chat/completions", request | {"temperature": 0})
    content = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        best = entry["top_logprobs"][0]
        assert (best["token"], best["logprob"]) == (entry["token"], entry["logprob"])
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    assert len({str(entry["top_logprobs"]) for entry in content}) > 1
