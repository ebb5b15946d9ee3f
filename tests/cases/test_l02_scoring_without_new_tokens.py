"""L02: echo with logprobs and max_tokens 0 scores the prompt."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import BOS, LETTERS, drawing, joined

pytestmark = pytest.mark.anyio


async def test_the_prompt_is_scored_and_nothing_is_generated() -> None:
    body = {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0}
    async with drawing() as app:
        reply = (await post(app, "/v1/completions", body)).json()
        stream = await post(app, "/v1/completions", body | {"stream": True})
        longer = (await post(app, "/v1/completions", body | {"max_tokens": 3, "ignore_eos": True})).json()["choices"][
            0
        ]["logprobs"]
    [choice] = reply["choices"]
    assert choice["text"] == joined(stream) == "hello"
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    scores = choice["logprobs"]
    assert scores["tokens"] == list("hello")
    assert scores["text_offset"] == [0, 1, 2, 3, 4]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert all(value < 0 for value in scores["token_logprobs"][1:])
    assert stream.events()[0]["choices"][0]["logprobs"] == scores
    assert longer["token_logprobs"][:5] == pytest.approx(scores["token_logprobs"], abs=1e-4)
    assert len(longer["tokens"]) == 8


async def test_text_offsets_do_not_count_a_bos_that_the_text_does_not_show() -> None:
    async with drawing() as app:
        body = {"prompt": [BOS, *LETTERS[:3]], "echo": True, "logprobs": 0, "max_tokens": 0}
        [choice] = (await post(app, "/v1/completions", body)).json()["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["<bos>", "a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


async def test_prompt_logprobs_have_one_entry_per_position() -> None:
    async with drawing() as app:
        body = {"prompt": "hello", "prompt_logprobs": 2, "max_tokens": 1}
        [choice] = (await post(app, "/v1/completions", body)).json()["choices"]
        chat = {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 1, "max_tokens": 1}
        said = (await post(app, "/v1/chat/completions", chat)).json()
        refused = await post(app, "/v1/completions", body | {"stream": True})
    assert choice["prompt_logprobs"][0] is None
    assert [len(position) in (2, 3) for position in choice["prompt_logprobs"][1:]] == [True] * 4
    assert "l" in [entry["decoded_token"] for entry in choice["prompt_logprobs"][2].values()]
    assert refused.status == 400
    assert len(said["prompt_logprobs"]) == said["usage"]["prompt_tokens"]
