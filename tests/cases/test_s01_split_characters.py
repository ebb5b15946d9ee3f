"""S01: a character spread over several tokens reaches the client whole."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application, joined

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("prompt", ["\u4e2d\u6587", "\u5b57 \U0001f9ff\U0001f1f3\U0001f1f1 e\u0301", "a\u4e2d" * 20])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7, 50])
async def test_no_delta_holds_part_of_a_character(prompt: str, max_tokens: int) -> None:
    request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    async with application() as app:
        whole = (await post(app, "/v1/completions", request)).json()["choices"][0]["text"]
        stream = await post(app, "/v1/completions", request | {"stream": True})
    assert joined(stream) == whole
    texts = [choice["text"] for event in stream.events()[:-1] for choice in event["choices"]]
    for text in texts[:-1]:
        assert "\ufffd" not in text
