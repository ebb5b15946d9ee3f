"""G02: a regular expression, or a grammar, that does not compile is 400, and the engine lives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "([a-z]"),
        ("guided_regex", "*a"),
        ("guided_regex", "(?<=a)b"),
        ("guided_regex", r"(a)\1"),
        ("guided_regex", ""),
        ("guided_regex", 3),
        ("guided_grammar", "start: missing"),
        ("guided_grammar", 'root ::= "a"'),
        ("guided_choice", []),
        ("guided_choice", ["a", 1]),
        ("structured_outputs", {"regex": "["}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {}),
        ("structured_outputs", "a"),
        ("response_format", {"type": "yaml"}),
        ("response_format", "json"),
        ("response_format", {"type": "json_schema"}),
    ],
)
async def test_it_is_400_and_names_the_field(field: str, value: Any) -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", {"prompt": "abc", field: value})
        assert reply.status == 400
        assert reply.json()["error"]["param"] == field
        fine = await post(app, "/v1/completions", {"prompt": "abc", "guided_regex": "[x-z]{3}", "temperature": 0})
        assert fine.json()["choices"][0]["text"] == "xxx"
