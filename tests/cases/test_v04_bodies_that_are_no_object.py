"""V04: a body that is no JSON object, or is nested without end, is 4xx in the OpenAI shape."""

from __future__ import annotations

import json
from typing import Any

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


TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize("depth", [100, 600, 900, 3000])
@pytest.mark.parametrize("where", ["call", "call as text", "tool", "forced tool", "variables", "schema"])
async def test_nesting_that_is_too_deep_is_400_and_never_500(depth: int, where: str) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    function = {"name": "f", "parameters": "NESTED"}
    fields: dict[str, Any] = {"messages": [TURN], "max_tokens": 1}
    if where.startswith("call"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "NESTED"}}
        fields["messages"] = [TURN, {"role": "assistant", "tool_calls": [call]}]
    elif where.endswith("tool"):
        fields["tools"] = [{"type": "function", "function": function}]
        fields["tool_choice"] = "required" if where == "forced tool" else "auto"
    else:
        fields["chat_template_kwargs" if where == "variables" else "guided_json"] = "NESTED"
    body = json.dumps(fields).replace('"NESTED"', json.dumps(nested) if where == "call as text" else nested)
    async with application() as app:
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = await post(app, path, body.encode())
            assert reply.status in (200, 400), reply.body
