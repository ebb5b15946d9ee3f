"""The endpoints over an engine with a fake model: streams and answers, refusals, clients that leave, the app itself."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from routes.app import create_app
from tests.asgi import Reply, call, get, post
from tests.serving import LETTERS, application, idle, joined, reasons, serving

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


async def test_a_completion() -> None:
    async with application() as app:
        reply = await post(
            app, "/v1/completions", {"model": "fake", "prompt": "abc", "max_tokens": 7, "temperature": 0}
        )
    body = reply.json()
    assert reply.status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "fake"
    [choice] = body["choices"]
    assert choice["text"] == "abcabca"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 7
    assert body["usage"]["total_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_completion(stream: bool) -> None:
    request = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 11,
        "temperature": 0,
        "stream": stream,
    }
    async with application() as app:
        reply = await post(app, "/v1/chat/completions", request)
    if stream:
        first = reply.events()[0]
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert joined(reply) == "user: hello"
        assert reasons(reply) == [(0, "length")]
    else:
        body = reply.json()
        assert body["object"] == "chat.completion"
        [choice] = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "user: hello"}
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["the one and the other", "naïve 中文 \U0001f600 text", "<end>"])
@pytest.mark.parametrize("stop", [None, ["e a", "\U0001f600 t"]])
async def test_joined_deltas_equal_the_text_that_is_not_streamed(prompt: str, stop: list[str] | None) -> None:
    request = {"prompt": prompt, "max_tokens": 60, "n": 3, "temperature": 1, "seed": 5, "stop": stop}
    greedy = request | {"temperature": 0}
    async with application() as app:
        for body in (request, greedy):
            whole = (await post(app, "/v1/completions", body)).json()
            stream = await post(app, "/v1/completions", body | {"stream": True})
            for choice in whole["choices"]:
                assert joined(stream, choice["index"]) == choice["text"]
            assert sorted(reasons(stream)) == [(c["index"], c["finish_reason"]) for c in whole["choices"]]


async def test_several_prompts_give_choices_prompt_major() -> None:
    request = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 4, "temperature": 0}
    async with application() as app:
        whole = (await post(app, "/v1/completions", request)).json()
        stream = await post(
            app, "/v1/completions", request | {"stream": True, "stream_options": {"include_usage": True}}
        )
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "abab"), (1, "abab"), (2, "cdcd"), (3, "cdcd")]
    assert [joined(stream, i) for i in range(4)] == ["abab", "abab", "cdcd", "cdcd"]
    assert stream.events()[-2]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 4
    assert whole["usage"]["completion_tokens"] == 16


async def test_token_ids_are_a_prompt_too() -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", {"prompt": list(LETTERS[:3]), "max_tokens": 3, "temperature": 0})
    assert reply.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("prompt", ["ab", list(LETTERS[:2])])
async def test_echo_gives_the_prompt_back_first(prompt: Any) -> None:
    request = {"prompt": prompt, "echo": True, "max_tokens": 3, "temperature": 0, "n": 2}
    async with application() as app:
        whole = (await post(app, "/v1/completions", request)).json()
        stream = await post(app, "/v1/completions", request | {"stream": True})
    assert [choice["text"] for choice in whole["choices"]] == ["ababa", "ababa"]
    assert [joined(stream, index) for index in range(2)] == ["ababa", "ababa"]


async def test_logprobs_have_both_shapes() -> None:
    async with application() as app:
        fields = {"max_tokens": 3, "temperature": 0}
        whole = (await post(app, "/v1/completions", {"prompt": "abc", "logprobs": 2, **fields})).json()
        stream = await post(app, "/v1/completions", {"prompt": "abc", "logprobs": 2, "stream": True, **fields})
        chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3, **fields}
        said = (await post(app, "/v1/chat/completions", chat)).json()
        streamed = await post(app, "/v1/chat/completions", chat | {"stream": True})
    shape = whole["choices"][0]["logprobs"]
    assert shape["tokens"] == ["a", "b", "c"]
    assert shape["text_offset"] == [0, 1, 2]
    assert shape["token_logprobs"] == [-1.0] * 3
    assert [len(top) for top in shape["top_logprobs"]] == [2] * 3
    parts = [e["choices"][0]["logprobs"] for e in stream.events()[:-1] if e["choices"][0]["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in shape} == shape
    content = said["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["u", "s", "e"]
    assert content[0]["bytes"] == [ord("u")]
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * 3
    parts = [e["choices"][0]["logprobs"] for e in streamed.events()[:-1] if e["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == content


async def test_running_usage_is_in_every_chunk() -> None:
    request = {"prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with application() as app:
        reply = await post(app, "/v1/completions", request | options)
    counts = [event["usage"]["completion_tokens"] for event in reply.events()[:-1]]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 3


async def test_unknown_fields_are_accepted_and_named_in_a_header() -> None:
    async with application() as app:
        for stream in (False, True):
            request = {"prompt": "a", "max_tokens": 1, "store": True, "bad\nname": 1, "stream": stream}
            reply = await post(app, "/v1/completions", request)
            assert reply.status == 200
            assert reply.headers["x-aserve-warning"] == "ignored unknown fields: store, bad?name"


async def test_request_ids_go_in_and_out_and_are_only_labels() -> None:
    async with application() as app:
        body = {"prompt": "a", "max_tokens": 1}
        first = await post(app, "/v1/completions", body, headers={"x-request-id": "mine"})
        again = await post(app, "/v1/completions", body, headers={"x-request-id": "mine"})
        odd = await post(app, "/v1/completions", body, headers={"x-request-id": "a b\x7f"})
        fresh = await get(app, "/health")
    assert first.headers["x-request-id"] == again.headers["x-request-id"] == "mine"
    assert first.json()["id"] != again.json()["id"]
    assert len(odd.headers["x-request-id"]) == len(fresh.headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": "a" * 3000}, None),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"prompt": ["a", "a" * 3000]}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_never_run_is_refused_before_the_stream_starts(
    body: Any, param: str | None, stream: bool
) -> None:
    async with application() as app:
        reply = await post(app, "/v1/completions", body | {"stream": stream})
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/json"
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param
        assert (await get(app, "/health")).status == 200
        assert (await post(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200


async def test_an_unknown_model_is_404() -> None:
    async with application() as app:
        for path, body in (
            ("/v1/completions", {"model": "other", "prompt": "a"}),
            ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "a"}]}),
        ):
            reply = await post(app, path, body)
            assert reply.status == 404
            assert reply.json()["error"]["code"] == "model_not_found"


async def test_a_body_over_the_limit_is_413() -> None:
    async with serving() as engine:
        app = create_app(engine, max_body_bytes=100)
        stated = await post(app, "/v1/completions", b"x" * 101, headers={"content-length": "101"})
        found = await post(app, "/v1/completions", b"x" * 101)
    for reply in (stated, found):
        assert reply.status == 413
        assert reply.headers["connection"] == "close"
        assert reply.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(stream: bool) -> None:
    async with serving() as engine:
        app = create_app(engine)
        body = {"prompt": "a", "max_tokens": 2000, "temperature": 0, "stream": stream}
        with anyio.fail_after(10):
            await post(app, "/v1/completions", body, disconnect_at=3 if stream else 0)
            await idle(engine)
        assert engine.stats().num_running == 0
        assert engine.metrics.outcomes["cancelled"] == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/health/", 404)],
)
async def test_unknown_routes_and_methods_are_errors_in_the_openai_shape(method: str, path: str, status: int) -> None:
    async with application() as app:
        reply = await call(app, method, path)
    assert reply.status == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_api_key_is_asked_for_except_by_probes() -> None:
    async with application(api_keys=("secret", "other")) as app:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer "},
        ):
            reply = await get(app, "/v1/models", headers=headers)
            assert reply.status == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for key in ("secret", "other"):
            assert (await get(app, "/v1/models", headers={"authorization": f"Bearer {key}"})).status == 200
        assert (await get(app, "/health")).status == 200


async def test_cors_is_off_unless_an_origin_is_named() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with application() as app:
        assert "access-control-allow-origin" not in (await get(app, "/v1/models", headers=headers)).headers
    async with application(cors_origins=("https://a.example",), api_keys=("k",)) as app:
        preflight = await call(app, "OPTIONS", "/v1/completions", headers=headers)
        assert preflight.status == 200
        refused = await get(app, "/v1/models", headers=headers)
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"best_of": 100}, "best_of", "best_of is 100"),
        ({"best_of": 60, "max_tokens": 2000}, "max_completion_tokens", "best_of x max_completion_tokens is 60 x 2000"),
        (
            {"best_of": 9, "use_beam_search": True, "max_tokens": 2000},
            "max_completion_tokens",
            "best_of x max_completion_tokens is 9 x 2000",
        ),
        ({"n": 60, "max_tokens": 2000}, "max_completion_tokens", "n x max_completion_tokens is 60 x 2000"),
        ({"max_tokens": 10**6}, "max_completion_tokens", "and max_completion_tokens is 1000000"),
    ],
)
async def test_what_does_not_fit_is_named_as_the_client_named_it(fields: dict[str, int], param: str, said: str) -> None:
    renamed = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in fields.items()}
    async with application(num_gpu_blocks=256, max_num_seqs=64) as app:
        error = (await post(app, "/v1/chat/completions", {"messages": HELLO, **renamed})).json()["error"]
        plain = (await post(app, "/v1/completions", {"prompt": "a", **fields})).json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert plain["param"] == param.replace("completion_", "")
    assert said.replace("completion_", "") in plain["message"]


async def test_the_lifespan_leaves_a_running_engine_alone() -> None:
    async with serving() as engine:
        app = create_app(engine)
        async with app.router.lifespan_context(app):
            engine.check()
        engine.check()


async def test_the_app_can_be_mounted_in_another() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with serving() as engine:
        host = Starlette(routes=[Mount("/llm", create_app(engine, api_keys=("k",)))])
        assert (await get(host, "/llm/health")).status == 200
        assert (await get(host, "/llm/v1/models")).status == 401
        reply = await post(
            host, "/llm/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"authorization": "Bearer k"}
        )
        assert reply.status == 200


async def test_the_openapi_document_names_every_route_and_body() -> None:
    async with application() as app:
        document = (await get(app, "/openapi.json")).json()
        routes = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) == routes - {"/openapi.json"}
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "tools"} <= set(fields)


async def test_a_bug_is_a_500_in_the_openai_shape_that_carries_the_request_id() -> None:
    async with serving() as engine:
        app = create_app(engine)
        replies: list[Reply] = []

        def broken() -> dict[str, Any]:
            raise ZeroDivisionError

        engine.default_sampling = broken  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):  # for the server's log
            await post(
                app,
                "/v1/completions",
                {"prompt": "a"},
                headers={"x-request-id": "mine"},
                on_message=lambda reply: replies.append(reply),
            )
    assert replies[0].status == 500
    assert replies[0].headers["x-request-id"] == "mine"
    assert replies[0].json()["error"]["message"] == "internal error"
