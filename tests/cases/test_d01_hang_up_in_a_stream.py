"""D01: a client that hangs up in a stream frees its slot and blocks."""

from __future__ import annotations

import pytest

from routes.app import create_app
from tests.asgi import post
from tests.serving import idle, serving

pytestmark = pytest.mark.anyio


async def test_nothing_of_the_request_is_left_soon_after() -> None:
    async with serving() as engine:
        app = create_app(engine)
        body = {"prompt": "a", "max_tokens": 2000, "temperature": 0, "stream": True}
        await post(app, "/v1/completions", body, disconnect_at=2)
        steps = engine.metrics.num_steps
        await idle(engine)
        assert engine.metrics.num_steps <= steps + 2
        assert engine.stats().num_running == 0
