"""G04: the end is drawn only where the document is complete; a cap inside it is length."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


async def ask(prompt: str, **fields: Any) -> Any:
    """The fake model wants to say what its prompt says."""
    request = {"prompt": prompt, "response_format": FORM, "temperature": 0} | fields
    async with application() as app:
        return (await post(app, "/v1/completions", request)).json()["choices"][0]


@pytest.mark.parametrize("tempting", ["<eos>", "<end>", "\u201d", "\u201d}", "}", "\n"])
async def test_nothing_but_its_own_quote_ends_a_string(tempting: str) -> None:
    choice = await ask('{"s":"say ' + tempting, max_tokens=60)
    assert choice["text"].startswith('{"s":"say ')
    if choice["finish_reason"] == "stop":
        json.loads(choice["text"])
    else:
        assert choice["finish_reason"] == "length"
        with pytest.raises(ValueError):
            json.loads(choice["text"])


async def test_a_curly_quote_is_text() -> None:
    choice = await ask('{"s":"say \u201chi\u201d <eos"}', max_tokens=60)
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["text"]) == {"s": "say \u201chi\u201d <eos"}


@pytest.mark.parametrize("max_tokens", [1, 5, 9, 10, 20])
async def test_stop_means_complete(max_tokens: int) -> None:
    text = '{"s":"ab"}'
    choice = await ask(text, max_tokens=max_tokens)
    assert choice["text"] == text[:max_tokens]
    assert choice["finish_reason"] == ("stop" if max_tokens >= len(text) else "length")
