"""G05: a document ends with its last token, whatever whitespace the model would add; inside, whitespace is bounded."""

from __future__ import annotations

import json

import pytest

from tests.asgi import post
from tests.serving import application, joined, reasons

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("space", [" ", "\n", "\t \r\n"])
async def test_no_whitespace_follows_the_document(space: str, stream: bool) -> None:
    request = {"prompt": '{"a":[1]}' + space, "response_format": {"type": "json_object"}, "temperature": 0}
    async with application() as app:
        reply = await post(app, "/v1/completions", request | {"max_tokens": 500, "stream": stream})
    text = joined(reply) if stream else reply.json()["choices"][0]["text"]
    assert text == '{"a":[1]}'
    if stream:
        assert reasons(reply) == [(0, "stop")]
    else:
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        assert reply.json()["usage"]["completion_tokens"] == len(text)


async def test_a_model_that_says_nothing_but_whitespace_still_comes_to_the_end() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    request = {"prompt": "\n \n", "guided_json": schema, "temperature": 0, "max_tokens": 1000}
    async with application() as app:
        choice = (await post(app, "/v1/completions", request)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["text"]) == {"a": 1}
    assert len(choice["text"]) > 100  # it did try
