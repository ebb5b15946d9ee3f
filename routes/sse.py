"""Server-sent events: an engine stream in, `text/event-stream` bytes out, one raw ASGI send per batch of deltas.

endpoint.py gives it one renderer per engine stream, which turns a delta into an event (chunks.py); this file owns
what goes around events: headers, comment pings on a wall clock, the client leaving, an error after the first byte
(one unnamed event with an error object, then the end, no [DONE]), usage and [DONE].

sse-starlette serves the dashboard, not tokens. Its event costs three times a raw send (20 us against 7 of CPU), its
response cannot write several events at once, and it learns of an exit by polling uvicorn's state, where server.py
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
_MAX_COMMENTS = 256  # bytes that wait while nothing can be sent
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


class _Source:
    """One engine stream on its way to the wire."""

    __slots__ = ("frames", "opened", "stream", "unfinished")

    def __init__(self, stream: Stream, frames: Renderer) -> None:
        self.stream = stream
        self.frames = frames
        self.opened = False
        self.unfinished = stream.n  # choices


class EventStream:
    """An ASGI response that streams engine streams, each through its renderer, and closes them whatever happens.

    `closing` gives the events after the last finish reason (usage), before `done`; `failing` the one in their place.
    resume.py calls `deliver` in place of the response, once per connection, and closes the streams itself.
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
        self.streams = [stream for stream, _ in sources]
        self.headers = dict(headers or {})
        self._sources = [_Source(stream, frames) for stream, frames in sources]
        self._record = record
        self._closing = closing
        self._failing = failing
        self._done = done
        self._ping_interval = ping_interval
        self._comments = b""  # to send before the next ping is due
        self._commented = anyio.Event()
        for stream in self.streams:
            stream.on_change(self._comment)
        self._error: AserveError | None = None
        self._busy = 0  # sends that the server has not taken yet
        self._ending: str | None = None  # [DONE] or the error, once every choice has ended
        self._connection = anyio.CancelScope()
        self._keep: Callable[[str], None] | None = None
        self._order = anyio.Lock()

    def keep(self, journal: Callable[[str], None]) -> None:
        """Hands every event to a journal before it is sent."""
        self._keep = journal

    def interrupt(self) -> None:
        """Ends the `deliver` in progress, as if its client had left."""
        self._connection.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.deliver(self._record, receive, send)
        finally:
            for stream in self.streams:
                stream.cancel()

    async def deliver(self, record: Record, receive: Receive, send: Send, replay: str = "") -> bool:
        """Sends `replay`, then what has not been sent. False where the client left before the end."""
        whole = False
        self._record = record
        self._busy = 0
        headers = _HEADERS + [(k.encode("ascii"), v.encode("ascii")) for k, v in self.headers.items()]
        try:
            async with anyio.create_task_group() as side:
                self._connection = side.cancel_scope
                side.start_soon(watch_disconnect, receive, side.cancel_scope)
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                side.start_soon(self._ping, send)
                if replay:
                    await send({"type": "http.response.body", "body": replay.encode("ascii"), "more_body": True})
                last = ""
                if self._ending is None:
                    await self._pump_all(send)
                    last = self._end()
                assert self._ending is not None
                self._busy += 1  # no ping may follow the end
                last += self._ending
                await send({"type": "http.response.body", "body": last.encode("ascii"), "more_body": False})
                whole = True
                side.cancel_scope.cancel()
        finally:
            record.finish(self._error, gone=not whole)
        return whole

    def _end(self) -> str:
        """Settles how the stream ends. Returns the events that go before that."""
        if self._error:
            self._ending = self._failing(self._error)
            return ""
        closing = self._closing()
        if self._keep is not None:
            self._keep(closing)
        self._ending = self._done
        return closing

    async def _pump_all(self, send: Send) -> None:
        """A task per engine stream: each token then wakes a short chain of frames, not every layer of the app."""
        with self._record.cancellable() as scope:
            async with anyio.create_task_group() as pumps:
                for source in self._sources:
                    pumps.start_soon(self._pump, source, send, pumps.cancel_scope)
        if scope.cancelled_caught:
            self._error = self._record.cancellation

    async def _pump(self, source: _Source, send: Send, scope: anyio.CancelScope) -> None:
        """Writes one stream's events until each choice has ended. A failure is kept, and ends the others (`scope`)."""
        stream, frames = source.stream, source.frames
        try:
            while source.unfinished:
                if not await stream.ready():
                    raise RequestFailedError("the stream ended without a finish reason")
                text = ""
                failure = None
                if not source.opened:
                    source.opened = True
                    self._record.token()
                    text = frames.opening()
                for delta in stream.take_nowait():
                    if delta.finish_reason is not None:
                        if failure := abnormal(delta.finish_reason):
                            break
                        source.unfinished -= 1
                    text += frames.render(delta)
                if text:
                    message = {"type": "http.response.body", "body": text.encode("ascii"), "more_body": True}
                    self._busy += 1
                    if self._keep is None:
                        await send(message)
                    else:
                        self._keep(text)
                        async with self._order:  # first come, first sent: offsets grow on the wire too
                            await send(message)
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

    def _comment(self, change: str) -> None:
        """A stream that pauses for want of memory says so."""
        if len(self._comments) < _MAX_COMMENTS:
            self._comments += f": {change}\n".encode("ascii")
        self._commented.set()

    async def _ping(self, send: Send) -> None:
        """Comments: what there is to say, and a ping on a wall clock from the response's start to its end. None is
        sent while bytes wait."""
        while True:
            with anyio.move_on_after(self._ping_interval):
                await self._commented.wait()
            self._commented = anyio.Event()
            if not self._busy:
                comments, self._comments = self._comments or PING, b""
                await send({"type": "http.response.body", "body": comments, "more_body": True})
