"""M04: without a seed, answers vary."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


async def test_five_calls_give_five_answers() -> None:
    request = {"prompt": "hello", "temperature": 0.8, "max_tokens": 8}
    async with drawing() as app:
        texts = {(await post(app, "/v1/completions", request)).json()["choices"][0]["text"] for _ in range(5)}
    assert len(texts) == 5
