"""The access log, and the log of bodies."""

from __future__ import annotations

import logging

import anyio
import pytest

from routes.app import create_app
from tests.asgi import Reply, get, post
from tests.serving import application, serving

pytestmark = pytest.mark.anyio


async def test_a_line_names_tokens_times_and_the_clients_label(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aserve.access")
    async with application() as app:
        body = {"prompt": "abc", "max_tokens": 5, "stream": True}
        await post(app, "/v1/completions", body, headers={"x-request-id": "mine", "authorization": "Bearer secret"})
        await post(app, "/v1/completions", {"prompt": ""})
        await get(app, "/health")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("POST /v1/completions 200 prompt=3 completion=5 ttft=0.")
    assert "total=0." in first
    assert first.endswith("id=mine")
    assert second.startswith("POST /v1/completions 400 total=0.")
    assert "secret" not in caplog.text


async def test_how_a_request_ended_is_named_unless_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aserve.access")
    async with application() as app:
        body = {"prompt": "abc", "max_tokens": 2000, "temperature": 0, "stream": True}
        await post(app, "/v1/completions", body, disconnect_at=2)
        await post(app, "/v1/completions", body | {"timeout": 1e-9})
    assert "disconnected" in caplog.records[0].getMessage()
    assert "deadline_exceeded" in caplog.records[1].getMessage()


async def test_a_key_may_have_only_so_many_requests_in_flight() -> None:
    async with serving() as engine:
        app = create_app(engine, api_keys=["mine", "yours"], max_requests_per_key=1)
        body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "stream": True}
        statuses: list[int] = []

        async def others() -> None:
            for key in ("mine", "yours"):
                reply = await post(app, "/v1/completions", body, headers={"authorization": f"Bearer {key}"})
                statuses.append(reply.status)
                if reply.status == 429:
                    assert reply.json()["error"]["code"] == "too_many_requests"
                    assert "retry-after" in reply.headers

        async with anyio.create_task_group() as tasks:

            def on_message(reply: Reply) -> None:
                if len(reply.messages) == 1:
                    tasks.start_soon(others)

            mine = {"authorization": "Bearer mine"}
            await post(app, "/v1/completions", {**body, "max_tokens": 500}, headers=mine, on_message=on_message)
        assert statuses == [429, 200]
        assert (await post(app, "/v1/completions", body, headers=mine)).status == 200


async def test_bodies_are_logged_only_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="aserve.requests")
    async with serving() as engine:
        for log_requests in (False, True):
            app = create_app(engine, log_requests=log_requests)
            body = {"prompt": "secret\n", "max_tokens": 1, "user": "u" * 9000}
            await post(app, "/v1/completions", body, headers={"x-request-id": "mine"})
    [line] = [record.getMessage() for record in caplog.records if record.name == "aserve.requests"]
    assert line.startswith("id=mine ")
    assert "secret" in line
    assert "\n" not in line
    assert len(line) < 5000
