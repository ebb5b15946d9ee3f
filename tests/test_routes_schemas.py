"""Bodies: what is accepted, and that every refusal names its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aserve import InvalidRequestError, SamplingParams
from routes.schemas import ChatBody, CompletionBody, parse, unknown_fields


def params(body: bytes, kind: type[Any] = CompletionBody) -> SamplingParams:
    parsed = parse(body, kind)
    parsed.check()
    result: SamplingParams = parsed.params({})
    return result


MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"temperature":NaN', "temperature"),
        (b'"temperature":-Infinity', "temperature"),
        (b'"temperature":-1', "temperature"),
        (b'"temperature":1e999', "temperature"),
        (b'"temperature":true', "temperature"),
        (b'"temperature":"1"', "temperature"),
        (b'"top_p":NaN', "top_p"),
        (b'"top_p":0', "top_p"),
        (b'"top_p":1.5', "top_p"),
        (b'"top_k":-2', "top_k"),
        (b'"top_k":1.5', "top_k"),
        (b'"min_p":2', "min_p"),
        (b'"n":0', "n"),
        (b'"n":true', "n"),
        (b'"n":1.0', "n"),
        (b'"n":1000000', "n"),
        (b'"max_tokens":-1', "max_tokens"),
        (b'"max_tokens":99999999999999999999', "max_tokens"),
        (b'"min_tokens":-5', "min_tokens"),
        (b'"max_tokens":3,"min_tokens":4', "min_tokens"),
        (b'"seed":18446744073709551616', "seed"),
        (b'"seed":"x"', "seed"),
        (b'"stop":""', "stop"),
        (b'"stop":[""]', "stop"),
        (b'"stop":["",";"]', "stop"),
        (b'"stop":[1]', "stop"),
        (b'"stop":{"a":1}', "stop"),
        (b'"stop":"' + b"x" * 5000 + b'"', "stop"),
        (b'"stop_token_ids":["1"]', "stop_token_ids"),
        (b'"logit_bias":{"x":1}', "logit_bias"),
        (b'"logit_bias":{"1":1000}', "logit_bias"),
        (b'"logit_bias":{"1":"1"}', "logit_bias"),
        (b'"logit_bias":{"1":NaN}', "logit_bias"),
        (b'"presence_penalty":3', "presence_penalty"),
        (b'"repetition_penalty":0', "repetition_penalty"),
        (b'"stream":"yes"', "stream"),
        (b'"stream_options":{"include_usage":1}', "stream_options"),
        (b'"stream_options":[]', "stream_options"),
        (b'"timeout":0', "timeout"),
        (b'"ttft_timeout":-1', "ttft_timeout"),
        (b'"priority":9999999999', "priority"),
        (b'"user":5', "user"),
        (b'"response_format":{"type":"yaml"}', "response_format"),
        (b'"response_format":{"type":"json_schema","json_schema":{}}', "response_format"),
        (b'"structured_outputs":{"json":{},"regex":"a"}', "structured_outputs"),
        (b'"guided_choice":[]', "guided_choice"),
        (b'"guided_regex":"a+","guided_json":{}', "guided_regex"),
        (b'"guided_regex":"a+","min_tokens":1', "min_tokens"),
        (b'"guided_regex":1', "guided_regex"),
        (b'"use_beam_search":"yes"', "use_beam_search"),
        (b'"best_of":0', "best_of"),
        (b'"user":"\\ud800"', "user"),
    ],
)
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_bad_value_is_refused_by_name(fields: bytes, param: str, kind: type[Any]) -> None:
    start = b'{"prompt":"x",' if kind is CompletionBody else b"{" + MESSAGES + b","
    with pytest.raises(InvalidRequestError) as caught:
        params(start + fields + b"}", kind)
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0].split("[")[0] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"logprobs":true', "logprobs"),
        (b'"logprobs":21', "logprobs"),
        (b'"logprobs":-1', "logprobs"),
        (b'"suffix":"end"', "suffix"),
        (b'"echo":1', "echo"),
    ],
)
def test_bad_values_of_completions_only(fields: bytes, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params(b'{"prompt":"x",' + fields + b"}")
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"logprobs":1', "logprobs"),
        (b'"top_logprobs":2', "top_logprobs"),
        (b'"logprobs":true,"top_logprobs":21', "top_logprobs"),
        (b'"max_completion_tokens":-1', "max_completion_tokens"),
        (b'"tool_choice":"required"', "tool_choice"),
        (
            b'"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required","guided_regex":"a"',
            "guided_regex",
        ),
        (b'"tools":"x"', "tools"),
        (b'"tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[]}}', "tool_choice"),
        (b'"functions":[]', "functions"),
        (b'"chat_template":"{{ x }}"', "chat_template"),
        (b'"continue_final_message":true,"add_generation_prompt":true', "continue_final_message"),
    ],
)
def test_bad_values_of_chat_only(fields: bytes, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params(b"{" + MESSAGES + b"," + fields + b"}", ChatBody)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "prompt", [b'""', b"[]", b"[[]]", b'["a",""]', b'["a",1]', b"[1,[2]]", b"[1.5]", b"[true]", b"{}", b"7", b"null"]
)
def test_a_prompt_that_is_none_is_refused(prompt: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(b'{"prompt":' + prompt + b"}", CompletionBody).prompts()
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


def test_a_prompt_is_one_or_several_texts_or_id_lists() -> None:
    def prompts(prompt: str) -> list[Any]:
        return parse(f'{{"prompt":{prompt}}}'.encode(), CompletionBody).prompts()

    assert prompts('"a"') == ["a"]
    assert prompts('["a","b"]') == ["a", "b"]
    assert prompts("[1,2]") == [[1, 2]]
    assert prompts("[[1],[2,3]]") == [[1], [2, 3]]


@pytest.mark.parametrize(
    "messages",
    [
        b"[]",
        b"null",
        b"{}",
        b'["hi"]',
        b'[{"content":"x"}]',
        b'[{"role":"user"}]',
        b'[{"role":"","content":"x"}]',
        b'[{"role":"user","content":5}]',
        b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]',
        b'[{"role":"user","content":[{"type":"text"}]}]',
    ],
)
def test_messages_that_are_none_are_refused(messages: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(b'{"messages":' + messages + b"}", ChatBody).conversation()
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages")


def test_text_parts_are_joined_and_null_content_beside_tool_calls_is_kept() -> None:
    body = parse(
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},'
        b'{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]},'
        b'{"role":"tool","tool_call_id":"1","content":"2"}]}',
        ChatBody,
    )
    assert body.conversation() == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b'{"prompt":"x"} trailing',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"\\ud800":1}',
        b'{"x":' + b"[" * 100_000,
        b'{"x":NaN}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(body, CompletionBody)


def test_null_means_absent() -> None:
    names = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]
    body = msgspec.json.encode({"prompt": "x", **dict.fromkeys(names)})
    assert params(body) == params(b'{"prompt":"x"}') == SamplingParams()


def test_the_models_defaults_hold_where_the_body_is_silent() -> None:
    body = parse(b'{"prompt":"x","top_k":5}', CompletionBody)
    assert body.params({"top_k": 64, "top_p": 0.5}) == SamplingParams(top_k=5, top_p=0.5)


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    fields = b',"max_tokens":5,"max_completion_tokens":7}'
    assert params(b"{" + MESSAGES + fields, ChatBody).max_tokens == 7


def test_a_developer_speaks_as_the_system() -> None:
    body = parse(b'{"messages":[{"role":"developer","content":"be brief"},{"role":"user","content":"a"}]}', ChatBody)
    assert [message["role"] for message in body.conversation()] == ["system", "user"]


@pytest.mark.parametrize("key", [b'"\\ud800":1', b'"logit_bias":{"\\ud800":1}'])
def test_a_name_that_is_no_text_is_said_to_be(key: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        parse(b'{"prompt":"x",' + key + b"}", CompletionBody)


def test_values_that_ask_for_nothing_are_accepted() -> None:
    fields = b'{"prompt":"x","best_of":1,"use_beam_search":false,"suffix":"","response_format":{"type":"text"}}'
    assert params(fields) == SamplingParams(best_of=1)


def test_unknown_fields_are_named() -> None:
    assert unknown_fields(b'{"prompt":"x","store":true,"metadata":{}}', CompletionBody) == ["store", "metadata"]


def test_usage_is_asked_for_only_by_exactly_true() -> None:
    wanted = [
        parse(b'{"prompt":"x"' + options + b"}", CompletionBody).wants_usage
        for options in (
            b"",
            b',"stream_options":null',
            b',"stream_options":{}',
            b',"stream_options":{"include_usage":false}',
            b',"stream_options":{"include_usage":true}',
        )
    ]
    assert wanted == [False, False, False, False, True]
