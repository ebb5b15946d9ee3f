"""D06: two calls with one client id are two requests."""

from __future__ import annotations

import anyio
import pytest

from tests.asgi import Reply, post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_both_callers_get_their_own_answer() -> None:
    replies: dict[str, Reply] = {}
    async with application() as app, anyio.create_task_group() as tasks:

        async def run(prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 50, "temperature": 0, "request_id": "same"}
            replies[prompt] = await post(app, "/v1/completions", body, headers={"x-request-id": "same"})

        tasks.start_soon(run, "ab")
        tasks.start_soon(run, "xyz")
    for prompt, reply in replies.items():
        assert reply.json()["choices"][0]["text"] == (prompt * 50)[:50]
        assert reply.headers["x-request-id"] == "same"
    assert replies["ab"].json()["id"] != replies["xyz"].json()["id"]
