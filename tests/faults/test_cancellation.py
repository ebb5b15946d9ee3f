"""A request may be interrupted at every point where it waits, in every way: nothing is left, nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.types import ASGIApp, Message

from aserve import Engine, EngineConfig, InvalidRequestError, SamplingParams, beam_search
from aserve.request import Sequence
from routes.app import create_app
from tests.asgi import delete, get
from tests.engine_util import HeldExecutor, settle, until_idle
from tests.faults.interrupt import Points, waits
from tests.serving import TOKENIZER, VOCAB_SIZE, EchoRunner

pytestmark = pytest.mark.anyio
[A] = TOKENIZER.encode("a", False)
MAX_MORE = 16  # tokens of a choice after the interruption: the loop's turns until the engine knows, and a few steps
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
    too_large,
    pinged,
    keyed,
    unlimited,
]


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


CALLS: list[Scenario] = [iterated, written, searched, refused]


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


async def interrupted(scenario: Scenario, depth: int, at: int | None, act: Callable[[Points, World], None]) -> Points:
    """Runs the scenario beside a neighbour, interrupts it, and checks what is left. The points passed."""
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
        if world.key is not None and (
            act is hang_up or scenario in (resumed, repeated)
        ):  # it waits for its client to come back
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
        if scenario not in (resumed, repeated):  # there it may run on while its client is between two connections
            for sequence, num_tokens in world.left.items():
                assert len(sequence.output) <= num_tokens + MAX_MORE
        outcomes = world.engine.metrics.outcomes
        assert sum(outcomes.values()) <= (3 if scenario in (several, crowded) else 2)
        assert outcomes["error"] == 0
    return points


async def _run(scenario: Scenario, world: World) -> None:
    await scenario(world)


BOTH_DEPTHS = [(scenario, depth) for scenario in (streamed, collected, iterated) for depth in (1, 2)]


@pytest.mark.parametrize(
    ("scenario", "depth"), BOTH_DEPTHS + [(scenario, 2) for scenario in [*HTTP[2:], *CALLS[1:]]], ids=named
)
async def test_a_task_cancelled_at_any_point_leaves_nothing(scenario: Scenario, depth: int) -> None:
    await at_every_point(scenario, depth, cancel_task)


@pytest.mark.parametrize(("scenario", "depth"), BOTH_DEPTHS[:4] + [(scenario, 2) for scenario in HTTP[2:]], ids=named)
async def test_a_client_that_leaves_at_any_point_leaves_nothing(scenario: Scenario, depth: int) -> None:
    await at_every_point(scenario, depth, hang_up)


async def at_every_point(scenario: Scenario, depth: int, act: Callable[[Points, World], None]) -> None:
    with anyio.fail_after(60):
        num_points = (await interrupted(scenario, depth, None, act)).count
        assert num_points
        for at in range(1, num_points + 1):
            await interrupted(scenario, depth, at, act)


ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "routes": ("endpoint", "http", "completions", "chat", "responses", "sse", "resume", "middleware"),
    "aserve": ("stream", "engine", "intake", "prompts", "structured", "grammar", "search"),
}
PATHS = [ROOT / package / f"{name}.py" for package, names in FILES.items() for name in names]
WAITS = {str(path): waits(path) for path in PATHS}


ELSEWHERE = ("Engine.start", "Engine.stop", "Engine._shut_down", "Engine.__a", "Engine.warm_up", "Engine.died")
NEVER = {  # they end without giving the loop its turn, or have no request to do with
    "GenerationEndpoint._collect: await close_all(job.streams)",
    "submit_all: await close_all(streams)",
    "close_all: await stream.aclose()",
    "Responses._run: await close_all(job.streams)",
    "Stream.__aexit__: await self.aclose()",
    "StructuredOutputs.constraints: async with asyncio.timeout(self._seconds):",
    "RequestLog.__call__: await self.app(scope, receive, send)",
    "ApiKeys.__call__: await self.app(scope, receive, send)",
    "StructuredOutputs._build_when: await asyncio.sleep(IDLE_SECONDS)",
    "StructuredOutputs._build_when: await self.build()",
}


async def test_the_scenarios_wait_wherever_a_request_can() -> None:
    """What is interrupted at every point where it waits has, all together, no `await` that it does not wait at."""
    places: set[tuple[str, int]] = set()
    for scenario in [*HTTP, *CALLS]:
        places |= (await interrupted(scenario, 2, None, cancel_task)).places
    missed = set()
    for path, found in WAITS.items():
        lines = [line for file, line in places if file == path]
        for wait in found:
            if not any(wait.first <= line <= wait.last for line in lines) and not wait.function.startswith(ELSEWHERE):
                missed.add(f"{wait.function}: {wait.code}")
    assert missed == NEVER
