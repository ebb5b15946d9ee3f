"""V01: an empty prompt is 400, and the server lives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import get, post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_prompt_is_400(prompt: Any, stream: bool) -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", {"prompt": prompt, "stream": stream})
        assert reply.status == 400
        assert reply.json()["error"]["param"] == "prompt"
        assert (await post(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200
        assert (await get(app, "/health")).status == 200
