"""V04: a body that is no JSON object is 4xx in the OpenAI shape."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"prompt=a", b"{}"])
@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
async def test_the_error_has_the_openai_shape(path: str, body: bytes, headers: dict[str, str]) -> None:
    async with application() as app:
        reply = await post(app, path, body, headers=headers)
    assert 400 <= reply.status < 500
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
