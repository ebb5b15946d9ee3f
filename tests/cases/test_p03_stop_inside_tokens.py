"""P03: a stop string may begin and end inside tokens."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application, joined

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("include", "text"), [(False, "t"), (True, "the o")])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_is_cut_exactly_at_the_match(include: bool, text: str, stream: bool) -> None:
    """ "the one" is the tokens "the", " ", "one"; "he o" begins in the first and ends in the last."""
    request = {"prompt": "the one", "max_tokens": 30, "temperature": 0, "stop": "he o", "stream": stream}
    async with application() as app:
        reply = await post(app, "/v1/completions", request | {"include_stop_str_in_output": include})
    assert (joined(reply) if stream else reply.json()["choices"][0]["text"]) == text
