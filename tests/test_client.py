"""The client against scripted servers: typed deltas, every way a stream can end, and hanging up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import anyio
import httpx
import pytest

from aserve import (
    AserveError,
    AuthenticationError,
    ChatDelta,
    Client,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    MediaTypeError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
    RequestTooLargeError,
    ToolCallDelta,
    TooManyRequestsError,
)
from tests.engine_util import VIRTUAL

pytestmark = pytest.mark.anyio


class Script(httpx.AsyncByteStream):
    """A body sent in given pieces, which notes how far it was read and that it was closed."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.sent = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.sent += 1
            yield piece

    async def aclose(self) -> None:
        self.closed = True


def client(script: Script, status: int = 200, seen: list[dict[str, Any]] | None = None) -> Client:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "the-model"}]})
        if seen is not None:
            seen.append({"path": request.url.path, **json.loads(request.content)})
        return httpx.Response(status, stream=script)

    return Client(http=httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test"))


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def text(content: str, reason: str | None = None, index: int = 0) -> bytes:
    return event(choices=[{"index": index, "text": content, "finish_reason": reason}])


async def test_deltas_arrive_typed_whatever_the_cut() -> None:
    body = b": ping\n\n" + text("a\u2028b 🎉") + text("", "stop") + event(choices=[]) + b"data: [DONE]\n\n"
    for size in (1, 3, 7, len(body)):
        seen: list[dict[str, Any]] = []
        script = Script([body[at : at + size] for at in range(0, len(body), size)])
        deltas = [delta async for delta in client(script, seen=seen).complete("hi", max_tokens=5)]
        assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a\u2028b 🎉", None), ("", "stop")]
        assert seen == [
            {"path": "/v1/completions", "prompt": "hi", "max_tokens": 5, "stream": True, "model": "the-model"}
        ]


async def test_chat_deltas_are_read_from_content() -> None:
    seen: list[dict[str, Any]] = []
    chunks = [{"role": "assistant", "content": ""}, {"content": "hey"}, {}]
    body = [event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in chunks]
    chat = client(Script([*body, b"data: [DONE]\n\n"]), seen=seen).chat([{"role": "user", "content": "x"}], model="m")
    assert [delta.text async for delta in chat] == ["", "hey", ""]
    assert (seen[0]["path"], seen[0]["model"]) == ("/v1/chat/completions", "m")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidRequestError),
        (401, AuthenticationError),
        (404, NotFoundError),
        (413, RequestTooLargeError),
        (415, MediaTypeError),
        (429, TooManyRequestsError),
        (504, DeadlineError),
        (503, OverloadedError),
        (500, RequestFailedError),
    ],
)
async def test_a_refusal_is_raised_as_its_own_error(status: int, error: type[AserveError]) -> None:
    body = json.dumps({"error": {"message": "no such thing", "param": "prompt"}}).encode()
    with pytest.raises(error, match="no such thing"):
        await anext(aiter(client(Script([body]), status).complete("x")))
    with pytest.raises(error, match=f"HTTP {status}"):  # a proxy's page, not ours
        await anext(aiter(client(Script([b"<html>"]), status).complete("x")))


@pytest.mark.parametrize(
    ("status", "header", "seconds"), [(429, "7", 7.0), (503, "30", 30.0), (503, "Tue, 1 Dec", 1.0)]
)
async def test_a_busy_server_says_when_to_try_again(status: int, header: str, seconds: float) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"error": {"message": "busy"}}, headers={"Retry-After": header})

    busy = Client(http=httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test"))
    with pytest.raises(OverloadedError, match="busy") as caught:
        await busy.models()
    assert caught.value.retry_after == seconds


async def test_chat_deltas_have_reasoning_and_tool_calls() -> None:
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    pieces = [begun, {"index": 0, "function": {"arguments": "{}"}}]
    chunks = [{"reasoning_content": "hm"}, *({"tool_calls": [piece]} for piece in pieces)]
    body = [event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in chunks]
    chat = client(Script([*body, b"data: [DONE]\n\n"])).chat([{"role": "user", "content": "x"}])
    deltas = [delta async for delta in chat]
    assert all(isinstance(delta, ChatDelta) for delta in deltas)
    assert [delta.reasoning for delta in deltas] == ["hm", "", ""]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert calls == [ToolCallDelta(0, "c1", "f", ""), ToolCallDelta(0, "", "", "{}")]


@pytest.mark.parametrize(
    ("code", "error"),
    [("deadline_exceeded", DeadlineError), ("engine_dead", EngineDeadError), ("request_cancelled", RequestFailedError)],
)
async def test_an_error_in_mid_stream_has_its_class_by_its_code(code: str, error: type[AserveError]) -> None:
    script = Script([text("a"), event(error={"message": "it ended", "code": code})])
    with pytest.raises(error, match="it ended") as caught:
        _ = [delta async for delta in client(script).complete("x")]
    assert type(caught.value) is error
    assert caught.value.code == code


async def test_an_error_inside_the_stream_is_raised() -> None:
    script = Script([text("a"), event(error={"message": "broken"})])
    with pytest.raises(RequestFailedError, match="broken"):
        _ = [delta async for delta in client(script).complete("x")]


async def test_a_stream_cut_short_is_no_clean_end() -> None:
    with pytest.raises(RequestFailedError, match="before its end"):
        _ = [delta async for delta in client(Script([text("a")])).complete("x")]


async def test_closing_the_iteration_hangs_up() -> None:
    script = Script([text("a"), text("b"), text("c")])
    async with client(script) as caller, aclosing(caller.complete("x")) as deltas:
        async for _ in deltas:
            break
    assert script.closed
    assert script.sent == 1


class Cut(httpx.AsyncByteStream):
    """A body after which the connection breaks, unless it is the last."""

    def __init__(self, body: bytes, *, last: bool) -> None:
        self.body = body
        self.last = last

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.body
        if not self.last:
            raise httpx.ReadError("connection reset")


def numbered(number: int, content: str) -> bytes:
    return f"id: k:{number}\n".encode() + text(content)


def cut_server(parts: list[bytes], seen: list[tuple[str, str, str | None]], *, gone: bool = False) -> Client:
    """Gives one part per connection. After the last, with `gone`, it knows the stream no more."""

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, request.headers.get("last-event-id")))
        if request.method == "DELETE":
            return httpx.Response(200, json={})
        if not parts:
            return httpx.Response(404 if gone else 502, json={"error": {"message": "no stream"}})
        body = parts.pop(0)
        return httpx.Response(200, stream=Cut(body, last=not parts), headers={"x-stream-id": "k"})

    return Client(http=httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://test"))


async def test_a_lost_connection_is_made_again_after_the_last_whole_event() -> None:
    seen: list[tuple[str, str, str | None]] = []
    whole = numbered(1, "a") + numbered(2, "b")
    parts = [
        b"",
        whole + numbered(3, "lost")[:-1],
        numbered(3, "c"),
        b": ping\n" + numbered(4, "d") + b"data: [DONE]\n\n",
    ]
    deltas = cut_server(parts, seen).complete("x", model="m")
    assert [delta.text async for delta in deltas] == ["a", "b", "c", "d"]
    assert seen == [
        ("POST", "/v1/completions", None),
        ("GET", "/v1/streams/k", None),
        ("GET", "/v1/streams/k", "k:2"),
        ("GET", "/v1/streams/k", "k:3"),
    ]


async def test_a_stream_that_the_server_no_longer_has_is_an_error() -> None:
    seen: list[tuple[str, str, str | None]] = []
    broken = numbered(1, "a")
    with pytest.raises(NotFoundError):
        _ = [delta async for delta in cut_server([broken, b""], seen, gone=True).complete("x", model="m")]


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
async def test_a_server_that_stays_away_is_given_up_after_the_grace(anyio_backend: object) -> None:
    seen: list[tuple[str, str, str | None]] = []
    began = anyio.current_time()
    with pytest.raises(RequestFailedError, match="30 s"):
        _ = [delta async for delta in cut_server([numbered(1, "a"), b""], seen).complete("x", model="m")]
    assert 30 <= anyio.current_time() - began < 33
    assert 30 < len(seen) < 50
    assert seen[-1][0] == "DELETE"


async def test_closing_the_iteration_cancels_a_request_that_would_wait() -> None:
    seen: list[tuple[str, str, str | None]] = []
    async with aclosing(cut_server([numbered(1, "a"), b""], seen).complete("x", model="m")) as deltas:
        async for _ in deltas:
            break
    assert seen[-1][:2] == ("DELETE", "/v1/requests/k")
