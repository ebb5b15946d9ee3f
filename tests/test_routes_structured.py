"""Structured output over HTTP: every name for it, on each route, and tool calls that the client forces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routes.structured import tool_calls
from routes.turn import ToolUse, TurnFormat
from tests.asgi import post
from tests.serving import TOKENIZER, application, drawing

pytestmark = pytest.mark.anyio

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Point"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": NESTED}},
    {"type": "function", "function": {"name": "rest"}},
]
MESSAGES = [{"role": "user", "content": "go"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}},
        {"guided_json": POINT},
        {"guided_json": json.dumps(POINT)},
        {"structured_outputs": {"json": POINT, "regex": None}},
        {"guided_regex": r'\{"x":[0-9]\}'},
        {"structured_outputs": {"regex": r'\{"x":[0-9]\}'}},
        {"guided_choice": ['{"x":1}', '{"x":2}']},
        {"structured_outputs": {"choice": ['{"x":1}', '{"x":2}']}},
        {"guided_grammar": 'start: "{\\"x\\":" /[0-9]/ "}"'},
        {"structured_outputs": {"grammar": 'start: "{\\"x\\":" /[0-9]/ "}"'}},
    ],
)
async def test_every_name_on_both_routes(fields: dict[str, Any]) -> None:
    async with drawing() as app:
        reply = await post(app, "/v1/completions", {"prompt": "hi", "max_tokens": 200, "n": 2} | fields)
        chat = await post(app, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 200} | fields)
    texts = [choice["text"] for choice in reply.json()["choices"]]
    texts.append(chat.json()["choices"][0]["message"]["content"])
    for text in texts:
        document = json.loads(text)
        assert document.keys() == {"x"}
        assert 0 <= document["x"] <= 9
    assert "x-aserve-warning" not in reply.headers


async def test_plain_text_is_no_structure() -> None:
    request = {"prompt": "abc", "max_tokens": 3, "temperature": 0, "response_format": {"type": "text"}}
    async with application() as app:
        assert (await post(app, "/v1/completions", request)).json()["choices"][0]["text"] == "abc"


async def test_a_response_has_the_form_of_its_text_field() -> None:
    form = {"type": "json_schema", "name": "point", "schema": POINT}
    async with drawing() as app:
        reply = await post(
            app, "/v1/responses", {"input": "hi", "text": {"format": form}, "max_output_tokens": 200, "store": False}
        )
    assert json.loads(reply.json()["output"][0]["content"][0]["text"]).keys() == {"x"}


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_required_call_is_made(parallel: bool) -> None:
    request = {
        "messages": MESSAGES,
        "tools": TOOLS[:1],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "max_tokens": 200,
        "logit_bias": {str(TOKENIZER.encode("]", False)[0]): 20},  # the list ends where it may
    }
    async with drawing() as app:
        choice = (await post(app, "/v1/chat/completions", request)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    calls = choice["message"]["tool_calls"]
    assert calls
    assert parallel or len(calls) == 1
    for call in calls:
        assert call["function"]["name"] == "move"
        assert 0 <= json.loads(call["function"]["arguments"])["at"]["x"] <= 9


async def test_a_named_call_is_made_and_other_tools_are_not() -> None:
    choice = {"type": "function", "function": {"name": "move"}}
    request = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    async with drawing() as app:
        (found,) = (await post(app, "/v1/chat/completions", request)).json()["choices"]
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "move"
    assert json.loads(call["function"]["arguments"])["at"].keys() == {"x"}


def test_references_of_a_tool_follow_it_into_the_list_of_calls() -> None:
    structured = tool_calls(TOOLS, ToolUse("required", ("move", "rest"), parallel=False))
    assert structured is not None
    schema: Any = structured.value
    assert schema["maxItems"] == 1
    assert schema["$defs"]["tool0"]["properties"]["at"] == {"$ref": "#/$defs/tool0/$defs/Point"}
    assert schema["$defs"]["tool1"] == {"type": "object"}
    assert tool_calls(TOOLS, ToolUse("auto", ("move", "rest"))) is None


def test_a_structured_turn_has_no_thoughts() -> None:
    class Opened:
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return "<think>\n"

    form = TurnFormat(reasoning_parser="deepseek_r1", tool_call_parser="hermes")
    assert form.turn(ToolUse("auto", ("move",)), [1], Opened(), structured=True) is None
    assert form.turn(ToolUse("auto", ("move",)), [1], Opened()) is not None


async def test_beams_do_not_follow_grammars() -> None:
    async with application() as app:
        request = {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 4, "guided_regex": "a"}
        reply = await post(app, "/v1/completions", request)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "guided_regex"
