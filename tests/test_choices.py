"""best_of and beam search over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from routes.app import create_app
from tests.asgi import Reply, post
from tests.serving import application, drawing, idle, joined, reasons, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BEAMS = {"prompt": "hello", "max_tokens": 8, "use_beam_search": True, "n": 2, "best_of": 3}
BEST = {"prompt": "hello", "max_tokens": 8, "temperature": 1.0, "seed": 3, "n": 2, "best_of": 5}


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
    assert body["usage"]["completion_tokens"] < wide["usage"]["completion_tokens"]


async def test_beams_have_the_logprobs_of_their_own_tokens() -> None:
    request = BEAMS | {"logprobs": 2, "echo": True, "prompt_logprobs": 1}
    async with drawing() as app:
        body = (await post(app, PATH, request)).json()
    for choice in body["choices"]:
        shape = choice["logprobs"]
        output = shape["token_logprobs"][-8:]
        assert all(value < 0 for value in output)
        for top, value in zip(shape["top_logprobs"][-8:], output, strict=True):
            assert len(top) >= 2 and max(top.values()) >= value
    first, second = (sum(choice["logprobs"]["token_logprobs"][-8:]) for choice in body["choices"])
    assert first >= second


@pytest.mark.parametrize("request_", [BEAMS, BEST], ids=["beams", "best_of"])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_a_stream_brings_the_choices_at_the_end(path: str, request_: dict[str, Any]) -> None:
    request = dict(request_)
    if path != PATH:
        request["messages"] = [{"role": "user", "content": request.pop("prompt")}]
    async with drawing(enable_prefix_caching=False) as app:
        whole = (await post(app, path, request)).json()
        stream = await post(app, path, request | {"stream": True, "stream_options": {"include_usage": True}})
    said = [c["text"] if path == PATH else c["message"]["content"] for c in whole["choices"]]
    assert [joined(stream, i) for i in range(2)] == said
    assert reasons(stream) == [(c["index"], c["finish_reason"]) for c in whole["choices"]]
    assert stream.events()[-2]["usage"] == whole["usage"] and stream.events()[-1] == "[DONE]"


async def test_pings_flow_while_beams_are_searched_and_a_hang_up_cancels_them() -> None:
    async with serving() as engine:
        app = create_app(engine, ping_interval=0.0)
        body = {"prompt": "a", "max_tokens": 1500, "use_beam_search": True, "n": 3, "stream": True}
        reply = await post(app, PATH, body, disconnect_at=20)
        assert set(reply.bodies) == {b": ping\n"}
        await idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 1


async def test_a_client_that_leaves_cancels_its_beams() -> None:
    async with serving() as engine:
        app = create_app(engine)

        def leave(reply: Reply) -> None:
            raise AssertionError("nothing is sent to who has left")

        body = {"prompt": "a", "max_tokens": 1500, "use_beam_search": True, "n": 3}
        await post(app, PATH, body, disconnect_at=0, on_message=leave)
        await idle(engine)
        assert engine.stats().num_running == 0 and engine.metrics.outcomes["stop"] == 0


async def test_stop_strings_end_beams() -> None:
    async with drawing() as app:
        plain = (await post(app, PATH, BEAMS | {"n": 3})).json()["choices"]
        stop = plain[0]["text"][2:4]
        cut = (await post(app, PATH, BEAMS | {"n": 3, "stop": stop})).json()["choices"]
        kept = (await post(app, PATH, BEAMS | {"n": 3, "stop": stop, "include_stop_str_in_output": True})).json()
        later = (await post(app, PATH, BEAMS | {"n": 3, "stop": stop, "min_tokens": 8})).json()["choices"]
    assert any(choice["stop_reason"] == stop for choice in cut)
    for choice, with_stop in zip(cut, kept["choices"], strict=True):
        assert stop not in choice["text"]
        if choice["stop_reason"] == stop:
            assert choice["finish_reason"] == "stop" and with_stop["text"] == choice["text"] + stop
    assert [choice["text"] for choice in later][:1] == [plain[0]["text"]]


async def test_the_models_defaults_do_not_count_for_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as engine:
        monkeypatch.setattr(engine, "default_sampling", lambda: {"temperature": 0.7, "repetition_penalty": 1.1})
        reply = await post(create_app(engine), PATH, BEAMS)
    assert reply.status == 200


async def test_metrics_count_whole_beams() -> None:
    async with serving() as engine:
        body = (await post(create_app(engine), PATH, BEAMS)).json()
        assert engine.metrics.num_output_tokens == body["usage"]["completion_tokens"] > 0
        assert engine.metrics.first_token.count == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": 128}, "best_of"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": True, "max_tokens": 5, "n": 100}, "n"),
        ({"use_beam_search": True, "max_tokens": 5, "n": 60}, "best_of"),
        ({"use_beam_search": True, "max_tokens": 5, "early_stopping": "often"}, "early_stopping"),
        ({"use_beam_search": True, "max_tokens": 5, "length_penalty": 1e6}, "length_penalty"),
        ({"use_beam_search": True, "max_tokens": 5, "frequency_penalty": 1}, "frequency_penalty"),
        ({"use_beam_search": True, "max_tokens": 5, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "max_tokens": 5, "bad_words": ["a"]}, "bad_words"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
async def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with application() as app:
        reply = await post(app, PATH, {"prompt": "a", **fields})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param
