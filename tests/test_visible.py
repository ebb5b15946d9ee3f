"""What an operator and a client can see: preemptions, stalls, the loop's lag, readiness."""

from __future__ import annotations

import re
from dataclasses import replace

import anyio
import pytest

from aserve.metrics import Metrics
from routes.app import create_app
from tests.asgi import Reply, get, post
from tests.serving import VOCAB_SIZE, EchoRunner, joined, serving

pytestmark = pytest.mark.anyio


def value(reply: Reply, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", reply.body.decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.parametrize("num_cpu_blocks", [0, 64])
async def test_a_stream_that_is_preempted_says_so_and_metrics_count_it(
    num_cpu_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aserve")
    runner = EchoRunner(
        num_gpu_blocks=16, num_cpu_blocks=num_cpu_blocks, block_size=4, max_model_len=64, vocab_size=VOCAB_SIZE
    )
    runner.info = replace(runner.info, block_bytes=64)
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
    moved = [value(metrics, f'aserve_swap_bytes_total{{direction="{way}"}}') for way in ("out", "in")]
    assert (moved[0] == moved[1] > 0) if num_cpu_blocks else moved == [0, 0]
    logged = [
        record.fields for record in caplog.records if hasattr(record, "fields") and "swap_seconds" in record.fields
    ]
    assert len(logged) == total
    for fields in logged:
        assert (fields["event"], fields["cause"], fields["kind"]) == ("preempted", "memory", kind)
        assert fields["num_blocks"] > 0 and fields["recompute_seconds"] > 0


async def test_a_tenant_is_an_api_key_or_else_a_user() -> None:
    async with serving() as engine:
        for user in ("ann", "bob", "bob"):
            await post(create_app(engine), "/v1/completions", {"prompt": "abc", "max_tokens": 2, "user": user})
        assert {name: count for name, (count, _) in engine.metrics.waits.items()} == {"ann": 1, "bob": 2}
        keyed = create_app(engine, api_keys=["secret"])
        reply = await post(
            keyed,
            "/v1/completions",
            {"prompt": "abc", "max_tokens": 2, "user": "ann"},
            headers={"authorization": "Bearer secret"},
        )
        assert reply.status == 200
        metrics = await get(create_app(engine), "/metrics")
    (name,) = engine.metrics.waits.keys() - {"ann", "bob"}
    assert name.startswith("key-") and "secret" not in name
    assert value(metrics, 'aserve_tenant_queue_seconds_count{tenant="bob"}') == 2
    assert value(metrics, f'aserve_tenant_queue_seconds_count{{tenant="{name}"}}') == 1


def test_tenants_beyond_a_hundred_are_counted_together() -> None:
    metrics = Metrics()
    for number in range(150):
        metrics._count_wait(f"user{number}", 0.5)
    assert len(metrics.waits) == 101 and metrics.waits["(others)"] == (50, 25.0)


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
