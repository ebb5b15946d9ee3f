"""S13: the last text of a choice and its finish reason share a chunk (our choice; see docs/api.md)."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_the_finish_chunk_carries_the_last_text() -> None:
    request = {"prompt": "abcdefghij", "max_tokens": 10, "temperature": 0, "stream": True}
    async with application() as app:
        reply = await post(app, "/v1/completions", request)
    last = reply.events()[-2]["choices"][0]
    assert last["finish_reason"] == "length"
    assert last["text"].endswith("j")
