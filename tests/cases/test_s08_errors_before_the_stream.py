"""S08: what can be refused is refused before headers go out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_prompt_over_the_context_is_400_although_a_stream_was_asked_for(path: str) -> None:
    text = "x" * 300
    body: dict[str, Any] = {"stream": True, "prompt": text, "messages": [{"role": "user", "content": text}]}
    async with application(max_model_len=256) as app:
        reply = await post(app, path, body)
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["code"] == "context_length_exceeded"
