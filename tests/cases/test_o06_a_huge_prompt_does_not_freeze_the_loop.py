"""O06: a huge prompt is refused early, and the loop never stalls."""

from __future__ import annotations

import time

import anyio
import pytest

from routes.app import create_app
from tests.asgi import get, post
from tests.serving import serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", [8 << 20, 64 << 20])
async def test_the_loop_goes_on_while_twenty_megabytes_are_refused(limit: int) -> None:
    body = b'{"prompt":"' + b"hello world " * (20_000_000 // 12) + b'"}'
    async with serving() as engine:
        app = create_app(engine, max_body_bytes=limit)
        done = anyio.Event()
        gaps: list[float] = []

        async def probe() -> None:
            last = time.thread_time()  # the loop's own: what else the machine does is no freeze
            while not done.is_set():
                assert (await get(app, "/health")).status == 200
                await anyio.lowlevel.checkpoint()
                now = time.thread_time()
                gaps.append(now - last)
                last = now

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(probe)
                reply = await post(app, "/v1/completions", body)
                done.set()
    assert reply.status == (413 if limit < len(body) else 400)
    assert max(gaps) < 0.3


async def test_a_long_prompt_is_tokenized_beside_the_loop() -> None:
    async with serving(max_model_len=2_000_000, num_gpu_blocks=1) as engine:
        app = create_app(engine)
        done = anyio.Event()
        probes = 0

        async def probe() -> None:
            nonlocal probes
            while not done.is_set():
                assert (await get(app, "/health")).status == 200
                probes += 1

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(probe)
                reply = await post(app, "/v1/completions", {"prompt": "hello world " * 20_000})
                done.set()
    assert reply.status == 400
    assert probes > 10
