"""P06: an empty stop string is refused with 400."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stop", ["", [""], ["", ";"]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_empty_stop_string_is_400(stop: str | list[str], path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stop": stop}
    async with application() as app:
        reply = await post(app, path, body)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "stop"


async def test_an_empty_list_is_no_stop_string() -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", {"prompt": "a", "stop": [], "max_tokens": 3})
    assert reply.status == 200
