"""S03: characters that split lines for some readers are escaped on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application, joined

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_line_of_a_stream_is_one_that_a_splitlines_reader_can_parse(path: str) -> None:
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\re\nf"
    request: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "stream": True}
    if path == "/v1/completions":
        request["prompt"] = text
    else:
        request["messages"] = [{"role": "user", "content": text}]
    async with application() as app:
        reply = await post(app, path, request)
    assert text in joined(reply)
    for line in reply.body.decode().splitlines():
        assert line == "" or line.startswith(("id: ", "data: "))
        if line.startswith("data: {"):
            json.loads(line.removeprefix("data: "))
