"""HTTP and server-sent events over a bare socket: a client that can be slow, rude, or many, at little cost.

Black box: it knows a server by its URL alone, so that what uses it runs against any.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit


class Wire:
    """One connection with one request on it. Reads only when asked to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.comments = 0
        self.last_id = ""

    @classmethod
    async def open(cls, url: str, *, receive_buffer: int | None = None) -> Wire:
        """Connects. A small receive buffer makes a slow reader felt soon."""
        return await cls.take_over(await connect(url, receive_buffer=receive_buffer))

    @classmethod
    async def take_over(cls, sock: socket.socket, received: bytes = b"") -> Wire:
        """Reads on from a connection, of which `received` was read already."""
        reader = asyncio.StreamReader()
        reader.feed_data(received)
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
        except BaseException:
            sock.close()
            raise
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Sends a request; `body` is JSON, or bytes as they are."""
        self.writer.write(request_bytes(method, path, body, headers))
        await self.writer.drain()

    async def head(self) -> int:
        """Reads status and headers."""
        first = await self.reader.readline()
        if not first:
            raise ConnectionResetError("closed before an answer")
        self.status = int(first.split()[1])
        while (line := (await self.reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's pieces. Raises ConnectionError or IncompleteReadError where it is cut."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[Any]:
        """The data of each event, "[DONE]" as it is. Comments are counted."""
        buffer = b""
        data = ""
        last_id = ""
        async for chunk in self.chunks():
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    data = line[6:].decode()
                elif line.startswith(b"id: "):
                    last_id = line[4:].decode()
                elif line.startswith(b":"):
                    self.comments += 1
                elif not line and data:
                    self.last_id, last = last_id, data
                    data = ""
                    yield last if last == "[DONE]" else json.loads(last)

    def close(self, *, reset: bool = False) -> None:
        """Hangs up; with `reset` the hard way."""
        if reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.writer.transport.abort()
        self.writer.close()


class Drip:
    """A connection that takes what it is told to and no more: it has no buffer, and the system little for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""

    @classmethod
    async def open(cls, url: str, request: bytes) -> Drip:
        """Connects and sends."""
        sock = await connect(url, receive_buffer=1)  # the system makes it as small as it goes
        await asyncio.get_running_loop().sock_sendall(sock, request)
        return cls(sock)

    async def read(self, rate: int, until: float) -> None:
        """Takes exactly `rate` bytes each second, until that time of the loop's clock or the end."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while due < until:
                    due += 1.0
                    left = rate
                    while left:
                        data = await loop.sock_recv(self.sock, left)
                        if not data:
                            return
                        left -= len(data)
                        self.received += data
                    await asyncio.sleep(due - loop.time())

    async def rest(self) -> Wire:
        """As fast as it comes from here on, with what was taken before."""
        return await Wire.take_over(self.sock, self.received)

    def close(self) -> None:
        """Hangs up."""
        self.sock.close()


async def connect(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection that does not block."""
    parts = urlsplit(url)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    except BaseException:
        sock.close()
        raise
    return sock


def request_bytes(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """A request as it goes over the wire; `body` is JSON, or bytes as they are."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {len(raw)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


async def fetch(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """A request and its whole answer."""
    wire = await Wire.open(url)
    try:
        await wire.send(method, path, body, headers)
        return await wire.head(), await wire.body()
    finally:
        wire.close()


async def stream_text(url: str, body: Any, path: str = "/v1/completions") -> str:
    """The text of a streamed completion. Raises RuntimeError for an answer or an end that is no success."""
    wire = await Wire.open(url)
    try:
        await wire.send("POST", path, {**body, "stream": True})
        if await wire.head() != 200:
            raise RuntimeError(f"{wire.status}: {(await wire.body())!r}")
        return await read_text(wire)
    finally:
        wire.close()


async def read_text(wire: Wire) -> str:
    """The rest of a stream's text, to [DONE]."""
    text = ""
    async for event in wire.events():
        if event == "[DONE]":
            return text
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        text += "".join(choice["text"] for choice in event["choices"])
    raise RuntimeError("the stream ended without [DONE]")


async def gauges(url: str) -> dict[str, float]:
    """/metrics, by name and labels."""
    _, body = await fetch(url, "GET", "/metrics")
    found = re.findall(r"^(aserve_\S+) (\S+)$", body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


async def idle(url: str, seconds: float) -> dict[str, float]:
    """Waits until nothing runs, waits or holds memory. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            now = await gauges(url)
            if not any(now[f"aserve_{name}"] for name in ("kv_blocks_used", "requests_running", "requests_waiting")):
                return now
