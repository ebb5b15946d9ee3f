"""C05: null content beside tool calls is accepted."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_a_history_with_a_tool_call_is_accepted() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    async with application() as app:
        reply = await post(app, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert reply.status == 200
