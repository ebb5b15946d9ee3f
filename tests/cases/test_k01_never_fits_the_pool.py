"""K01: what fits the context but never the pool is refused, and others run."""

from __future__ import annotations

import anyio
import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


async def test_a_prompt_above_the_pool_is_400_and_does_not_block() -> None:
    async with application(num_gpu_blocks=4, max_model_len=2048) as app:  # 64 tokens
        for body in ({"prompt": "x" * 80}, {"prompt": "x" * 40, "max_tokens": 100}):
            with anyio.fail_after(10):
                reply = await post(app, "/v1/completions", body)
            assert reply.status == 400
            assert "64" in reply.json()["error"]["message"]
        short = await post(app, "/v1/completions", {"prompt": "ab", "max_tokens": 4, "temperature": 0})
        assert short.json()["choices"][0]["text"] == "abab"
        grown = await post(app, "/v1/completions", {"prompt": "x" * 40, "temperature": 0})
        assert grown.json()["choices"][0]["finish_reason"] == "length"
        assert grown.json()["usage"]["total_tokens"] <= 64
