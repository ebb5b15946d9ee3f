"""P01: no part of a stop string leaks before its last token."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application, joined, reasons

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stop", ["cde", "bcdefg", ["zzz", "efgh"]])
async def test_a_stop_string_of_several_tokens_never_shows(stop: str | list[str]) -> None:
    request = {"prompt": "abcdefghij", "max_tokens": 30, "temperature": 0, "stop": stop}
    async with application() as app:
        whole = (await post(app, "/v1/completions", request)).json()["choices"][0]
        stream = await post(app, "/v1/completions", request | {"stream": True})
    first = stop if isinstance(stop, str) else stop[1]
    assert whole["text"] == joined(stream) == "abcdefghij"[: "abcdefghij".index(first)]
    assert whole["stop_reason"] == first
    assert reasons(stream) == [(0, "stop")]


async def test_a_prefix_that_does_not_become_the_stop_string_is_released() -> None:
    request = {"prompt": "abcabd", "max_tokens": 6, "temperature": 0, "stop": "abd!"}
    async with application() as app:
        stream = await post(app, "/v1/completions", request | {"stream": True})
    assert joined(stream) == "abcabd"
    assert reasons(stream) == [(0, "length")]
