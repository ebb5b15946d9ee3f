"""C01: a template that refuses the messages is 400 with its own words."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
async def test_the_templates_message_reaches_the_client(stream: bool) -> None:
    messages = [{"role": "system", "content": "refuse"}, {"role": "user", "content": "hi"}]
    async with application() as app:
        reply = await post(app, "/v1/chat/completions", {"messages": messages, "stream": stream})
    assert reply.status == 400
    assert "this template takes no such system message" in reply.json()["error"]["message"]
