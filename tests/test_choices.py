"""best_of and beam search over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application, drawing

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def test_the_best_of_more_have_the_highest_mean_logprobs() -> None:
    request = {"prompt": "hello", "max_tokens": 6, "temperature": 1.5, "seed": 3, "logprobs": 0}
    async with drawing() as app:
        every = (await post(app, PATH, request | {"n": 6})).json()["choices"]
        best = (await post(app, PATH, request | {"n": 2, "best_of": 6})).json()
        bare = (await post(app, PATH, request | {"n": 2, "best_of": 6, "logprobs": None})).json()

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    texts = [choice["text"] for choice in sorted(every, key=mean, reverse=True)][:2]
    assert [choice["text"] for choice in best["choices"]] == texts
    assert [choice["text"] for choice in bare["choices"]] == texts
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert bare["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in every)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_beams_are_choices_best_first(path: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": ["hello", "a b"]} if path == PATH else {"messages": [{"role": "user", "content": "hello"}]}
    )
    request = prompt | {"max_tokens": 5, "use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5}
    async with drawing() as app:
        body = (await post(app, path, request)).json()
        again = (await post(app, path, request)).json()
        wide = (await post(app, path, request | {"n": 4})).json()
    num_prompts = 2 if path == PATH else 1
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert body["choices"] == again["choices"]
    key = "text" if path == PATH else "message"
    assert [c[key] for c in wide["choices"][:2]] == [c[key] for c in body["choices"][:2]]
    assert 0 < body["usage"]["completion_tokens"] <= 10 * num_prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True}, "max_tokens"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": True, "max_tokens": 5, "n": 100}, "best_of"),
        ({"use_beam_search": True, "max_tokens": 5, "early_stopping": "often"}, "early_stopping"),
        ({"use_beam_search": True, "max_tokens": 5, "length_penalty": 1e6}, "length_penalty"),
        ({"use_beam_search": True, "max_tokens": 5, "stop": ["a"]}, "stop"),
        ({"length_penalty": 2}, "length_penalty"),
    ],
)
async def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with application() as app:
        reply = await post(app, PATH, {"prompt": "a", **fields})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param
