"""What operators and tools ask: token ids, models, health, load, metrics, and cancelling a request."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest

from aserve import Tokenizer
from aserve.tokenizer_files import load
from routes.app import create_app
from tests.asgi import Reply, call, get, post
from tests.serving import VOCAB_SIZE, application, idle, serving, write_tokenizer

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


def _tooled() -> Tokenizer:
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ tone }}{{ messages[0].content }}"
    with TemporaryDirectory() as name:
        write_tokenizer(Path(name), chat_template=template)
        return load(Path(name))


TOOLED = _tooled()  # made at import: reading files inside a test would block its loop


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with application() as app:
        ids = (await post(app, "/tokenize", {"prompt": "the 中"})).json()
        assert ids["count"] == len(ids["tokens"])
        text = (await post(app, "/detokenize", {"tokens": ids["tokens"]})).json()
        assert text == {"prompt": "the 中"}
        chat = (await post(app, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
        assert (await post(app, "/detokenize", {"tokens": chat["tokens"]})).json()["prompt"] == "user: hi\nassistant: "
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {"tokens": [VOCAB_SIZE]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [1.5]}),
        ):
            assert (await post(app, path, body)).status == 400


async def test_tokenize_sees_what_chat_sees() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "chat_template_kwargs": {"tone": "ok "}}
    async with application(tokenizer=TOOLED) as app:
        told = await post(app, "/tokenize", chat | {"return_token_strs": True})
        usage = (await post(app, "/v1/chat/completions", chat | {"max_tokens": 1})).json()["usage"]
        text = (await post(app, "/detokenize", {"tokens": told.json()["tokens"], "x": 1})).json()["prompt"]
    assert text == "weather ok hi"
    assert usage["prompt_tokens"] == told.json()["count"]
    assert told.headers["x-aserve-warning"] == "ignored unknown fields: return_token_strs"


async def test_operators_routes_answer() -> None:
    async with application() as app:
        await post(app, "/v1/completions", {"prompt": "ab", "max_tokens": 3})
        assert (await get(app, "/health")).json() == {"status": "ok"}
        assert (await get(app, "/ready")).status == 200
        assert (await get(app, "/version")).json()["version"]
        assert (await get(app, "/load")).json()["server_load"] == 0
        metrics = (await get(app, "/metrics")).body.decode()
    assert 'aserve_requests_total{outcome="length"} 1.0' in metrics
    assert "aserve_output_tokens_total 3.0" in metrics
    assert 'aserve_time_to_first_token_seconds_bucket{le="+Inf"} 1.0' in metrics


async def test_a_draining_engine_refuses_and_says_when_to_come_back() -> None:
    async with serving() as engine:
        app = create_app(engine)
        await engine.stop()
        reply = await post(app, "/v1/completions", {"prompt": "a"})
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.headers["connection"] == "close"
        assert (await get(app, "/health")).status == 503


async def test_models_are_listed_and_found() -> None:
    async with serving() as engine:
        app = create_app(engine, served_model_names=["one", "org/two"])
        listed = (await get(app, "/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["one", "org/two"]
        assert (await get(app, "/v1/models/org/two")).json()["id"] == "org/two"
        assert (await get(app, "/v1/models/fake")).status == 404
        reply = await post(app, "/v1/completions", {"model": "org/two", "prompt": "a", "max_tokens": 1})
        assert reply.json()["model"] == "org/two"


@pytest.mark.parametrize("stream", [False, True])
async def test_delete_cancels_a_request_and_its_client_gets_an_error(stream: bool) -> None:
    async with serving() as engine:
        app = create_app(engine)
        live = app.router.routes[0].app.live  # type: ignore[attr-defined]
        replies: list[Reply] = []

        async def run() -> None:
            body = {"prompt": "a", "max_tokens": 2000, "temperature": 0, "stream": stream}
            replies.append(await post(app, "/v1/completions", body))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                while not len(live):
                    await anyio.lowlevel.checkpoint()
                [key] = live._records
                deleted = await call(app, "DELETE", f"/v1/requests/cmpl-{key}")
        assert deleted.status == 200
        again = await call(app, "DELETE", f"/v1/requests/cmpl-{key}")
        assert again.status == 404
        error = replies[0].events()[-1] if stream else replies[0].json()
        assert error["error"]["code"] == "request_cancelled"
        await idle(engine)
