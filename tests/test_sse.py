"""What goes around the events of a stream, with streams whose deltas the test pushes itself."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from aserve import Delta, RequestFailedError, SamplingParams
from aserve.request import Request
from aserve.stream import Mailbox, Stream
from routes.chunks import ChunkFrames, Job
from routes.records import Record
from routes.schemas import CompletionBody, StreamOptions
from routes.sse import PING, EventStream
from tests.asgi import Reply, call

pytestmark = pytest.mark.anyio
ENVELOPE = {"id": "cmpl-1", "model": "m"}


class Source:
    """A stream and the engine's end of it."""

    def __init__(self, key: str = "k", n: int = 1) -> None:
        self.cancelled = False
        self.box = Mailbox(asyncio.get_running_loop(), self._cancel)
        self.box.request = Request(1, key, (5, 6), SamplingParams(n=n), 0, 10, 0.0)
        self.stream = Stream(self.box, key=key, n=n)

    def _cancel(self, request: Request) -> None:
        self.cancelled = True

    def push(self, text: str, *, index: int = 0, end: Any = None, tokens: int = 1) -> None:
        self.box.push(Delta(index, text, tuple(range(tokens)), end))


def response(*sources: Source, body: CompletionBody | None = None, ping: float = 100.0) -> EventStream:
    body = body or CompletionBody(prompt="x")
    job = Job(body, SamplingParams(n=sources[0].stream.n), "m", 0, [source.stream for source in sources])
    frames = [Frames(job, i, ENVELOPE) for i in range(len(sources))]
    closing = frames[-1].closing
    pairs = list(zip(job.streams, frames, strict=True))
    return EventStream(pairs, Record("label"), closing=closing, ping_interval=ping)


class Frames(ChunkFrames):
    def choice(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "finish_reason": delta.finish_reason}


def texts(reply: Reply) -> list[str]:
    return [choice["text"] for event in reply.events() if event != "[DONE]" for choice in event["choices"]]


async def test_a_stream_has_ids_chunks_and_done() -> None:
    source = Source()
    source.push("a")
    source.push("b", end="stop")
    reply = await call(response(source), "POST", "/")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] == "no-cache"
    [chunk, done] = reply.events()
    assert chunk == {**ENVELOPE, "choices": [{"index": 0, "text": "ab", "finish_reason": "stop"}]}
    assert done == "[DONE]"
    assert reply.body.startswith(b"id: k:2\ndata: ")
    assert reply.complete


async def test_deltas_of_several_choices_that_are_there_at_once_are_one_send() -> None:
    source = Source(n=3)
    for index in range(3):
        source.push(str(index), index=index)
    async with anyio.create_task_group() as tasks:

        def on_message(reply: Reply) -> None:
            if len(reply.messages) == 2:
                for index in range(3):
                    source.push("", index=index, end="length")

        reply: Reply | None = None

        async def run() -> None:
            nonlocal reply
            reply = await call(response(source), "POST", "/", on_message=on_message)

        tasks.start_soon(run)
    assert reply is not None
    assert texts(Reply(reply.messages[:2])) == ["0", "1", "2"]
    assert [b"id: k:3" in body for body in reply.bodies[:1]] == [True]


@pytest.mark.parametrize("text", ["a\u2028b", "\u2029", "\u0085", "\r\n\n", "\x00\x1f", '"\\', "\U0001f600", "é"])
async def test_no_text_can_break_an_event(text: str) -> None:
    source = Source()
    source.push(text)

    def on_message(reply: Reply) -> None:
        if len(reply.messages) == 2:
            source.push(text, end="stop")

    reply = await call(response(source), "POST", "/", on_message=on_message)
    assert texts(reply) == [text, text]
    assert len(reply.body.decode("ascii").splitlines()) == 8  # id, data, blank, twice; [DONE], blank


async def test_text_that_is_held_back_sends_nothing() -> None:
    source = Source()

    def on_message(reply: Reply) -> None:
        if len(reply.messages) == 1:
            source.push("")
        source.push("x", end="stop")

    reply = await call(response(source), "POST", "/", on_message=on_message)
    assert texts(reply) == ["x"]


async def test_an_error_after_the_first_byte_is_one_event_and_no_done() -> None:
    source = Source()
    source.push("a")
    source.box.end(RequestFailedError("it broke"))
    reply = await call(response(source), "POST", "/")
    [chunk, error] = reply.events()
    assert chunk["choices"][0]["finish_reason"] is None
    assert error["error"]["message"] == "it broke"
    assert reply.complete


@pytest.mark.parametrize(("reason", "code"), [("deadline", "deadline_exceeded"), ("cancelled", "request_cancelled")])
async def test_an_end_that_is_no_success_is_an_error_event(reason: Any, code: str) -> None:
    source = Source()
    source.push("a")

    def on_message(reply: Reply) -> None:
        if len(reply.messages) == 2:
            source.push("", end=reason, tokens=0)

    reply = await call(response(source), "POST", "/", on_message=on_message)
    assert texts(Reply(reply.messages[:2])) == ["a"]
    assert reply.events()[-1]["error"]["code"] == code


async def test_a_stream_that_stops_short_is_an_error() -> None:
    source = Source()
    source.push("a")
    source.box.end()
    reply = await call(response(source), "POST", "/")
    assert "error" in reply.events()[-1]


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_client_that_leaves_at_any_message_cancels_the_request(at: int) -> None:
    source = Source()
    source.push("a")

    def on_message(reply: Reply) -> None:
        source.push("b")

    with anyio.fail_after(5):
        reply = await call(response(source), "POST", "/", disconnect_at=at, on_message=on_message)
    assert len(reply.messages) == at
    assert source.cancelled


async def test_a_client_that_leaves_while_queued_cancels_the_request() -> None:
    source = Source()
    with anyio.fail_after(5):
        await call(response(source), "POST", "/", disconnect_at=1)
    assert source.cancelled


async def test_pings_go_out_while_nothing_is_generated() -> None:
    source = Source()

    def on_message(reply: Reply) -> None:
        if reply.bodies.count(PING) == 3 and not source.box.ended:
            source.push("a", end="stop")
            source.box.end()

    with anyio.fail_after(5):
        reply = await call(response(source, ping=0.0), "POST", "/", on_message=on_message)
    assert reply.bodies[:3] == [PING] * 3
    assert texts(reply) == ["a"]


async def test_a_ping_never_waits_behind_bytes_that_the_client_does_not_take() -> None:
    """While a send is blocked, no ping is queued after it."""
    source = Source()
    source.push("a")
    stuck = anyio.Event()
    pings = 0

    async def receive() -> Any:
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        nonlocal pings
        if message.get("body") == PING:
            pings += 1
        elif message.get("body"):
            stuck.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        scope: Any = {"type": "http"}
        tasks.start_soon(response(source, ping=0.0), scope, receive, send)
        await stuck.wait()
        before = pings
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert pings == before
        tasks.cancel_scope.cancel()
    assert source.cancelled


async def test_several_prompts_are_one_stream_with_prompt_major_indexes() -> None:
    first, second = Source("k1", n=2), Source("k2", n=2)
    for source, name in ((first, "a"), (second, "b")):
        for index in range(2):
            source.push(f"{name}{index}", index=index, end="stop")
    reply = await call(response(first, second), "POST", "/")
    events = reply.events()
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert sorted((choice["index"], choice["text"]) for choice in choices) == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]


async def test_one_failure_among_several_prompts_ends_them_all() -> None:
    first, second = Source("k1"), Source("k2")
    first.push("a")
    second.box.end(RequestFailedError("it broke"))
    with anyio.fail_after(5):
        reply = await call(response(first, second), "POST", "/")
    assert reply.events()[-1]["error"]["message"] == "it broke"
    assert first.cancelled


async def test_usage_comes_once_after_the_last_finish_and_before_done() -> None:
    source = Source()
    source.push("a", end="stop")
    body = CompletionBody(prompt="x", stream_options=StreamOptions(include_usage=True))
    reply = await call(response(source, body=body), "POST", "/")
    [chunk, usage, done] = reply.events()
    assert chunk["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 2
    assert done == "[DONE]"


async def test_a_cancelled_record_ends_its_stream_with_an_error_event() -> None:
    source = Source()
    source.push("a")
    events = response(source)

    def on_message(reply: Reply) -> None:
        if len(reply.messages) == 2:
            events._record.cancel("cancelled by request")

    with anyio.fail_after(5):
        reply = await call(events, "POST", "/", on_message=on_message)
    assert reply.events()[-1]["error"]["code"] == "request_cancelled"
    assert reply.complete
    assert source.cancelled
