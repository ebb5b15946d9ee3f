"""M10: a tiny temperature is as good as greedy."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


async def test_tiny_temperatures_give_the_greedy_text() -> None:
    request = {"prompt": "hello", "max_tokens": 8, "logit_bias": {"50": -100}}
    async with drawing() as app:
        replies = [
            await post(app, "/v1/completions", request | {"temperature": temperature})
            for temperature in (0, 1e-6, 1e-12, 5e-324)
        ]
    assert {reply.status for reply in replies} == {200}
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
