"""P05: nothing decoded after a stop match reaches the client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application, joined

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_transports_end_before_the_match(path: str) -> None:
    request: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "stop": ["three"], "n": 2}
    text = "one, two, three, four, five"
    request |= {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    async with application() as app:
        whole = (await post(app, path, request)).json()["choices"]
        stream = await post(app, path, request | {"stream": True})
    for index, choice in enumerate(whole):
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        assert said == joined(stream, index)
        assert said.endswith("one, two, ")
