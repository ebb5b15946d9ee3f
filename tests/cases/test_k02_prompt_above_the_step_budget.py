"""K02: a prompt above the budget of a step is prefilled in chunks."""

from __future__ import annotations

import anyio
import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("length", [31, 32, 33, 64, 150])
async def test_any_prompt_around_the_budget_works(length: int) -> None:
    prompt = ("abcdefghijklmnopqrstuvwxyz" * 6)[:length]
    async with application(max_num_batched_tokens=32) as app:
        with anyio.fail_after(10):
            reply = await post(app, "/v1/completions", {"prompt": prompt, "max_tokens": 5, "temperature": 0})
    assert reply.json()["choices"][0]["text"] == prompt[:5]
