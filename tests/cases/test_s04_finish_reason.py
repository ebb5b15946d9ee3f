"""S04: an end token is finish reason stop, a cap is length, each exactly once."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application, joined, reasons

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (3, "length"), (4, "stop"), (50, "stop")])
@pytest.mark.parametrize("end", ["<eos>", "<end>"])
async def test_each_choice_ends_with_one_reason(max_tokens: int, reason: str, end: str) -> None:
    request = {"prompt": f"abc{end}", "max_tokens": max_tokens, "temperature": 0}
    async with application() as app:
        whole = (await post(app, "/v1/completions", request)).json()["choices"][0]
        stream = await post(app, "/v1/completions", request | {"stream": True})
    assert whole["finish_reason"] == reason
    assert reasons(stream) == [(0, reason)]
    assert joined(stream) == whole["text"] == "abc"[:max_tokens]
