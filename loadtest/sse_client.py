"""A small HTTP/1.1 client for one streamed request, on asyncio's streams and the standard library alone.

Used by bench_streams.py, where the client shares two cores with the server: it parses only what a server-sent event
needs. It must never buffer an event that has arrived, and closing it drops the connection at once, as a client that
goes away does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


class HTTPStatusError(Exception):
    """The server answered with another status than 200; the message holds the start of its body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


class Connection:
    """One connection to an http:// URL's host. One request at a time; `async with` closes it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"expected an http:// URL, got {url!r}")
        self.host, self.port = parts.hostname, parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.transport.abort()  # a reset, at once: what a killed client sends

    async def get(self, path: str) -> bytes:
        """The body of a GET, read whole. Raises HTTPStatusError."""
        body = b"".join([piece async for piece in self._request("GET", path, None)])
        return body

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object a POST answers with. Raises HTTPStatusError."""
        pieces = [piece async for piece in self._request("POST", path, body)]
        answer: dict[str, Any] = json.loads(b"".join(pieces))
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON object of each `data:` event of a streamed POST, until [DONE] or the end."""
        buffer = b""
        async for piece in self._request("POST", path, body):
            buffer += piece.replace(b"\r\n", b"\n") if b"\r" in piece else piece
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        assert self._reader is not None and self._writer is not None, "use `async with`"
        payload = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        self._writer.write(head.encode() + b"\r\n" + payload)
        status, headers = await self._head()
        pieces = self._chunks() if headers.get("transfer-encoding") == "chunked" else self._sized(headers)
        if status != 200:
            raise HTTPStatusError(status, b"".join([piece async for piece in pieces]).decode(errors="replace"))
        async for piece in pieces:
            yield piece

    async def _head(self) -> tuple[int, dict[str, str]]:
        assert self._reader is not None
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        return int(lines[0].split(" ", 2)[1]), headers

    async def _chunks(self) -> AsyncIterator[bytes]:
        assert self._reader is not None
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")

    async def _sized(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        assert self._reader is not None
        if "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await self._reader.read(65536):
                yield piece
