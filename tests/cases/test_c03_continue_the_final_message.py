"""C03: continuing the last message gives the continuation; echo gives that message first."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application, joined

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("echo", [False, True])
async def test_only_echo_returns_the_prefix(echo: bool) -> None:
    request = {
        "messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two"}],
        "continue_final_message": True,
        "echo": echo,
        "max_tokens": 4,
        "temperature": 0,
    }
    async with application() as app:
        whole = (await post(app, "/v1/chat/completions", request)).json()["choices"][0]["message"]["content"]
        stream = await post(app, "/v1/chat/completions", request | {"stream": True})
        text = (await post(app, "/tokenize", {"messages": request["messages"], "add_generation_prompt": False})).json()
        both = await post(app, "/v1/chat/completions", request | {"add_generation_prompt": True})
    assert whole == joined(stream) == ("one, two" if echo else "") + "user"  # the model repeats the prompt
    assert text["count"] > 0
    assert both.status == 400
