"""A mixed load over real sockets, for as long as asked: users who behave, and users who do not.

Black box over HTTP. `soak` drives it and returns what the well-behaved saw; the caller looks at what the server is
left with.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tests.faults.wire import Wire, fetch, read_text, stream_text

PROMPTS = ("abc", "the sea ", "0123456789", "Ein Satz, ")
NUM_USERS = 24
BURST = 240  # at once, every BURST_SECONDS: ten times the usual
BURST_SECONDS = 15.0


class Soak:
    """Users of one server. `wrong` holds what should not have happened, `done` counts visits by kind."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.texts: dict[tuple[str, int], str] = {}  # what each request gave on a quiet server

    async def run(self, seconds: float) -> None:
        """Loads the server for that long, then waits for every user to finish."""
        for prompt in PROMPTS:
            for length in (20, 150):
                self.texts[prompt, length] = await stream_text(self.url, self.body(prompt, length))
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_USERS):
                tasks.create_task(self.user(end))
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(left, BURST_SECONDS))
                for _ in range(BURST):
                    tasks.create_task(self.visit(self.normal))

    async def user(self, end: float) -> None:
        kinds = [self.normal] * 6 + [
            self.collected,
            self.slow,
            self.half_open,
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

    async def visit(self, kind: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(120):
                await kind()
        except Exception as error:
            self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")
        self.done[kind.__name__] += 1

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
        status, _ = await fetch(self.url, "POST", "/v1/completions", {**self.body("abc", 30), "stream": False})
        assert status == 200

    async def slow(self) -> None:
        """100 bytes a second for a while, then all of the rest."""
        request = self.pick()
        wire = await self.opened(self.body(*request), receive_buffer=2048)
        try:
            await wire.head()
            for _ in range(self.random.randrange(5)):
                await asyncio.sleep(1)
                await wire.read_late(100)
            self.check(request, await read_text(wire))
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
