"""The official openai client against a live server: its own typed models parse every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from tests.process import Process, server

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
CHAT = [{"role": "user", "content": "hi<eos>"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with server() as process:
        yield process


@pytest.fixture
def client(process: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "aserve"


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="ab", max_tokens=5, temperature=0, logprobs=1)
    assert whole.choices[0].text == "ababa"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == list("ababa")
    chunks = client.completions.create(model="fake", prompt="ab", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ababa"


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=50, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].message.content == "user: hi"
    assert whole.choices[0].finish_reason == "stop"
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    with client.chat.completions.stream(model="fake", messages=CHAT, max_tokens=50, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "user: hi"


def test_streamed_usage(client: openai.OpenAI) -> None:
    *chunks, usage = client.chat.completions.create(
        model="fake", messages=CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.choices for chunk in chunks)
    assert usage.choices == []
    assert usage.usage.completion_tokens == 9


@pytest.mark.anyio
async def test_the_asynchronous_client(process: Process) -> None:
    async with openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        request = {"model": "fake", "messages": CHAT, "temperature": 0}
        whole = await client.chat.completions.create(**request)
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(**request, stream=True)
        ]
        async with client.responses.stream(model="fake", input="hi<eos>", temperature=0) as stream:
            final = await stream.get_final_response()
    assert whole.choices[0].message.content == "".join(pieces) == final.output_text == "user: hi"


def test_no_such_route_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="fake", input="a")
    assert caught.value.code == "route_not_found"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"prompt": "x" * 5000}, openai.BadRequestError),
    ],
)
def test_errors_are_told_apart_by_class(client: openai.OpenAI, fields: dict[str, object], error: type) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": "fake", "prompt": "a", "stream": True, **fields})
    assert caught.value.type


def test_an_error_in_mid_stream_is_raised(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="fake", prompt="a", max_tokens=4000, stream=True, extra_body={"timeout": 0.2}
    )
    with pytest.raises(openai.APIError) as caught:
        for _ in chunks:
            pass
    assert caught.value.code == "deadline_exceeded"


def test_tool_calls(client: openai.OpenAI) -> None:
    request = {
        "model": "fake",
        "messages": [{"role": "user", "content": f"{CALL}{CALL}<eos>"}],
        "temperature": 0,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "user:"
    assert [call.function.name for call in whole.message.tool_calls] == ["weather"] * 2
    with client.chat.completions.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [call.function.arguments for call in final.tool_calls] == ['{"city": "Paris"}'] * 2
    history = [
        *request["messages"],
        whole.message,
        *({"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in whole.message.tool_calls),
    ]
    again = client.chat.completions.create(**request | {"messages": history, "max_tokens": 1})
    assert again.usage.prompt_tokens > 200


def test_responses(client: openai.OpenAI) -> None:
    request = {"model": "fake", "input": f"{CALL}<eos>", "temperature": 0, "tools": [{"type": "function", **FUNCTION}]}
    whole = client.responses.create(**request)
    assert whole.output_text == "user:"
    assert whole.status == "completed"
    assert whole.output[1].name == "weather"
    assert whole.usage.output_tokens > 70
    assert client.responses.retrieve(whole.id) == whole
    follow = client.responses.create(
        model="fake",
        previous_response_id=whole.id,
        input=[{"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "rain"}],
        max_output_tokens=2,
    )
    assert follow.incomplete_details.reason == "max_output_tokens"
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_streamed_responses(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="fake", input=f"{CALL}<eos>", temperature=0, tools=[{"type": "function", "strict": False, **FUNCTION}]
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "user:"
    assert final.output[1].arguments == '{"city": "Paris"}'


def test_background_responses_are_cancelled(client: openai.OpenAI) -> None:
    begun = client.responses.create(model="fake", input="abc", temperature=0, background=True)
    assert begun.status == "in_progress"
    assert client.responses.cancel(begun.id).status == "cancelled"


class Verdict(pydantic.BaseModel):
    """What a client asks for by a model of its own."""

    model_config = pydantic.ConfigDict(extra="forbid")
    answer: Literal["yes", "no"]
    score: int = pydantic.Field(ge=1, le=5)


def test_outputs_are_parsed_into_the_clients_own_models(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="fake", messages=CHAT, temperature=0, max_tokens=300, response_format=Verdict
    )
    assert isinstance(done.choices[0].message.parsed, Verdict)
    response = client.responses.parse(
        model="fake", input="hi", temperature=0, max_output_tokens=300, text_format=Verdict
    )
    assert isinstance(response.output_parsed, Verdict)
    with client.chat.completions.stream(
        model="fake", messages=CHAT, temperature=0, max_tokens=300, response_format=Verdict
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Verdict)


def test_a_forced_call_is_a_call(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="fake",
        messages=CHAT,
        temperature=0,
        max_tokens=300,
        tools=[{"type": "function", "function": {"name": "rate", "parameters": Verdict.model_json_schema()}}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert done.choices[0].message.tool_calls
    for call in done.choices[0].message.tool_calls:
        assert Verdict.model_validate_json(call.function.arguments)


def test_a_schema_that_cannot_be_honoured_is_a_bad_request(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=CHAT, response_format=form)
    assert caught.value.param == "response_format"
