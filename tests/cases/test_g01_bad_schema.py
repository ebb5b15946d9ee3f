"""G01: a schema that is none, or asks for what the compiler lacks, is 400 before queueing; other streams go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application, joined, reasons

pytestmark = pytest.mark.anyio

BAD = [
    {"type": "object", "properties": {"a": "string"}},
    {"type": "string", "format": "no-such-format"},
    {"type": "object", "properties": {"a": {"type": "strnig"}}},
    {"type": "array", "uniqueItems": True},
    {"$ref": "#/$defs/missing"},
    {"not": {"type": "string"}},
    [1],
    "text",
    7,
]


@pytest.mark.parametrize("schema", BAD)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_bad_schema_is_400_and_the_server_goes_on(path: str, schema: Any) -> None:
    message = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    async with application() as app:
        for fields in ({"response_format": form}, {"guided_json": schema}, {"structured_outputs": {"json": schema}}):
            reply = await post(app, path, message | fields | {"stream": True})
            assert reply.status == 400
            assert reply.json()["error"]["param"] in fields
        free = await post(app, "/v1/completions", {"prompt": "abc", "max_tokens": 4, "temperature": 0, "stream": True})
        assert joined(free) == "abca"
        assert reasons(free) == [(0, "length")]
