"""S06: the index of a chunk names its choice."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_the_index_is_0_throughout_for_one_choice() -> None:
    request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "temperature": 0, "stream": True}
    async with application() as app:
        reply = await post(app, "/v1/chat/completions", request)
    assert {choice["index"] for event in reply.events()[:-1] for choice in event["choices"]} == {0}
