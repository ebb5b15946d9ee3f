"""What a connection is held to in time, on a clock of its own; what it is held to in bytes is in tests/faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from routes import protocol
from routes.protocol import DEAF_SECONDS, REQUEST_SECONDS, Protocol
from tests.engine_util import VIRTUAL, settle

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL])]
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"


class Transport(asyncio.Transport):
    """Takes what is written; has no socket."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol
        self.written = b""
        self.closed = False
        self.reset = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        if not self.closed:
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
        self.closed = True

    def abort(self) -> None:
        self.reset = True
        self.close()

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return Socket() if name == "socket" else default


class Socket:
    """Of a client that has taken so much, and may have more to take."""

    waiting = False
    taken = 0

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return protocol._TCP_INFO.pack(0, Socket.taken, int(Socket.waiting))

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        pass

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getsockname = getpeername


@pytest.fixture(autouse=True)
def _quiet_client() -> None:
    Socket.waiting, Socket.taken = False, 0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body, and is told at once when the client leaves."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def hold(scope: Scope, receive: Receive, send: Send) -> None:
    """Says nothing until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it has the body, and takes the rest."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await hold(scope, receive, send)


def connected(app: Any = echo) -> tuple[Protocol, Transport]:
    config = uvicorn.Config(app, http=Protocol, ws="none", log_config=None, proxy_headers=False)
    made, transport = Protocol(config, ServerState(), {}), Transport()
    transport.protocol = made
    made.connection_made(transport)
    return made, transport


async def test_a_connection_that_says_nothing_is_closed_in_time(anyio_backend: object) -> None:
    _, transport = connected()
    await asyncio.sleep(REQUEST_SECONDS - 1)
    assert not transport.closed
    await asyncio.sleep(2)
    assert transport.closed and not transport.written


@pytest.mark.parametrize("count", [1, 20, len(HEAD), len(HEAD) + 3])
async def test_a_request_that_drips_is_closed_in_time(anyio_backend: object, count: int) -> None:
    made, transport = connected()
    data = HEAD + b"0123456789"
    step = REQUEST_SECONDS / count
    for at in range(count):
        made.data_received(data[at : at + 1])
        await asyncio.sleep(step * 1.01)
    assert transport.closed


async def test_a_request_that_is_whole_in_time_is_served_and_the_next_has_its_own(anyio_backend: object) -> None:
    made, transport = connected()
    for _ in range(3):
        await asyncio.sleep(made.timeout_keep_alive - 1)
        made.data_received(HEAD + b"01234")
        await asyncio.sleep(REQUEST_SECONDS - 1)
        made.data_received(b"56789")
        await settle()
    assert transport.written.count(b"0123456789") == 3
    assert not transport.closed
    assert Protocol.num_incoming == 0
    await asyncio.sleep(made.timeout_keep_alive + 1)
    assert transport.closed


async def test_an_empty_line_keeps_no_connection_open(anyio_backend: object) -> None:
    made, transport = connected()
    made.data_received(HEAD + b"0123456789")
    await settle()
    made.data_received(b"\r\n")  # ends uvicorn's own timer
    await asyncio.sleep(REQUEST_SECONDS + 1)
    assert transport.closed


async def test_a_client_that_takes_nothing_is_cut_and_one_that_is_slow_is_not(anyio_backend: object) -> None:
    made, transport = connected(hold)
    made.data_received(HEAD + b"0123456789")
    Socket.waiting = True
    for _ in range(8):
        Socket.taken += 1
        await asyncio.sleep(DEAF_SECONDS / 2)
    assert not transport.closed
    await asyncio.sleep(DEAF_SECONDS * 1.5)
    assert transport.reset


async def test_a_client_that_has_nothing_to_take_is_left_alone(anyio_backend: object) -> None:
    made, transport = connected(hold)
    made.data_received(HEAD + b"0123456789")
    await asyncio.sleep(DEAF_SECONDS * 10)
    assert not transport.closed


async def test_bodies_on_their_way_are_bounded_over_all_connections(
    anyio_backend: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_INCOMING_BYTES", 12)
    (first, one), (second, other) = connected(), connected()
    first.data_received(HEAD + b"0123456")
    second.data_received(HEAD + b"0123456")
    assert not one.closed
    assert other.closed and b" 503 " in other.written and b"retry-after" in other.written
    await settle()
    first.data_received(b"789")
    await settle()
    assert b"0123456789" in one.written
    assert Protocol.num_incoming == 0


async def test_a_body_that_is_refused_counts_no_longer(anyio_backend: object) -> None:
    made, transport = connected(refuse)
    made.data_received(HEAD + b"01234")
    await settle()
    assert b" 413 " in transport.written
    made.data_received(b"567")
    assert Protocol.num_incoming == 0
