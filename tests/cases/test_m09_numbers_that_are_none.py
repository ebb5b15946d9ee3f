"""M09: NaN, infinities and negatives are refused by name, and the next call works."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "-Infinity"),
        ("temperature", "-1"),
        ("temperature", "1e400"),
        ("top_p", "NaN"),
        ("presence_penalty", "NaN"),
        ("logit_bias", '{"5":NaN}'),
        ("timeout", "NaN"),
    ],
)
async def test_the_field_is_named(path: str, field: str, value: str) -> None:
    raw = f'{{"prompt":"a","messages":[{{"role":"user","content":"a"}}],"{field}":{value}}}'
    async with application() as app:
        reply = await post(app, path, raw.encode())
        assert reply.status == 400
        assert str(reply.json()["error"]["param"]).startswith(field)
        assert (await post(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200
