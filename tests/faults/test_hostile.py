"""Bytes that no well-meaning client sends, over real sockets: each gets an answer or a closed connection, none takes
more than its share of the server, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket

import pytest

from tests.faults.wire import Wire, connect, fetch, gauges, idle, request_bytes, stream_text

pytestmark = pytest.mark.live
PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
LONG = BODY | {"max_tokens": 2000, "ignore_eos": True}
RAW = json.dumps(BODY).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: %d\r\n" % len(RAW)
CLOSE = b"connection: close\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(RAW), RAW)

# What is sent, and the status of the answer.
SHAPES: dict[str, tuple[bytes, int]] = {
    "two kinds of length": (POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (POST + LENGTH + b"content-length: 3\r\n\r\n" + RAW, 400),
    "a signed length": (POST + b"content-length: +3\r\n\r\n" + RAW, 400),
    "a length past all numbers": (POST + b"content-length: 99999999999999999999\r\n\r\n", 400),
    "another encoding last": (POST + b"transfer-encoding: chunked, identity\r\n\r\n", 400),
    "a space before the colon": (POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n", 400),
    "a folded header": (POST + LENGTH + b"x: a\r\n b\r\n\r\n" + RAW, 400),
    "lines that end in LF": (POST.replace(b"\r", b"") + b"\n", 400),
    "a NUL in a header": (POST + LENGTH + b"x: a\0\r\n\r\n" + RAW, 400),
    "a chunk without a size": (CHUNKED + b"zz\r\n", 400),
    "a chunk past all numbers": (CHUNKED + b"fffffffffffffffff\r\n", 400),
    "a chunk that is longer than it says": (CHUNKED + b"2\r\nabcdef\r\n0\r\n\r\n", 400),
    "TLS": (bytes.fromhex("160301020001000001fc0303") + bytes(range(200)), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a version of the future": (b"GET /health HTTP/9.9\r\n\r\n", 400),
    "a proxy's request": (b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "bytes that are no ASCII": (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a URL of 70,000 bytes": (b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n" % (b"a" * 70_000), 400),
    "an absolute URL": (b"GET http://example.org/health HTTP/1.1\r\n" + CLOSE + b"\r\n", 200),
    "a line break in the path": (b"GET /a%0Ab HTTP/1.1\r\n" + CLOSE + b"\r\n", 404),
    "HTTP/1.0": (b"POST /v1/completions HTTP/1.0\r\n" + LENGTH + b"\r\n" + RAW, 200),
    "chunks": (CHUNKED + CHUNK + b"0\r\n\r\n", 200),
    "a trailer that would be a header": (CHUNKED + CHUNK + b"0\r\nlast-event-id: x:1\r\n\r\n", 200),
    "an offer of WebSocket": (
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n",
        200,
    ),
    "an offer of HTTP/2, and a body": (
        POST
        + LENGTH
        + b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n"
        + RAW,
        200,
    ),
}

# What is sent once, and then again and again.
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "headers": (POST, b"a: b\r\n"),
    "a header": (POST + b"a: ", b"b"),
    "a URL": (b"GET /", b"a"),
    "empty lines": (b"", b"\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "a chunk's extension": (CHUNKED + b"1;", b"a"),
    "chunks of a byte": (CHUNKED, b"1\r\na\r\n"),
    "requests ahead": (b"", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"),
    "a body ahead": (request_bytes("POST", PATH, LONG) + POST + b"transfer-encoding: chunked\r\n\r\n", CHUNK),
    "a body without an end": (CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
}

BODIES: dict[str, bytes] = {
    "arrays in arrays": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects in objects": b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "a million keys": b"{" + b",".join(b'"k%d":0' % i for i in range(700_000)) + b"}",
    "an endless number": b'{"prompt":"a","max_tokens":' + b"9" * 1_000_000 + b"}",
    "half of a character": b'{"prompt":"\\ud800"}',
    "bytes that are no UTF-8": b'{"prompt":"\xff\xfe"}',
    "UTF-16": json.dumps(BODY).encode("utf-16"),
    "no JSON": b"\0" * 1000,
}


def sent(url: str, data: bytes) -> bytes:
    """What comes back until the server hangs up."""

    async def main() -> bytes:
        sock = await connect(url)
        with sock:
            loop = asyncio.get_running_loop()
            answer = b""
            try:
                await loop.sock_sendall(sock, data)
                while received := await loop.sock_recv(sock, 65536):
                    answer += received
            except ConnectionError:  # it hung up while we were sending
                pass
            return answer

    return asyncio.run(asyncio.wait_for(main(), 20))


def test_each_shape_of_request_is_served_or_refused_and_the_connection_closed(live: str) -> None:
    for name, (data, status) in SHAPES.items():
        assert sent(live, data).split(b" ", 2)[:2] == [b"HTTP/1.1", b"%d" % status], name
    assert asyncio.run(fetch(live, "GET", "/health"))[0] == 200


def test_every_prefix_of_a_request_may_be_its_end(live: str) -> None:
    """Cut off by a reset, after any byte."""

    async def main() -> None:
        data = request_bytes("POST", PATH, BODY | {"stream": True})
        for length in range(len(data) + 1):
            wire = await Wire.open(live)
            wire.writer.write(data[:length])
            await wire.writer.drain()
            wire.close(reset=True)
        await idle(live, 5)

    asyncio.run(main())


def test_a_flood_ends_with_its_connection(live: str) -> None:
    """The server takes little of it, and answers others afterwards."""

    async def flood(first: bytes, more: bytes) -> None:
        unit = more * (65536 // len(more) + 1)
        sock = await connect(live)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        loop = asyncio.get_running_loop()
        num_sent = 0
        with sock, pytest.raises(ConnectionError):
            await loop.sock_sendall(sock, first)
            while num_sent < 64 << 20:
                await loop.sock_sendall(sock, unit)
                num_sent += len(unit)

    async def main() -> None:
        for name, (first, more) in FLOODS.items():
            try:
                async with asyncio.timeout(20):
                    await flood(first, more)
            except TimeoutError:
                pytest.fail(f"a flood of {name} goes on")
        assert await stream_text(live, BODY)
        await idle(live, 5)

    asyncio.run(main())


def test_a_client_that_sent_two_requests_and_left_is_missed(live: str) -> None:
    async def main() -> None:
        ahead = [b"GET /health HTTP/1.1\r\n\r\n", POST, request_bytes("POST", PATH, b" " * 100_000)]
        for stream, behind in itertools.product((True, False), ahead):
            wire = await Wire.open(live)
            wire.writer.write(request_bytes("POST", PATH, LONG | {"stream": stream}))
            async with asyncio.timeout(10):
                while not (await gauges(live))["aserve_requests_running"]:
                    pass
            wire.writer.write(behind)
            await wire.writer.drain()
            wire.close()
            await idle(live, 2)

    asyncio.run(main())


def test_bodies_that_are_made_to_be_costly_are_refused(live: str) -> None:
    async def main() -> None:
        for name, body in BODIES.items():
            async with asyncio.timeout(5):
                status, answer = await fetch(live, "POST", PATH, body, {"connection": "close"})
            assert status == 400, name
            assert json.loads(answer)["error"]["type"] == "invalid_request_error"

    asyncio.run(main())


def test_a_storm_of_cancellations_leaves_nothing_and_others_go_on(live: str) -> None:
    """Two hundred requests that end before their time, in every way that a client has."""

    async def closed(number: int) -> None:
        wire = await Wire.open(live)
        await wire.send("POST", PATH, LONG | {"stream": number % 2 == 0})
        for _ in range(number % 7):
            await fetch(live, "GET", "/version")  # lets some time pass
        wire.close(reset=number % 3 == 0)

    async def deleted() -> None:
        wire = await Wire.open(live)
        await wire.send("POST", PATH, LONG | {"stream": True}, {"x-resume-grace": "30"})
        await wire.head()
        await fetch(live, "DELETE", f"/v1/requests/{wire.headers['x-stream-id']}")
        last = [event async for event in wire.events()][-1]
        assert last["error"]["code"] == "request_cancelled"
        wire.close()

    async def late() -> None:
        status, _ = await fetch(live, "POST", PATH, LONG | {"timeout": 0.05})
        assert status == 504

    async def main() -> None:
        alone = await stream_text(live, BODY | {"max_tokens": 100})
        before = await gauges(live)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            whole = [tasks.create_task(stream_text(live, BODY | {"max_tokens": 100})) for _ in range(10)]
            for number in range(120):
                tasks.create_task(closed(number))
            for _ in range(30):
                tasks.create_task(deleted())
                tasks.create_task(late())
        assert {task.result() for task in whole} == {alone}
        after = await idle(live, 5)
        name = 'aserve_requests_total{outcome="%s"}'
        assert after[name % "error"] == before[name % "error"]
        assert after[name % "deadline"] - before[name % "deadline"] == 30
        assert after[name % "length"] - before[name % "length"] == 10

    asyncio.run(main())
