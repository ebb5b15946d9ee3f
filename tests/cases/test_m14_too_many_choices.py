"""M14: n above what can run is refused at once, and health stays quick."""

from __future__ import annotations

import pytest

from tests.asgi import get, post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_n_above_the_limit_is_400() -> None:
    async with application(max_n=4) as app:
        for n in (5, 1_000_000, 2**64):
            reply = await post(app, "/v1/completions", {"prompt": "a", "n": n, "max_tokens": 1})
            assert reply.status == 400
            assert reply.json()["error"]["param"] == "n"
            assert (await get(app, "/health")).status == 200
        assert (
            len((await post(app, "/v1/completions", {"prompt": "a", "n": 4, "max_tokens": 1})).json()["choices"]) == 4
        )
