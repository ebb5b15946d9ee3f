"""Tool calls and reasoning found in text: every cut of a text gives the same message, and no text is lost."""

from __future__ import annotations

import json
import random
import re

import pytest

from aserve import ConfigError
from routes.reasoning import ReasoningParser, opens_reasoning
from routes.tools import STYLES, CallStart, CallText, Content, ToolParser, named, required
from routes.turn import ChatDelta, ToolUse, Turn, TurnFormat

NAMES = ("weather", "time")
Parsed = tuple[str, list[tuple[str, str]]]


def cuts(text: str) -> list[list[str]]:
    """The text whole, by character, and in a few random ways."""
    ways = [[text], list(text)]
    for seed in range(6):
        chance = random.Random(seed)
        at = sorted(chance.sample(range(1, len(text)), min(len(text) - 1, 5)))
        ways.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return ways


def parse(style: str, pieces: list[str]) -> Parsed:
    """Content, and name and arguments of each call, as a client joins them."""
    parser = ToolParser(STYLES[style], NAMES)
    found = [piece for text in pieces for piece in parser.push(text)] + parser.flush()
    content = "".join(piece.text for piece in found if isinstance(piece, Content))
    starts = [piece for piece in found if isinstance(piece, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    arguments = [
        "".join(piece.text for piece in found if isinstance(piece, CallText) and piece.index == start.index)
        for start in starts
    ]
    return content, [(start.name, text) for start, text in zip(starts, arguments, strict=True)]


PARIS = '{"city": "Par\\"is}]", "days": [1, {"a": -2.5e3}], "x": null}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
CASES: list[tuple[str, str, Parsed]] = [
    ("hermes", HERMES, ("", [("weather", PARIS)])),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}\n", ("Let me see.", [("weather", PARIS)] * 2)),
    ("hermes", f"{HERMES} done <tool", ("done <tool", [("weather", PARIS)])),
    ("hermes", '<tool_call>{"name": "other"}</tool_call>', ("", [("other", "{}")])),
    ("hermes", '<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>ok', ("ok", [("f", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', ("", [("f", '{"a": "')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', ("", [("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ),
    ("hermes", "a <tool_call> is not\n", ("a <tool_call> is not\n", [])),
    ("hermes", "<tool_call>", ("<tool_call>", [])),
    (
        "hermes",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', []),
    ),
    ("hermes", "only text, 1 < 2 \n", ("only text, 1 < 2 \n", [])),
    ("llama3_json", f' {{"name": "weather", "parameters": {PARIS}}}', ("", [("weather", PARIS)])),
    (
        "llama3_json",
        '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"a": 1}}',
        ("", [("time", "{}"), ("weather", '{"a": 1}')]),
    ),
    ("llama3_json", '{"type": "function", "name": "time", "parameters": {}}\n', ("", [("time", "{}")])),
    ("llama3_json", '{"name": "Bob", "parameters": {"age": 3}}', ('{"name": "Bob", "parameters": {"age": 3}}', [])),
    ("llama3_json", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    ("llama3_json", 'It is {"name": "time", "parameters": {}}', ('It is {"name": "time", "parameters": {}}', [])),
    ("llama3_json", '{"name": "time", "parameters": {}} and more', ("and more", [("time", "{}")])),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "time", "arguments": {{}}}}]',
        ("", [("weather", PARIS), ("time", "{}")]),
    ),
    (
        "mistral",
        f"On it.[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time{{}}",
        ("On it.", [("weather", PARIS), ("time", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"a": 1}', ("", [("weather", '{"a": 1}')])),
    ("mistral", "[TOOL_CALLS] no call {", ("[TOOL_CALLS] no call {", [])),
    ("mistral", '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"oops"]', (', {"oops"]', [("time", "{}")])),
]


@pytest.mark.parametrize(("style", "text", "expected"), CASES)
def test_every_cut_gives_the_same_calls_and_content(style: str, text: str, expected: Parsed) -> None:
    for pieces in cuts(text):
        content, calls = parse(style, pieces)
        assert (content, calls) == expected, pieces


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = ToolParser(STYLES["hermes"])
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    [start, first] = parser.push('ments": {"a": "b')
    assert isinstance(start, CallStart) and start.name == "f"
    assert first == CallText(0, '{"a": "b')
    assert parser.push("c") == [CallText(0, "c")]
    assert parser.push('"}}') == [CallText(0, '"}')]


@pytest.mark.parametrize("style", STYLES)
def test_random_text_is_never_lost(style: str) -> None:
    alphabet = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", *'{}[]":,a1\\']
    chance = random.Random(5)
    for _ in range(300):
        pieces = chance.choices(alphabet, k=12)
        whole = parse(style, ["".join(pieces)])
        assert parse(style, pieces) == whole
        assert parse(style, list("".join(pieces))) == whole
        if not whole[1]:
            assert whole[0] == "".join(pieces)


def test_the_forms_that_a_grammar_makes() -> None:
    both = [("time", "{}"), ("weather", '{"a": [1]}')]
    listed = json.dumps([{"name": name, "parameters": json.loads(text)} for name, text in both])
    for text in (listed, *cuts(listed)):
        parser = ToolParser(required, NAMES)
        pieces = [piece for part in text for piece in parser.push(part)] + parser.flush()
        delta = ChatDelta().add(pieces).fields()
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in delta["tool_calls"]] == both
    parser = ToolParser(named("time"), short_ids=True)
    [start, text] = parser.push('{"zone": "CET"}') + parser.flush()
    assert isinstance(start, CallStart) and re.fullmatch(r"[a-zA-Z0-9]{9}", start.id)
    assert text == CallText(0, '{"zone": "CET"}')


REASONING: list[tuple[str, bool, tuple[str, str]]] = [
    ("<think>\nhm, 1 < 2\n\n</think>\n\nYes.", False, ("hm, 1 < 2", "Yes.")),
    (" \n<think></think>Yes. ", False, ("", "Yes. ")),
    ("hm </think> Yes", True, ("hm", "Yes")),
    ("<think>hm </think> Yes", True, ("hm", "Yes")),
    ("No <think>x</think>", False, ("", "No <think>x</think>")),
    ("<thin", False, ("", "<thin")),
    ("<think>cut </thi", False, ("cut </thi", "")),
    (" plain\n", False, ("", " plain\n")),
]


@pytest.mark.parametrize(("text", "opened", "expected"), REASONING)
def test_every_cut_gives_the_same_reasoning(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for pieces in cuts(text):
        parser = ReasoningParser(opened=opened)
        out = [parser.push(piece) for piece in pieces] + [parser.push("", last=True)]
        assert ("".join(r for r, _ in out), "".join(a for _, a in out)) == expected, pieces


def test_a_prompt_may_leave_the_model_thinking() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning("assistant: ")


def test_thoughts_come_before_calls_and_only_the_first_call_where_one_is_wanted() -> None:
    text = f"<think>hm</think>{HERMES}{HERMES}"
    turn = Turn(ReasoningParser(), ToolParser(STYLES["hermes"]), parallel=False)
    message = ChatDelta().add(turn.push(text, last=True)).message()
    assert message["reasoning_content"] == "hm"
    assert message["content"] is None
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [PARIS]
    assert turn.called


def test_an_unknown_parser_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        TurnFormat("pythonic")
    assert caught.value.param == "tool_call_parser"
    assert TurnFormat("hermes").turn(ToolUse("none", NAMES), (), None) is None
