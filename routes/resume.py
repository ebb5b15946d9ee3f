"""Streams that outlive their connection: a client that was cut off comes back and goes on where it stopped.

A stream with a grace period keeps a journal of its events from the first one on, since bytes written are not bytes
received. When its client leaves, the engine's streams run on, unread, until it is back or the grace is over: no task
is needed for that, only a timer. endpoint.py opens a session; GET /v1/streams/{request}, or the first POST again, with
Last-Event-ID, goes on with it. Only the API key that opened it may.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from bisect import bisect_right

import anyio
from starlette.types import Receive, Scope, Send

from aserve import AserveError, InvalidRequestError, NotFoundError
from routes.http import endpoint_errors, header
from routes.records import Live, Record
from routes.sse import EventStream

MAX_KEPT_BYTES = 64 << 20  # journals of streams that have ended: past it the oldest go


class TakenOverError(AserveError):
    """A newer connection reads the stream."""

    status = 409
    type = "invalid_request_error"
    code = "stream_taken_over"


class Journal:
    """The events of one stream, by the offsets in their ids. Past `limit` bytes the oldest are dropped."""

    def __init__(self, key: str, limit: int) -> None:
        self._head = len(f"id: {key}:")
        self._limit = limit
        self._offsets: list[int] = []
        self._events: list[str] = []
        self._dropped = 0  # offset of the last event that is not kept
        self.size = 0  # bytes

    def add(self, text: str) -> None:
        """Keeps events, each with its id line first and offsets that grow."""
        for event in text.split("\n\n")[:-1]:
            self._offsets.append(int(event[self._head : event.index("\n")]))
            self._events.append(event)
            self.size += len(event) + 2
        if self.size > self._limit:
            self._drop()

    def _drop(self) -> None:
        """Down to three quarters of the limit at once, so that dropping costs little per event."""
        count = 0
        while self.size > self._limit * 3 // 4 and count < len(self._events) - 1:
            self.size -= len(self._events[count]) + 2
            count += 1
        if count:
            self._dropped = self._offsets[count - 1]
            del self._offsets[:count], self._events[:count]

    def since(self, offset: int) -> str:
        """The events after that offset. Raises NotFoundError where some of them are gone, or it was never reached."""
        last = self._offsets[-1] if self._offsets else self._dropped
        if not self._dropped <= offset <= last:
            raise NotFoundError(
                f"the stream cannot go on after {offset}: its journal has {self._dropped} to {last}",
                code="position_lost",
            )
        return "".join([f"{event}\n\n" for event in self._events[bisect_right(self._offsets, offset) :]])


class Session:
    """One resumable stream. One connection at a time reads it; a newer one takes it over."""

    def __init__(
        self, events: EventStream, journal: Journal, *, grace: float, owner: bytes | None, request: tuple[str, bytes]
    ) -> None:
        self.events = events
        self.journal = journal
        self.grace = grace  # seconds
        self.owner = owner  # digest of the API key that opened it
        self.request = request  # path and digest of the body
        self.timer: asyncio.TimerHandle | None = None  # ends the grace
        self.over = False
        self._turn = anyio.Lock()  # held by the connection that reads
        self._latest = 0

    @property
    def key(self) -> str:
        """The id of the stream, as in its events' ids."""
        return self.events.streams[0].key

    async def read(self, record: Record, receive: Receive, send: Send, *, after: int) -> bool:
        """Sends what comes after an offset, to the end (True) or until the client leaves (False)."""
        self._latest = ticket = self._latest + 1
        self.events.interrupt()
        async with self._turn:
            if ticket != self._latest:
                raise TakenOverError("a newer connection reads this stream")
            if self.over:
                raise unknown(self.key)
            replay = self.journal.since(after)
            if self.timer is not None:
                self.timer.cancel()
            for stream in self.events.streams:
                stream.attach()
            return await self.events.deliver(record, receive, send, replay)

    def close(self) -> None:
        """Ends it, and cancels what is unfinished."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        self.events.interrupt()
        for stream in self.events.streams:
            stream.cancel()


class Sessions:
    """Resumable streams by id, from their first event until the grace after their last connection is over.

    `grace` is what a request gets that asks for none, `max_grace` what one may ask for with X-Resume-Grace: seconds.
    `limit` bounds, in bytes, each journal and what waits unread while a client is away.
    """

    def __init__(self, live: Live, *, grace: float, max_grace: float, limit: int) -> None:
        self._live = live
        self._grace = grace
        self._max_grace = max(grace, max_grace)
        self._limit = limit
        self._sessions: dict[str, Session] = {}
        self._kept: dict[Session, None] = {}  # their streams have ended; oldest first
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def grace_of(self, scope: Scope) -> float:
        """The grace of a new stream. Raises InvalidRequestError for a header that is no number."""
        asked = header(scope, b"x-resume-grace")
        if asked is None:
            return self._grace
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not seconds >= 0:
            raise InvalidRequestError("X-Resume-Grace must be a number of seconds, 0 or more", param="x-resume-grace")
        return min(seconds, self._max_grace)

    async def open(
        self, events: EventStream, grace: float, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serves the first connection of a stream that may be resumed."""
        journal = Journal(events.streams[0].key, self._limit)
        events.keep(journal.add)
        events.headers |= {"x-stream-id": events.streams[0].key, "x-resume-grace": f"{grace:g}"}
        session = Session(events, journal, grace=grace, owner=_owner(scope), request=_identity(scope, body))
        self._sessions[session.key] = session
        await self._read(session, 0, scope, receive, send)

    async def resume(self, scope: Scope, receive: Receive, send: Send, *, body: bytes | None = None) -> None:
        """Serves a later connection. With the `body` of a POST, that must be the one that opened the stream.

        Raises NotFoundError where the stream is unknown, over, or another key's.
        """
        last = header(scope, b"last-event-id") or ""
        named, _, offset = last.rpartition(":")
        key = named if body is not None else scope["path_params"]["id"].rpartition("-")[2]
        session = self._sessions.get(key)
        if session is None or session.owner != _owner(scope):
            raise unknown(key)
        if body is not None and session.request != _identity(scope, body):
            raise InvalidRequestError("Last-Event-ID names a stream of another request", param="last-event-id")
        if last and (named != key or not offset.isascii() or not offset.isdigit()):
            raise InvalidRequestError("Last-Event-ID must be the id of an event of this stream", param="last-event-id")
        await self._read(session, int(offset or 0), scope, receive, send)

    async def _read(self, session: Session, after: int, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["aserve.record"]
        self._live.add(record, session.events.streams)
        try:
            whole = await session.read(record, receive, send, after=after)
        except AserveError:  # refused: the session goes on as it was
            raise
        except BaseException:  # a cancelled task ends the request, grace or not
            self._end(session)
            raise
        if session.over:
            self._end(session)
            return
        if whole:
            for stream in session.events.streams:  # those that an error cut short
                stream.cancel()
            self._live.remove(record)
            self._keep(session)
        else:
            record.away = lambda: self._end(session)
            for stream in session.events.streams:
                stream.detach(self._limit)
        session.timer = asyncio.get_running_loop().call_later(session.grace, self._end, session)

    def _keep(self, session: Session) -> None:
        """Its streams have ended; the client may yet have lost the last events."""
        if session in self._kept:
            return
        self._kept[session] = None
        self._kept_bytes += session.journal.size
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._end(next(iter(self._kept)))

    def _end(self, session: Session) -> None:
        session.close()
        if self._sessions.pop(session.key, None) is not None:
            self._live.forget(session.events.streams)
        if session in self._kept:
            del self._kept[session]
            self._kept_bytes -= session.journal.size


class StreamEndpoint:
    """GET /v1/streams/{id}. Without Last-Event-ID the stream comes from its beginning."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with endpoint_errors(scope, receive, send):
            await self._sessions.resume(scope, receive, send)


def unknown(key: str) -> NotFoundError:
    """The same whether it never was, is over, or belongs to another."""
    return NotFoundError(f"no stream {key!r} can be resumed", code="stream_not_found")


def _owner(scope: Scope) -> bytes | None:
    key: bytes | None = scope.get("aserve.api_key")
    return key


def _identity(scope: Scope, body: bytes) -> tuple[str, bytes]:
    return scope["path"], hashlib.sha256(body).digest()
