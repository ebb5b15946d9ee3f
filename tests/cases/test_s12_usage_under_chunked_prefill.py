"""S12: a partial prefill emits nothing, and counts are right from the first chunk."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_running_usage_is_right_while_a_long_prompt_is_prefilled() -> None:
    request = {
        "prompt": "the prompt is several chunks long, " * 8,
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with application(max_num_batched_tokens=32) as app:
        reply = await post(app, "/v1/completions", request)
        whole = (await post(app, "/v1/completions", request | {"stream": False})).json()
    *chunks, usage, _ = reply.events()
    assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] > 4 * 32
    for chunk in chunks:
        assert chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert chunk["choices"][0]["text"] or chunk["choices"][0]["finish_reason"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 3
    assert chunks[0]["usage"]["completion_tokens"] >= 1
