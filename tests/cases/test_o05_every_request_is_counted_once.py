"""O05: aborted and finished requests are each counted under one outcome."""

from __future__ import annotations

import pytest

from routes.app import create_app
from tests.asgi import get, post
from tests.serving import idle, serving

pytestmark = pytest.mark.anyio


async def test_five_aborted_and_five_finished() -> None:
    async with serving() as engine:
        app = create_app(engine)
        for _ in range(5):
            long = {"prompt": "ab", "max_tokens": 2000, "temperature": 0, "stream": True}
            await post(app, "/v1/completions", long, disconnect_at=2)
            await post(app, "/v1/completions", {"prompt": "ab", "max_tokens": 3, "temperature": 0})
        await idle(engine)
        metrics = (await get(app, "/metrics")).body.decode()
        assert 'aserve_requests_total{outcome="cancelled"} 5.0' in metrics
        assert 'aserve_requests_total{outcome="length"} 5.0' in metrics
        assert 'aserve_requests_total{outcome="stop"} 0.0' in metrics
        assert "aserve_request_seconds_count 10.0" in metrics
