"""Server-sent events: an engine stream in, `text/event-stream` bytes out, one raw ASGI send per batch of deltas.

endpoint.py gives it one renderer per engine stream, which turns a delta into an event (chunks.py); this file owns
what goes around events: headers, comment pings on a wall clock, the client leaving, an error after the first byte
(one unnamed event with an error object, then the end, no [DONE]), usage and [DONE].

sse-starlette is not used. Its event costs three times a raw send (20 us against 7 of CPU), its response
cannot write several events at once, and it watches for exit by polling and by patching uvicorn, where server.py
drains at the signal. What is left to take from it is the framing, which the templates here do once per stream.

Every `send` is a number of whole events, so concurrent writers (several prompts, the ping) never cut one another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
from starlette.types import Receive, Scope, Send

from aserve import AserveError, Delta, RequestFailedError, Stream
from routes.http import watch_disconnect
from routes.records import Record, abnormal

log = logging.getLogger("aserve.routes")

PING = b": ping\n"  # a blank line after it would end an empty event, on which the OpenAI SDK fails once it has an id
DONE = "data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx: pass each event on at once
]


class Renderer(Protocol):
    """Turns a delta into one SSE event, or "" where there is nothing to say yet."""

    def opening(self) -> str:
        """Events that go before the first delta."""
        ...

    def render(self, delta: Delta) -> str: ...

    def closing(self) -> str:
        """Events that go after the last finish reason of all."""
        ...


def error_event(error: AserveError) -> str:
    """One unnamed event holding the error object."""
    return f"data: {json.dumps(error.wire(), separators=(',', ':'))}\n\n"


class EventStream:
    """An ASGI response that streams engine streams, each through its renderer, and closes them whatever happens.

    `closing` gives the events after the last finish reason (usage), before `done`; `failing` the one in their place.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Stream, Renderer]],
        record: Record,
        *,
        closing: Callable[[], str] = str,
        failing: Callable[[AserveError], str] = error_event,
        done: str = DONE,
        ping_interval: float = 15.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._sources = sources
        self._record = record
        self._closing = closing
        self._failing = failing
        self._done = done
        self._ping_interval = ping_interval
        self._headers = _HEADERS + [(k.encode("ascii"), v.encode("ascii")) for k, v in (headers or {}).items()]
        self._error: AserveError | None = None
        self._busy = 0  # sends that the server has not taken yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        finished = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async with anyio.create_task_group() as side:
                side.start_soon(watch_disconnect, receive, side.cancel_scope)
                side.start_soon(self._ping, send)
                await self._pump_all(send)
                finished = True
                side.cancel_scope.cancel()
            if finished:
                last = self._failing(self._error) if self._error else self._closing() + self._done
                await send({"type": "http.response.body", "body": last.encode("ascii"), "more_body": False})
        finally:
            self._record.finish(self._error, gone=not finished)
            with anyio.CancelScope(shield=True):
                for stream, _ in self._sources:
                    await stream.aclose()

    async def _pump_all(self, send: Send) -> None:
        """A task per engine stream: each token then wakes a short chain of frames, not every layer of the app."""
        with self._record.cancellable() as scope:
            async with anyio.create_task_group() as pumps:
                for stream, frames in self._sources:
                    pumps.start_soon(self._pump, stream, frames, send, pumps.cancel_scope)
        if scope.cancelled_caught:
            self._error = self._record.cancellation

    async def _pump(self, stream: Stream, frames: Renderer, send: Send, scope: anyio.CancelScope) -> None:
        """Writes one stream's events until each choice has ended. A failure is kept, and ends the others (`scope`)."""
        unfinished = stream.n
        opened = False
        try:
            while unfinished:
                if not await stream.ready():
                    raise RequestFailedError("the stream ended without a finish reason")
                text = ""
                failure = None
                if not opened:
                    opened = True
                    self._record.token()
                    text = frames.opening()
                for delta in stream.take_nowait():
                    if delta.finish_reason is not None:
                        if failure := abnormal(delta.finish_reason):
                            break
                        unfinished -= 1
                    text += frames.render(delta)
                if text:
                    self._busy += 1
                    await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
                    self._busy -= 1
                if failure is not None:
                    raise failure
        except AserveError as error:
            self._error = self._error or error
        except Exception:
            log.exception("stream %s failed", stream.key)
            self._error = self._error or RequestFailedError("internal error")
        if self._error:
            scope.cancel()

    async def _ping(self, send: Send) -> None:
        """Comments on a wall clock, from the response's start to its end, except while bytes wait to be sent."""
        while True:
            await anyio.sleep(self._ping_interval)
            if not self._busy:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
