"""V02: prompt ids that are no tokens are 400."""

from __future__ import annotations

import pytest

from tests.asgi import get, post
from tests.serving import VOCAB_SIZE, application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "prompt", ["[266]", "[-1]", "[9223372036854775808]", "[1e3]", "[1.5]", "[true]", "[[1,-1]]", "[null]"]
)
async def test_a_bad_id_is_400(prompt: str) -> None:
    assert VOCAB_SIZE == 266
    async with application() as app:
        reply = await post(app, "/v1/completions", f'{{"prompt":{prompt}}}'.encode())
        assert reply.status == 400
        assert str(reply.json()["error"]["param"]).startswith("prompt")
        assert (await get(app, "/health")).status == 200
