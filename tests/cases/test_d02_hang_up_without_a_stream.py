"""D02: a client that hangs up on a whole answer ends its request too."""

from __future__ import annotations

import anyio
import pytest

from routes.app import create_app
from tests.asgi import post
from tests.serving import idle, serving

pytestmark = pytest.mark.anyio


async def test_generation_stops_when_nobody_waits_for_the_answer() -> None:
    async with serving() as engine:
        app = create_app(engine)
        body = {"prompt": "a", "max_tokens": 2000, "temperature": 0}
        with anyio.fail_after(10):
            reply = await post(app, "/v1/completions", body, disconnect_at=0)
            await idle(engine)
        assert not reply.started
        assert engine.metrics.outcomes["cancelled"] == 1
        assert engine.metrics.num_steps < 2000
