"""O01: when the model dies, open streams get an error, new calls and health 503."""

from __future__ import annotations

import threading
from typing import cast

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from aserve.plan import StepPlan
from routes.admin import Admin
from routes.app import create_app
from routes.endpoint import Options
from routes.records import Live
from tests.asgi import Reply, get, post
from tests.serving import VOCAB_SIZE, EchoRunner, serving

pytestmark = pytest.mark.anyio


async def test_nothing_claims_to_be_well_once_the_model_is_gone() -> None:
    gate = threading.Event()

    def die(plan: StepPlan) -> None:
        if plan.number >= 3:
            gate.wait(10)
            raise RuntimeError("the device fell off the bus")

    runner = EchoRunner(num_gpu_blocks=64, block_size=16, max_model_len=256, vocab_size=VOCAB_SIZE, before_step=die)
    async with serving(runner=runner) as engine:
        app = create_app(engine)
        body = {"prompt": "ab", "max_tokens": 50, "temperature": 0}
        replies: list[Reply] = []

        async def run(stream: bool) -> None:
            replies.append(await post(app, "/v1/completions", body | {"stream": stream}))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, True)
                tasks.start_soon(run, False)
                while engine.stats().num_running < 2:
                    await anyio.lowlevel.checkpoint()
                gate.set()
            after = await post(app, "/v1/completions", body)
            health = await get(app, "/health")
        for reply in replies:
            if reply.headers["content-type"].startswith("text/event-stream"):
                assert reply.events()[-1]["error"]["code"] == "engine_dead"
            else:
                assert reply.status == 503
        assert after.status == health.status == 503


async def test_health_notices_a_step_that_hangs() -> None:
    gate = threading.Event()
    now = 0.0
    runner = EchoRunner(
        num_gpu_blocks=64,
        block_size=16,
        max_model_len=256,
        vocab_size=VOCAB_SIZE,
        before_step=lambda plan: cast(None, gate.wait(10)),
    )
    async with serving(runner=runner) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)
        admin = Admin(engine, Live(), Options(), clock=lambda: now)
        probe = Starlette(routes=[Route("/health", admin.health)], exception_handlers=app.exception_handlers)
        tasks.start_soon(post, app, "/v1/completions", {"prompt": "ab", "max_tokens": 2})
        while not runner.plans:
            await anyio.lowlevel.checkpoint()
        statuses = []
        for now in (0.0, 59.0, 61.0):  # noqa: B007 (the clock reads it)
            statuses.append((await get(probe, "/health")).status)
        gate.set()
        while engine.stats().num_running:
            await anyio.lowlevel.checkpoint()
        statuses.append((await get(probe, "/health")).status)
    assert statuses == [200, 200, 503, 200]
