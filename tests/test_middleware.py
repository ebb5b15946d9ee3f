"""The access log."""

from __future__ import annotations

import logging

import pytest

from tests.asgi import get, post
from tests.serving import application

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
