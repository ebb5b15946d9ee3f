"""A proxy that is bad at streaming: it cuts each connection after so many events have come back over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


@asynccontextmanager
async def cutting_proxy(url: str, num_events: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Serves on a port of its own. Yields its URL and a list that gets an entry per cut."""
    parts = urlsplit(url)
    cuts: list[int] = []
    tasks: set[asyncio.Task[None] | None] = set()  # the loop holds them only weakly

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        upstream, back = await asyncio.open_connection(parts.hostname, parts.port)
        forth = asyncio.create_task(_copy(reader, back))
        try:
            if await _copy_events(upstream, writer, num_events):
                cuts.append(1)
        except asyncio.CancelledError:  # the proxy closes; streams.py would call it an error
            pass
        finally:
            forth.cancel()
            writer.transport.abort()
            back.transport.abort()
            tasks.discard(asyncio.current_task())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cuts


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


async def _copy_events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_events: int) -> bool:
    """Copies until that many events went by, the last one's blank line included. True where it cut."""
    seen = 0
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            at = 0
            while (end := data.find(b"\n\n", at)) >= 0:
                at = end + 2
                seen += 1
                if seen == num_events:
                    writer.write(data[:at])
                    await writer.drain()
                    return True
            writer.write(data)
            await writer.drain()
    return False
