"""A mixed load over real sockets, for as long as asked: users who behave, and users who do not.

Black box over HTTP. `soak` drives it and returns what the well-behaved saw; the caller looks at what the server is
left with.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tests.faults.wire import Drip, Wire, connect, fetch, read_text, request_bytes, stream_text

PROMPTS = ("abc", "the sea ", "0123456789", "Ein Satz, ")
NUM_USERS = 24
NUM_SLOW = 16  # streams read at SLOW bytes a second from the first minute to the last
SLOW = 100
NUM_SILENT = 16  # connections on which nothing happens, or half of a request
LONG = 1500  # tokens: more than the system and the server hold for a reader
BURST = 240  # at once, every BURST_SECONDS: ten times the usual
BURST_SECONDS = 15.0


class Soak:
    """Users of one server. `wrong` holds what should not have happened, `done` counts visits by kind."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rates: list[float] = []  # bytes a second, of those that were slow
        self.texts: dict[tuple[str, int], str] = {}  # what each request gave on a quiet server

    async def run(self, seconds: float) -> None:
        """Loads the server for that long, then waits for every user to finish."""
        for prompt in PROMPTS:
            for length in (20, 150):
                self.texts[prompt, length] = await stream_text(self.url, self.body(prompt, length))
        self.texts[PROMPTS[0], LONG] = await stream_text(self.url, self.body(PROMPTS[0], LONG))
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_SLOW):
                tasks.create_task(self.visit(partial(self.slow, seconds), seconds + 120))
            for _ in range(NUM_SILENT):
                tasks.create_task(self.visit(partial(self.silent, seconds), seconds + 120))
            for _ in range(NUM_USERS):
                tasks.create_task(self.user(end))
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(left, BURST_SECONDS))
                for _ in range(BURST):
                    tasks.create_task(self.visit(self.normal))

    async def user(self, end: float) -> None:
        kinds = [self.normal] * 6 + [
            self.collected,
            self.talking,
            self.half_open,
            self.half_closed,
            self.leaving,
            self.leaving_rudely,
            self.malformed,
            self.huge,
            self.resuming,
            self.never_back,
            self.deleted,
        ]
        while time.monotonic() < end:
            await self.visit(self.random.choice(kinds))

    async def visit(self, kind: Callable[[], Awaitable[None]], seconds: float = 120) -> None:
        name = getattr(kind, "func", kind).__name__
        try:
            async with asyncio.timeout(seconds):
                await kind()
        except Exception as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {error}")
        self.done[name] += 1

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}

    def pick(self) -> tuple[str, int]:
        return self.random.choice(PROMPTS), self.random.choice((20, 150))

    def check(self, request: tuple[str, int], text: str) -> None:
        if text != self.texts[request]:
            self.wrong.append(f"{request} gave {text!r}")

    async def opened(self, body: Any, headers: dict[str, str] | None = None, **options: Any) -> Wire:
        wire = await Wire.open(self.url, **options)
        await wire.send("POST", "/v1/completions", body, headers)
        return wire

    # users

    async def normal(self) -> None:
        request = self.pick()
        self.check(request, await stream_text(self.url, self.body(*request)))

    async def collected(self) -> None:
        request = self.pick()
        status, body = await fetch(self.url, "POST", "/v1/completions", {**self.body(*request), "stream": False})
        assert status == 200
        self.check(request, json.loads(body)["choices"][0]["text"])

    async def talking(self) -> None:
        """A chat turn, or a response in the background that nobody asks for again."""
        said = [{"role": "user", "content": "abc"}]
        body = {"messages": said, "max_tokens": 30, "temperature": 0}
        path = "/v1/chat/completions"
        if self.random.random() < 0.5:
            path, body = "/v1/responses", {"input": said, "max_output_tokens": 30, "background": True}
        status, _ = await fetch(self.url, "POST", path, body)
        assert status == 200

    async def slow(self, seconds: float) -> None:
        """Much too slow all the time; then the rest at once, and not a character is missing."""
        request = PROMPTS[0], LONG
        drip = await Drip.open(self.url, request_bytes("POST", "/v1/completions", self.body(*request)))
        loop = asyncio.get_running_loop()
        began = loop.time()
        wire: Drip | Wire = drip
        try:
            await drip.read(SLOW, began + seconds)
            self.rates.append(len(drip.received) / (loop.time() - began))
            wire = rest = await drip.rest()
            await rest.head()
            self.check(request, await read_text(rest))
        finally:
            wire.close()

    async def silent(self, seconds: float) -> None:
        """Says nothing, or a part of a request's head. The server may hang up."""
        sock = await connect(self.url)
        with sock:
            await asyncio.get_running_loop().sock_sendall(sock, self.random.choice([b"", b"POST /v1/comp"]))
            await asyncio.sleep(seconds)

    async def half_closed(self) -> None:
        """Says that it will send no more, and reads on for a while: over HTTP that may mean that it is gone."""
        wire = await self.opened(self.body("abc", 2000))
        try:
            await wire.head()
            wire.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
            await wire.reader.read(5000)
        finally:
            wire.close()

    async def half_open(self) -> None:
        """A part of a request, then silence, then gone."""
        wire = await Wire.open(self.url)
        wire.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await wire.writer.drain()
        await asyncio.sleep(self.random.random() * 2)
        wire.close(reset=self.random.random() < 0.5)

    async def leaving(self) -> None:
        wire = await self.opened(self.body("abc", 2000))
        try:
            await wire.head()
            count = self.random.randrange(40)
            async for _ in wire.events():
                count -= 1
                if count < 0:
                    return
        finally:
            wire.close()

    async def leaving_rudely(self) -> None:
        wire = await self.opened(self.body("abc", 2000))
        await asyncio.sleep(self.random.random())
        wire.close(reset=True)

    async def malformed(self) -> None:
        bad: list[Any] = [b"{", b"\xff\xfe", b"[]", {"prompt": ""}, {"prompt": "x", "temperature": "hot"}, {"n": 10**9}]
        status, _ = await fetch(self.url, "POST", "/v1/completions", self.random.choice(bad))
        assert status == 400, status

    async def huge(self) -> None:
        """More than fits the context, or more than the server reads at all."""
        status, _ = await fetch(self.url, "POST", "/v1/completions", self.body("x" * 1_000_000, 10))
        assert status == 400, status
        wire = await Wire.open(self.url)
        try:
            await wire.send("POST", "/v1/completions", b"", {"content-length": str(1 << 40)})
        except ConnectionError:
            pass
        finally:
            wire.close()

    async def resuming(self) -> None:
        """Cut again and again, and every token once in the end."""
        request = self.pick()
        text, last, key = "", "", ""
        while True:
            if key:
                wire = await Wire.open(self.url)
                headers = {"last-event-id": last} if last else {}
                await wire.send("GET", f"/v1/streams/{key}", headers=headers)
            else:
                wire = await self.opened(self.body(*request), {"x-resume-grace": "30"})
            try:
                assert await wire.head() == 200, wire.status
                key = wire.headers["x-stream-id"]
                count = self.random.randrange(1, 30)
                async for event in wire.events():
                    last = wire.last_id
                    if event == "[DONE]":
                        self.check(request, text)
                        return
                    text += event["choices"][0]["text"]
                    count -= 1
                    if not count:
                        break
            finally:
                wire.close(reset=self.random.random() < 0.5)

    async def never_back(self) -> None:
        wire = await self.opened(self.body("abc", 2000), {"x-resume-grace": "0.5"})
        await wire.head()
        await asyncio.sleep(self.random.random())
        wire.close()

    async def deleted(self) -> None:
        wire = await self.opened(self.body("abc", 2000), {"x-resume-grace": "30"})
        try:
            await wire.head()
            await fetch(self.url, "DELETE", f"/v1/requests/{wire.headers['x-stream-id']}")
            last = [event async for event in wire.events()][-1]
            assert last != "[DONE]" and last["error"]["code"] == "request_cancelled", last
        finally:
            wire.close()
