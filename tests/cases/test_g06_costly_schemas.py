"""G06: what would take for ever to compile is 400 soon, with the loop free meanwhile."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import anyio
import pytest

from tests.asgi import get, post
from tests.serving import application

pytestmark = pytest.mark.anyio


def one_of(depth: int) -> dict[str, Any]:
    return {"oneOf": [one_of(depth - 1), one_of(depth - 1)]} if depth else {"type": "string"}


def chain(depth: int, kind: str) -> dict[str, Any]:
    """Every definition offers three that each use the next."""
    definitions: dict[str, Any] = {f"d{depth}": {"type": "string"}}
    for i in range(depth):
        next_ = {"$ref": f"#/$defs/d{i + 1}"}
        shapes = [{"type": "object", "properties": {name: next_}, "required": [name]} for name in ("a", "b")]
        definitions[f"d{i}"] = {kind: [*shapes, {"type": "array", "items": next_}]}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


COSTLY: list[dict[str, Any]] = [
    *(one_of(depth) for depth in (8, 10, 12)),
    *(chain(depth, "oneOf") for depth in (8, 16)),
    {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(16)]},
    {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(3)]} for i in range(12)]},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}},
]


@pytest.mark.parametrize("schema", COSTLY)
async def test_it_is_400_and_the_loop_is_free_meanwhile(schema: dict[str, Any]) -> None:
    longest = 0.0

    async def poll() -> None:
        nonlocal longest
        while True:
            began = perf_counter()
            assert (await get(app, "/health")).status == 200
            await anyio.lowlevel.checkpoint()
            longest = max(longest, perf_counter() - began)

    async with application() as app:
        await post(app, "/v1/completions", {"prompt": "abc", "guided_regex": "a"})  # imports
        async with anyio.create_task_group() as group:
            group.start_soon(poll)
            reply = await post(app, "/v1/completions", {"prompt": "abc", "guided_json": schema})
            group.cancel_scope.cancel()
        assert reply.status == 400
        assert reply.json()["error"]["param"] == "guided_json"
    assert longest < 1.0


async def test_the_same_shape_that_can_be_honoured_is() -> None:
    request = {"prompt": '{"a":{"b":["x"]}}', "guided_json": chain(3, "anyOf"), "temperature": 0, "max_tokens": 40}
    async with application() as app:
        choice = (await post(app, "/v1/completions", request)).json()["choices"][0]
    assert choice["text"] == '{"a":{"b":["x"]}}'
    assert choice["finish_reason"] == "stop"
