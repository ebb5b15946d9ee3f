"""The official openai client against a live server: its own typed models parse every answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process import Process, server

openai = pytest.importorskip("openai")
CHAT = [{"role": "user", "content": "hi<eos>"}]


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
