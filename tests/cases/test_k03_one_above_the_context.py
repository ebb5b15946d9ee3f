"""K03: one token above the context is 400, and the next call runs."""

from __future__ import annotations

import anyio
import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("length", "status"), [(63, 200), (64, 400), (65, 400)])
async def test_around_the_context(length: int, status: int) -> None:
    async with application(max_model_len=64) as app:
        with anyio.fail_after(10):
            assert (await post(app, "/v1/completions", {"prompt": "x" * length})).status == status
            after = await post(app, "/v1/completions", {"prompt": "ab", "max_tokens": 2, "temperature": 0})
    assert after.json()["choices"][0]["text"] == "ab"
