"""O07: health answers while a step is running."""

from __future__ import annotations

import threading
from typing import cast

import anyio
import pytest

from routes.app import create_app
from tests.asgi import get, post
from tests.serving import VOCAB_SIZE, EchoRunner, serving

pytestmark = pytest.mark.anyio


async def test_health_does_not_wait_for_the_model() -> None:
    gate = threading.Event()
    runner = EchoRunner(
        num_gpu_blocks=64,
        block_size=16,
        max_model_len=256,
        vocab_size=VOCAB_SIZE,
        before_step=lambda plan: cast(None, gate.wait(10)),
    )
    async with serving(runner=runner) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)
        body = {"prompt": "ab", "max_tokens": 2, "stream": True}
        tasks.start_soon(post, app, "/v1/completions", body)
        while not runner.plans:
            await anyio.lowlevel.checkpoint()
        for path in ("/health", "/metrics", "/load", "/v1/models"):
            assert (await get(app, path)).status == 200
        assert not gate.is_set()
        gate.set()
