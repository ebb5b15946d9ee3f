"""The operator's live view: the page needs nothing from outside, its numbers are the engine's and stop with it."""

from __future__ import annotations

import json
import re

import anyio
import pytest

from routes.app import create_app
from routes.dashboard import Dashboard
from tests.asgi import Reply, get, post
from tests.serving import application, serving

pytestmark = pytest.mark.anyio


async def test_pages_are_whole_in_themselves_and_need_no_key() -> None:
    async with application(api_keys=("k",)) as app:
        for path in ("/dashboard", "/docs"):
            reply = await get(app, path)
            assert reply.status == 200
            assert reply.headers["content-type"].startswith("text/html")
            assert not re.search(r"(?:src|href)=[\"']?(?:https?:|//)", reply.body.decode())
        assert (await get(app, "/v1/stats/stream")).status == 401


async def test_the_docs_page_names_every_route_and_field() -> None:
    async with application() as app:
        page = (await get(app, "/docs")).body.decode()
        document = (await get(app, "/openapi.json")).json()
    assert [path for path in document["paths"] if f"{path}</code>" not in page] == []
    assert "<code>temperature</code><td>number" in page


async def test_the_numbers_are_the_engines() -> None:
    async with serving() as engine:
        app = create_app(engine)
        await post(app, "/v1/completions", {"prompt": "ab", "max_tokens": 5})
        numbers = Dashboard(engine, interval=0)._numbers()
        first = json.loads((await anext(numbers))["data"])
        await post(app, "/v1/completions", {"prompt": "ab", "max_tokens": 5})
        second = json.loads((await anext(numbers))["data"])
        await engine.stop()
        assert [event async for event in numbers] == []
    assert first["model"] == "fake"
    assert first["outcomes"]["length"] == 1
    assert first["tokens_per_second"] == 0
    assert second["output_tokens"] == 10
    assert second["tokens_per_second"] > 0
    assert {"running", "waiting", "blocks", "blocks_used", "preemptions"} <= set(first)


async def test_the_stream_is_server_sent_events_and_ends_with_its_client() -> None:
    async with application() as app:
        with anyio.fail_after(20):
            reply: Reply = await get(app, "/v1/stats/stream", disconnect_at=2)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
    number, data = reply.bodies[0].decode().splitlines()[:2]
    assert number == "id: 1"
    assert json.loads(data.removeprefix("data: "))["running"] == 0
