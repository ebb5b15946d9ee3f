"""A request may be interrupted at every point where it waits, in every way: nothing is left, nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from starlette.types import ASGIApp, Message

from aserve import Engine, EngineConfig, SamplingParams
from aserve.request import Sequence
from routes.app import create_app
from tests.asgi import delete, get
from tests.engine_util import HeldExecutor, settle, until_idle
from tests.faults.interrupt import Points
from tests.serving import TOKENIZER, VOCAB_SIZE, EchoRunner

pytestmark = pytest.mark.anyio
[A] = TOKENIZER.encode("a", False)
MAX_MORE = 16  # tokens of a choice after the interruption: the loop's turns until the engine knows, and a few steps
BODY: dict[str, Any] = {"prompt": "xyz", "max_tokens": 40, "temperature": 0, "n": 2}


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

    async def request(self, path: str, body: Any, headers: dict[str, str]) -> None:
        """An HTTP request whose client leaves when `gone` is set."""
        pending = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            for name, value in message.get("headers", ()):
                if name == b"x-stream-id":
                    self.key = value.decode()
            await asyncio.sleep(0)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
        }
        await self.app(scope, receive, send)


async def streamed(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "stream": True}, {})


async def collected(world: World) -> None:
    await world.request("/v1/completions", BODY, {})


async def several(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "prompt": ["xyz", "uv"], "stream": True}, {})


async def resumable(world: World) -> None:
    await world.request("/v1/completions", {**BODY, "stream": True}, {"x-resume-grace": "1000"})


async def chat(world: World) -> None:
    await world.request(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "stream": True}, {}
    )


async def iterated(world: World) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, n=2)
    async with world.engine.generate("xyz", params) as stream:
        async for _ in stream:
            pass


async def written(world: World) -> None:
    await world.engine.generate_text("xyz", SamplingParams(max_tokens=40, temperature=0.0))


Scenario = Callable[[World], Awaitable[None]]
HTTP: list[Scenario] = [streamed, collected, several, resumable, chat]


def cancel_task(points: Points, world: World) -> None:
    assert points.root is not None
    points.root.cancel()


def hang_up(points: Points, world: World) -> None:
    world.gone.set()


@asynccontextmanager
async def a_world(depth: int) -> AsyncIterator[World]:
    runner = EchoRunner(num_gpu_blocks=64, block_size=4, max_model_len=128, vocab_size=VOCAB_SIZE, depth=depth)
    config = EngineConfig(model="fake", block_size=4)
    engine = Engine(config, executor=HeldExecutor(runner), tokenizer=TOKENIZER)
    async with engine:
        yield World(engine, create_app(engine))


async def interrupted(scenario: Scenario, depth: int, at: int | None, act: Callable[[Points, World], None]) -> int:
    """Runs the scenario beside a neighbour, interrupts it, and checks what is left. The number of points passed."""
    async with a_world(depth) as world:
        mine = asyncio.all_tasks()
        neighbour = asyncio.create_task(
            world.engine.generate_text("abc", SamplingParams(max_tokens=60, temperature=0.0))
        )
        await asyncio.sleep(0)

        def act_now(points: Points) -> None:
            world.note()
            act(points, world)

        points = Points(at, act_now)
        result = await points.watch(_run(scenario, world))
        assert result is None or isinstance(result, asyncio.CancelledError), repr(result)
        if world.key is not None and act is hang_up:  # it waits for its client to come back
            await delete(world.app, f"/v1/requests/{world.key}")
        assert await neighbour == "abc" * 20
        await until_idle(world.engine)
        await settle()
        assert asyncio.all_tasks() == mine
        world.engine._scheduler.check_invariants()
        assert world.engine._scheduler.num_unfinished == world.engine.stats().num_blocks_used == 0
        assert not world.engine._pipeline._outputs  # type: ignore[union-attr]
        load = (await get(world.app, "/load")).json()
        assert load == {"server_load": 0, "running": 0, "waiting": 0}
        for sequence, num_tokens in world.left.items():
            assert len(sequence.output) <= num_tokens + MAX_MORE
        outcomes = world.engine.metrics.outcomes
        assert sum(outcomes.values()) <= (3 if scenario is several else 2)
        assert outcomes["error"] == 0
    return points.count


async def _run(scenario: Scenario, world: World) -> None:
    await scenario(world)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("scenario", [*HTTP, iterated, written], ids=lambda scenario: scenario.__name__)
async def test_a_task_cancelled_at_any_point_leaves_nothing(scenario: Scenario, depth: int) -> None:
    await at_every_point(scenario, depth, cancel_task)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("scenario", HTTP, ids=lambda scenario: scenario.__name__)
async def test_a_client_that_leaves_at_any_point_leaves_nothing(scenario: Scenario, depth: int) -> None:
    await at_every_point(scenario, depth, hang_up)


async def at_every_point(scenario: Scenario, depth: int, act: Callable[[Points, World], None]) -> None:
    with anyio.fail_after(60):
        num_points = await interrupted(scenario, depth, None, act)
        assert num_points > 2
        for at in range(1, num_points + 1):
            await interrupted(scenario, depth, at, act)
