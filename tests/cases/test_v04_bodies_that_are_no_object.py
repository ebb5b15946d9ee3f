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


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_a_body_that_says_it_is_something_else_is_415(headers: dict[str, str]) -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert reply.status == 415
    assert (
        "application/json" in reply.json()["error"]["message"] or "content-encoding" in reply.json()["error"]["message"]
    )


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
async def test_every_name_of_json_is_taken(kind: str) -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', headers={"content-type": kind})
    assert reply.status == 200


async def test_a_text_too_long_to_tokenize_at_leisure_is_400() -> None:
    async with application() as app:
        reply = await post(app, "/tokenize", {"prompt": "a" * (2 << 20)})
    assert reply.status == 400
    assert "at most" in reply.json()["error"]["message"]
