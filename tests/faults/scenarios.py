"""A request's ways through an app and an engine, to be interrupted: test_cancellation.py runs each at every point.

`HTTP` has those that a client begins, `CALLS` a program's own. Each runs in a `World` that it shares with a neighbour.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from aserve import Engine, InvalidRequestError, SamplingParams, beam_search
from aserve.request import Sequence
from routes.app import create_app
from tests.serving import TOKENIZER

[A] = TOKENIZER.encode("a", False)
GRACE = {"x-resume-grace": "1000"}
SAID = [{"role": "user", "content": "x"}]
BODY: dict[str, Any] = {"prompt": "xyz", "max_tokens": 12, "temperature": 0, "n": 2}
LONG = {**BODY, "max_tokens": 40}  # more than may come after an interruption


@dataclass
class World:
    """One engine, one app, one request that will be interrupted, and a neighbour."""

    engine: Engine
    app: ASGIApp
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    key: str | None = None
    left: dict[Sequence, int] = field(default_factory=dict)  # what ran at the interruption, and its tokens then

    def note(self) -> None:
        for request in self.engine._scheduler._roster.unfinished:
            if request.prompt[0] != A:
                self.left |= {sequence: len(sequence.output) for sequence in request.sequences}

    async def request(
        self,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        *,
        method: str = "POST",
        leave_at: int = -1,
        app: ASGIApp | None = None,
    ) -> str:
        """An HTTP request, its body in two pieces, whose client leaves when `gone` is set, or at a message. Its
        answer."""
        raw = json.dumps(body).encode() if body is not None else b""
        pending = [
            {"type": "http.request", "body": raw[9:], "more_body": False},
            {"type": "http.request", "body": raw[:9], "more_body": True},
        ]
        answer = ""
        num_sent = 0
        left = asyncio.Event()

        async def receive() -> Message:
            await asyncio.sleep(0)
            if pending:
                return pending.pop()
            waits = [asyncio.create_task(event.wait()) for event in (self.gone, left)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal answer, num_sent
            for name, value in message.get("headers", ()):
                if name == b"x-stream-id":
                    self.key = value.decode()
            answer += message.get("body", b"").decode()
            num_sent += 1
            if num_sent == leave_at:
                left.set()
            await asyncio.sleep(0)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }
        await (app or self.app)(scope, receive, send)
        return answer


async def streamed(world: World) -> None:
    await world.request("/v1/completions", {**LONG, "stream": True})


async def collected(world: World) -> None:
    await world.request("/v1/completions", LONG)


async def several(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "prompt": ["xyz", "uv"], "stream": True})


async def resumable(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "stream": True}, GRACE)


async def resumed(world: World) -> None:
    """Cut at its fifth message, and read again from its first event, by two connections: the later ousts the other."""
    answer = await world.request("/v1/completions", {**BODY, "stream": True}, GRACE, leave_at=5)
    if world.key is None:
        return
    last = answer.partition("id: ")[2].partition("\n")[0]
    path, headers = f"/v1/streams/{world.key}", {"last-event-id": last}
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(world.request(path, None, headers, method="GET"))


async def repeated(world: World) -> None:
    """Cut, and gone on with by the same POST."""
    body = {**BODY, "stream": True}
    answer = await world.request("/v1/completions", body, GRACE, leave_at=5)
    last = answer.rpartition("id: ")[2].partition("\n")[0]
    await world.request("/v1/completions", body, {"last-event-id": last})


async def chat(world: World) -> None:
    await world.request("/v1/chat/completions", {"messages": SAID, "max_tokens": 12, "stream": True})


async def collected_chat(world: World) -> None:
    await world.request("/v1/chat/completions", {"messages": SAID, "max_tokens": 12})


async def response(world: World) -> None:
    await world.request("/v1/responses", {"input": SAID, "max_output_tokens": 12, "stream": True})


async def collected_response(world: World) -> None:
    await world.request("/v1/responses", {"input": SAID, "max_output_tokens": 12})


async def response_in_the_background(world: World) -> None:
    await world.request("/v1/responses", {"input": SAID, "max_output_tokens": 10, "background": True})


async def beams(world: World) -> None:
    await world.request("/v1/completions", {"prompt": "xyz", "max_tokens": 4, "n": 2, "use_beam_search": True})


async def best(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "best_of": 3})


async def structured(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "n": 1, "guided_choice": ["xyzxyz"], "stream": True})


async def crowded(world: World) -> None:
    """Others' grammars take all places, first before anything was compiled and then after."""
    places = world.engine._intake.structured._places
    for _ in range(2):
        count = 0
        while not places.locked():
            await places.acquire()
            count += 1
        for _ in range(count):
            asyncio.get_running_loop().call_later(0.002, places.release)
        await structured(world)


async def long(world: World) -> None:
    """Its prompt is encoded on a thread, and refused."""
    await world.request("/v1/completions", {"prompt": "x" * 100_000, "max_tokens": 4})


async def long_chat(world: World) -> None:
    said = [{"role": "user", "content": "x" * 100_000}]
    await world.request("/v1/chat/completions", {"messages": said, "max_tokens": 4})
    await world.request("/v1/responses", {"input": said, "max_output_tokens": 4})


async def clean(world: World) -> None:
    """Its bad words are encoded on a thread."""
    await world.request("/v1/completions", BODY | {"bad_words": [f"{n} {'word' * 50}" for n in range(8)]})


async def too_large(world: World) -> None:
    app = create_app(world.engine, max_body_bytes=5)
    await world.request("/v1/completions", BODY, app=app)


async def pinged(world: World) -> None:
    """Comments all the time."""
    app = create_app(world.engine, ping_interval=0.0)
    await world.request("/v1/completions", {**BODY, "stream": True}, app=app)


async def keyed(world: World) -> None:
    """An open path, a wrong key, the right one, and one request too many for it."""
    app = create_app(world.engine, api_keys=["k"], max_requests_per_key=1)
    await world.request("/health", None, method="GET", app=app)
    await world.request("/v1/completions", BODY, app=app)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(world.request("/v1/completions", BODY, {"authorization": "Bearer k"}, app=app))


async def unlimited(world: World) -> None:
    app = create_app(world.engine, api_keys=["k"])
    await world.request("/v1/completions", BODY, {"authorization": "Bearer k"}, app=app)


async def iterated(world: World) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, n=2)
    async with world.engine.generate("xyz", params) as stream:
        async for _ in stream:
            pass


async def written(world: World) -> None:
    await world.engine.generate_text("xyz", SamplingParams(max_tokens=40, temperature=0.0))


async def searched(world: World) -> None:
    await beam_search(world.engine, "xyz", width=2, max_tokens=4)


async def refused(world: World) -> None:
    """By a thread, at every way in."""
    engine, prompt = world.engine, "x" * 100_000
    with contextlib.suppress(InvalidRequestError):
        await anext(engine.generate(prompt))
    with contextlib.suppress(InvalidRequestError):
        await engine.generate(prompt).ready()
    with contextlib.suppress(InvalidRequestError):
        await engine.generate(prompt).completions()
    with contextlib.suppress(InvalidRequestError):
        await engine.generate_text(prompt)
    with contextlib.suppress(InvalidRequestError):
        await engine.submit_chat([{"role": "user", "content": prompt}])
    with contextlib.suppress(InvalidRequestError):
        await beam_search(engine, prompt, width=2, max_tokens=4)


Scenario = Callable[[World], Awaitable[None]]
HTTP: list[Scenario] = [
    streamed,
    collected,
    several,
    resumable,
    resumed,
    repeated,
    chat,
    collected_chat,
    response,
    collected_response,
    response_in_the_background,
    beams,
    best,
    structured,
    crowded,
    long,
    long_chat,
    clean,
    too_large,
    pinged,
    keyed,
    unlimited,
]
CALLS: list[Scenario] = [iterated, written, searched, refused]
