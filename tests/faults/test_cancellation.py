"""A request may be interrupted at every point where it waits, in every way: nothing is left, nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aserve import Engine, EngineConfig, SamplingParams
from routes.app import create_app
from tests.asgi import delete, get
from tests.engine_util import HeldExecutor, settle, until_idle
from tests.faults.interrupt import Points, waits
from tests.faults.scenarios import (
    CALLS,
    HTTP,
    Scenario,
    World,
    collected,
    crowded,
    iterated,
    repeated,
    resumed,
    several,
    streamed,
)
from tests.serving import TOKENIZER, VOCAB_SIZE, EchoRunner

pytestmark = pytest.mark.anyio
MAX_MORE = 16  # tokens of a choice after the interruption: the loop's turns until the engine knows, and a few steps


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


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
        assert asyncio.all_tasks() <= mine  # the wait for an idle moment may be over
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
    "StructuredOutputs._build_when: await asyncio.sleep(START_SECONDS)",
    "StructuredOutputs._build_when: await idle.wait()",
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
