"""What an operator and a client can see: preemptions, stalls, the loop's lag, readiness."""

from __future__ import annotations

import re

import anyio
import pytest

from routes.app import create_app
from tests.asgi import Reply, get, post
from tests.serving import VOCAB_SIZE, EchoRunner, joined, serving

pytestmark = pytest.mark.anyio


def value(reply: Reply, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", reply.body.decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.parametrize("num_cpu_blocks", [0, 64])
async def test_a_stream_that_is_preempted_says_so_and_metrics_count_it(num_cpu_blocks: int) -> None:
    runner = EchoRunner(
        num_gpu_blocks=16, num_cpu_blocks=num_cpu_blocks, block_size=4, max_model_len=64, vocab_size=VOCAB_SIZE
    )
    replies: list[Reply] = []
    async with serving(runner=runner, preemption="auto", enable_prefix_caching=False) as engine:
        app = create_app(engine)

        async def run(prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 44, "temperature": 0, "stream": True}
            replies.append(await post(app, "/v1/completions", body))
            assert joined(replies[-1]) == (prompt * 11)[:44]

        async with anyio.create_task_group() as tasks:
            for prompt in ("abcd", "efgh", "ijkl"):
                tasks.start_soon(run, prompt)
        metrics = await get(app, "/metrics")
    text = b"".join(reply.body for reply in replies)
    assert text.count(b": preempted\n") == engine.stats().num_preemptions > 0
    assert text.count(b": resumed\n") == text.count(b": preempted\n")
    kind = "swap" if num_cpu_blocks else "recompute"
    total = value(metrics, f'aserve_preemptions_total{{cause="memory",kind="{kind}"}}')
    assert total == engine.stats().num_preemptions


async def test_metrics_show_the_loops_lag_the_last_step_and_the_oldest_wait() -> None:
    async with serving() as engine:
        app = create_app(engine)
        assert b"last_step_timestamp" not in (await get(app, "/metrics")).body
        await post(app, "/v1/completions", {"prompt": "abc", "max_tokens": 5})
        metrics = await get(app, "/metrics")
    assert value(metrics, "aserve_event_loop_lag_seconds_count") == engine.metrics.num_steps
    assert 0 < value(metrics, "aserve_event_loop_lag_seconds_sum") < 5
    assert value(metrics, "aserve_last_step_timestamp_seconds") > 1.7e9
    assert value(metrics, "aserve_oldest_wait_seconds") == 0
    assert value(metrics, "aserve_requests_paused") == 0


async def test_ready_means_that_a_token_was_generated() -> None:
    async with serving() as engine:
        app = create_app(engine)
        assert (await get(app, "/health")).status == 200
        assert engine.metrics.num_output_tokens == 0
        assert (await get(app, "/ready")).status == 200
        assert engine.metrics.num_output_tokens == 1
        assert (await get(app, "/ready")).status == 200
        assert engine.metrics.num_output_tokens == 1
