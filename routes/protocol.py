"""One connection: uvicorn's HTTP/1.1 protocol over httptools, within bounds that those two leave to others.

server.py gives it to uvicorn. A head, trailers and the framing of chunks are bounded in bytes, a request that does not
arrive is bounded in time, requests sent ahead in number, and bodies on their way in bytes over all connections. A
client that takes nothing of what is there for it is cut; one that takes it slowly, however slowly, is not. Trailers
are not headers: nobody who checked the headers has seen them. An offer to upgrade is declined, and the request served
as it is. Nothing here is on the way of a token.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from aserve import AserveError, InvalidRequestError, OverloadedError
from routes.http import error_response

MAX_HEAD_BYTES = 64 << 10  # of a head, and of framing and trailers beyond what the body explains
MAX_PIPELINED = 16  # each with at most _SLICE bytes of body until its turn comes
MAX_INCOMING_BYTES = 256 << 20  # of bodies that are not whole yet
REQUEST_SECONDS = 60.0  # from the first byte of a request to its last, and for the first request to begin
DEAF_SECONDS = 300.0  # a client that has taken nothing for so long is gone
_LOOKS = 5  # in that time
_TCP_INFO = struct.Struct("=24xI92xQ16xI")  # of linux/tcp.h: tcpi_unacked, tcpi_bytes_acked, tcpi_notsent_bytes
_SLICE = 64 << 10  # bytes parsed before the bounds are looked at


class HeadTooLargeError(InvalidRequestError):
    """The request's head has more bytes than the server takes."""

    status = 431
    code = "head_too_large"


class Protocol(HttpToolsProtocol):
    """See above. Made by uvicorn for every connection."""

    num_incoming: ClassVar[int] = 0  # bytes of bodies that are not whole yet, over all connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._whole = False  # no request is on its way
        self._num_extra = 0  # bytes of the request besides its body
        self._num_body = 0  # those that num_incoming counts
        self._fed = 0  # body bytes in the data at hand
        self._method = self._version = b""
        self._running: RequestResponseCycle | None = None  # the request being served; `cycle` is the latest to come
        self._refusal: AserveError | None = None
        self._late: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._num_taken, self._taken_at = 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        self._look_at_client()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._look):
            if timer is not None:
                timer.cancel()
        self._forget_body()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            for start in range(0, len(data), _SLICE):
                self._feed(data[start : start + _SLICE])
        except AserveError as error:
            self._refuse(error)
        except httptools.HttpParserError:
            self._refuse(self._refusal or InvalidRequestError("this is no HTTP/1.1 request"))
        else:
            self._watch()

    def _feed(self, data: bytes) -> None:
        """Parses, then looks at the bounds. Raises HttpParserError or AserveError."""
        self._num_extra += len(data)
        self._fed = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # the parser takes the rest for another protocol
            self.parser = httptools.HttpRequestParser(self)
            self._feed(self._plain_head() + data[upgrade.args[0] :])
            return
        self._num_extra = max(0, self._num_extra - 2 * self._fed)  # chunks may be small, but not all of them
        if self._num_extra > MAX_HEAD_BYTES and not self._whole:
            raise HeadTooLargeError(f"a request's head may have {MAX_HEAD_BYTES} bytes")
        if self._num_body and Protocol.num_incoming > MAX_INCOMING_BYTES:
            raise OverloadedError("too many bodies are on their way")

    def _plain_head(self) -> bytes:
        """The head just parsed, without its offer to upgrade."""
        lines = [b"%s %s HTTP/%s" % (self._method, self.url, self._version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                value = b", ".join(token for token in tokens if token not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # the parser's callbacks

    def on_message_begin(self) -> None:
        self._in_head, self._whole, self._num_extra = True, False, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.get_method() == b"CONNECT":
            raise self._stop(InvalidRequestError("this is no proxy"))
        if self.parser.should_upgrade():
            self._method, self._version = self.parser.get_method(), self.parser.get_http_version().encode()
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._stop(InvalidRequestError(f"at most {MAX_PIPELINED} requests may be sent ahead"))
        super().on_headers_complete()
        if self.pipeline:  # else nobody would notice that the client has left
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._fed += len(body)
        self._num_body += len(body)
        Protocol.num_incoming += len(body)
        if self.cycle is not self._running and len(self.cycle.body) + len(body) > _SLICE:
            raise self._stop(InvalidRequestError("a body this large must wait for the answer before it"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._whole = True
        self._forget_body()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    # bounds

    def _stop(self, error: AserveError) -> AserveError:
        """Ends parsing: httptools stops at an exception, and says only that there was one."""
        self._refusal = error
        return error

    def _refuse(self, error: AserveError) -> None:
        """Answers, unless that would fall into another answer, and hangs up."""
        if not self.transport.is_closing():
            if self._running is None or self._running.response_complete or not self._running.response_started:
                response = error_response(error)
                lines = [STATUS_LINE[error.status], b"connection: close\r\n"]
                lines += [b"%s: %s\r\n" % header for header in response.raw_headers if header[0] != b"connection"]
                self.transport.write(b"".join([*lines, b"\r\n", bytes(response.body)]))
            self.transport.close()
        self._disconnect()

    def _disconnect(self) -> None:
        """Tells the request being served, which need not be the latest."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _watch(self) -> None:
        """A timer runs while something of a request is missing, or nothing else would end an idle connection."""
        idle = self.cycle is None or self.cycle.response_complete
        if (not self._whole and not self.flow.read_paused) or (idle and self.timeout_keep_alive_task is None):
            if self._late is None:
                self._late = self.loop.call_later(REQUEST_SECONDS, self._hang_up)
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _hang_up(self) -> None:
        self._late = None
        if self.flow.read_paused:  # it is us who keep the client waiting
            self._watch()
        elif not self.transport.is_closing():
            self.transport.close()
            self._disconnect()

    def _look_at_client(self) -> None:
        """The system's own timeout (TCP_USER_TIMEOUT) cuts those who are slow, too: it counts from when the window
        last had room for all that was sent at once."""
        num_taken, waiting = _progress(self.transport)
        now = self.loop.time()
        if num_taken != self._num_taken or not waiting:
            self._num_taken, self._taken_at = num_taken, now
        elif now - self._taken_at >= DEAF_SECONDS:
            self._disconnect()
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # or the system would wait on
            self.transport.abort()
            return
        self._look = self.loop.call_later(DEAF_SECONDS / _LOOKS, self._look_at_client)

    def _forget_body(self) -> None:
        Protocol.num_incoming -= self._num_body
        self._num_body = 0


def _progress(transport: asyncio.Transport) -> tuple[int, bool]:
    """How many bytes the client's system has taken, and whether some wait for it (Linux; elsewhere none ever do)."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return 0, False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    num_unacked, num_taken, num_unsent = _TCP_INFO.unpack(info)
    return num_taken, bool(num_unacked or num_unsent or transport.get_write_buffer_size())
