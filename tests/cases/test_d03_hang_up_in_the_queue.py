"""D03: a queued call whose client left costs no prefill."""

from __future__ import annotations

import threading
from typing import cast

import anyio
import pytest

from routes.app import create_app
from tests.asgi import post
from tests.serving import VOCAB_SIZE, EchoRunner, idle, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [True, False])
async def test_a_departed_call_leaves_the_queue(stream: bool) -> None:
    gate = threading.Event()
    runner = EchoRunner(
        num_gpu_blocks=256,
        block_size=16,
        max_model_len=1024,
        vocab_size=VOCAB_SIZE,
        before_step=lambda plan: cast(None, gate.wait(10)),
    )
    async with serving(runner=runner, max_num_seqs=1) as engine:
        app = create_app(engine)
        async with anyio.create_task_group() as tasks:
            first = {"prompt": "a", "max_tokens": 20, "temperature": 0}
            tasks.start_soon(post, app, "/v1/completions", first)
            while not engine.stats().num_running:
                await anyio.lowlevel.checkpoint()
            second = {"prompt": "queued behind", "max_tokens": 20, "stream": stream}
            await post(app, "/v1/completions", second, disconnect_at=1 if stream else 0)
            gate.set()
        await idle(engine)
        prefilled = [chunk.tokens for plan in runner.plans for chunk in plan.chunks]
        assert len(prefilled) == 1
        assert engine.metrics.outcomes["cancelled"] == 1
