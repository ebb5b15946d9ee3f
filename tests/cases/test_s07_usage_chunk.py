"""S07: a usage chunk goes only to a client that asked for one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application, reasons

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_chunk_is_without_choices_unless_asked_for(path: str, options: Any) -> None:
    async with application() as app:
        reply = await post(app, path, body(path) | {"stream_options": options})
    for event in reply.events()[:-1]:
        assert len(event["choices"]) == 1
        assert "usage" not in event


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_usage_chunk_is_the_last_before_done(path: str) -> None:
    async with application() as app:
        reply = await post(app, path, body(path) | {"stream_options": {"include_usage": True}, "n": 2})
    *chunks, usage, done = reply.events()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 10
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len(reasons(reply)) == 2


def body(path: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "stream": True}
    if path == "/v1/completions":
        return fields | {"prompt": "hello"}
    return fields | {"messages": [{"role": "user", "content": "hello"}]}
