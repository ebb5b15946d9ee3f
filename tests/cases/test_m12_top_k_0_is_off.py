"""M12: top_k 0 and -1 mean off."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("top_k", [0, -1])
async def test_answers_vary(top_k: int) -> None:
    request = {"prompt": "hello", "temperature": 1.5, "max_tokens": 8, "top_k": top_k}
    async with drawing() as app:
        texts = {(await post(app, "/v1/completions", request)).json()["choices"][0]["text"] for _ in range(5)}
        seeded = [await post(app, "/v1/completions", request | {"seed": 1, "top_k": k}) for k in (top_k, 9_999)]
    assert len(texts) == 5
    assert seeded[0].json()["choices"] == seeded[1].json()["choices"]
