"""S05: with n choices each index gets one finish chunk and one only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application, joined, reasons

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
async def test_each_index_finishes_once(path: str, n: int) -> None:
    request: dict[str, Any] = {"n": n, "max_tokens": 30, "temperature": 1, "seed": 1, "stream": True, "stop": ["a"]}
    if path == "/v1/completions":
        request["prompt"] = "hello"
    else:
        request["messages"] = [{"role": "user", "content": "hello"}]
    async with application() as app:
        reply = await post(app, path, request)
    assert sorted(index for index, _ in reasons(reply)) == list(range(n))
    assert len({len(joined(reply, index)) for index in range(n)}) > 1 or n == 1
