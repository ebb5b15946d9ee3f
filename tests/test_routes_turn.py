"""Tool calls and reasoning over HTTP: the template sees the tools, both transports tell of the same message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aserve.chat_template import render
from routes.schemas import ChatBody, parse
from tests.asgi import Reply, post
from tests.serving import BARE, application, drawing, reasons

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def says(text: str, **fields: Any) -> dict[str, Any]:
    """A request that this text answers, over the BARE template and the model that repeats its prompt."""
    return {"messages": [{"role": "user", "content": text + "<eos>"}], "temperature": 0, "max_tokens": 400} | fields


def message(reply: Reply) -> dict[str, Any]:
    """A streamed message put together again, as clients do."""
    whole: dict[str, Any] = {"content": None}
    for event in reply.events()[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    whole[name] = (whole.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", ()):
                calls = whole.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"type": part["type"], "name": part["function"]["name"], "arguments": ""})
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return whole


@pytest.mark.parametrize("logprobs", [False, True])
async def test_calls_are_the_same_in_both_transports(logprobs: bool) -> None:
    request = says(f"Let me look.\n{CALL}\n{CALL}", tools=TOOLS, logprobs=logprobs)
    async with application(tokenizer=BARE, tool_call_parser="hermes") as app:
        whole = (await post(app, CHAT, request)).json()["choices"][0]
        stream = await post(app, CHAT, request | {"stream": True})
        hidden = (await post(app, CHAT, request | {"tool_choice": "none"})).json()["choices"][0]
        single = (await post(app, CHAT, request | {"parallel_tool_calls": False})).json()["choices"][0]
    said = whole["message"]
    assert whole["finish_reason"] == "tool_calls"
    assert said["content"] == "Let me look."
    assert [call["type"] for call in said["tool_calls"]] == ["function"] * 2
    assert len({call["id"] for call in said["tool_calls"]}) == 2
    assert [call["function"] for call in said["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Paris"}'}
    ] * 2
    assert message(stream) == {
        "content": "Let me look.",
        "tool_calls": [{"type": "function", "name": "weather", "arguments": '{"city": "Paris"}'}] * 2,
    }
    assert reasons(stream) == [(0, "tool_calls")]
    assert hidden["message"]["content"] == f"Let me look.\n{CALL}\n{CALL}"
    assert hidden["finish_reason"] == "stop"
    assert len(single["message"]["tool_calls"]) == 1


async def test_arguments_are_streamed_in_pieces() -> None:
    async with application(tokenizer=BARE, tool_call_parser="hermes", max_num_seqs=1) as app:
        stream = await post(app, CHAT, says(CALL, tools=TOOLS, stream=True))
    parts = [part for e in stream.events()[:-1] for part in e["choices"][0]["delta"].get("tool_calls", ())]
    assert [("id" in part, "name" in part["function"]) for part in parts] == [(True, True)] + [(False, False)] * (
        len(parts) - 1
    )
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Paris"}'


@pytest.mark.parametrize(("text", "parser"), [("[TOOL_CALLS]weather{}", "mistral"), (CALL, None)])
async def test_calls_are_found_in_the_servers_style_and_without_one_stay_text(text: str, parser: str | None) -> None:
    async with application(tokenizer=BARE, tool_call_parser=parser) as app:
        said = (await post(app, CHAT, says(text, tools=TOOLS))).json()["choices"][0]["message"]
    if parser is None:
        assert said["content"] == text
    else:
        assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


NAMED = {"type": "function", "function": {"name": "weather"}}
TYPED = [
    {"type": "function", "function": {"name": "time"}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"$ref": "#/$defs/days"}},
                "required": ["days"],
                "additionalProperties": False,
                "$defs": {"days": {"enum": [1, 2]}},
            },
        },
    },
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", [None, "mistral"])
async def test_a_call_can_be_required_without_a_parser(stream: bool, parser: str | None) -> None:
    text = '[{"name": "weather", "arguments": {"days": 2}}, {"name": "time", "arguments": {}}]'
    request = says(text, tools=TYPED, tool_choice="required", stream=stream)
    async with application(tokenizer=BARE, tool_call_parser=parser, reasoning_parser="deepseek_r1") as app:
        reply = await post(app, CHAT, request)
        single = await post(app, CHAT, request | {"stream": False, "parallel_tool_calls": False})
    said = message(reply) if stream else reply.json()["choices"][0]["message"]
    calls = [call if stream else call["function"] for call in said["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("weather", {"days": 2}), ("time", {})]
    assert said["content"] is None
    assert len(single.json()["choices"][0]["message"]["tool_calls"]) == 1
    if parser == "mistral" and not stream:
        assert len(said["tool_calls"][0]["id"]) == 9


async def test_a_named_function_is_called_with_arguments_of_its_schema() -> None:
    request = says('{"days": 1}', tools=TYPED, tool_choice=NAMED)
    async with application(tokenizer=BARE, tool_call_parser="hermes") as app:
        choice = (await post(app, CHAT, request)).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"days": 1}'}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_model_that_knows_nothing_of_tools_calls_one_all_the_same(choice: Any) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": TYPED[1:], "tool_choice": choice}
    async with drawing() as app:
        spaces = {str(token): -100 for token in BARE.encode(" \n\t\r", False)}
        sampling = {"logit_bias": spaces, "temperature": 0, "max_tokens": 120}
        reply = (await post(app, CHAT, request | sampling)).json()["choices"][0]
    [call, *_] = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["days"] in (1, 2)


async def test_an_output_cut_within_a_call_is_length() -> None:
    async with application(tokenizer=BARE, tool_call_parser="hermes") as app:
        cut = (await post(app, CHAT, says(CALL, tools=TOOLS, max_tokens=50))).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"c')


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_split_from_the_answer(stream: bool) -> None:
    request = says(f"<think>\nhm\n</think>\n\nYes. {CALL}", tools=TOOLS, stream=stream)
    async with application(tokenizer=BARE, tool_call_parser="hermes", reasoning_parser="think") as app:
        reply = await post(app, CHAT, request)
    said = message(reply) if stream else reply.json()["choices"][0]["message"]
    assert said["reasoning_content"] == "hm"
    assert said["content"] == "Yes."
    assert len(said["tool_calls"]) == 1


def test_the_calls_of_a_history_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    body = parse(json.dumps({"messages": history}).encode(), ChatBody)
    assert render(template, body.conversation()) == "Paris"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "bad_words": ["a"]}, "bad_words"),
    ],
)
async def test_bad_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with application(tool_call_parser="hermes") as app:
        reply = await post(app, CHAT, says("hi", **fields))
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param
