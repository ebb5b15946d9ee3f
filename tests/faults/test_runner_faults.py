"""Faults of the model thread over HTTP: each has a stated outcome, in seconds, and nobody is left without an end."""

from __future__ import annotations

import anyio
import httpx
import pytest
from starlette.types import ASGIApp

from aserve import EngineDeadError
from routes.app import create_app
from tests.asgi import Reply, get, post
from tests.faults.runner import DEADLY, FAULTS, Fault, FaultyRunner
from tests.process import events, server
from tests.serving import VOCAB_SIZE, idle, joined, reasons, serving

BAD = {"prompt": "!ab", "max_tokens": 20, "temperature": 0}
GOOD = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "stream": True}
TEXT = ("abc" * 67)[:200]


@pytest.mark.anyio
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
async def test_every_request_ends_as_the_fault_says(
    fault: Fault, stream: bool, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FaultyRunner(
        fault=fault, num_gpu_blocks=256, block_size=16, max_model_len=1024, vocab_size=VOCAB_SIZE, depth=depth
    )
    replies: dict[str, Reply] = {}
    async with serving(runner=runner, step_timeout=0.3) as engine:
        app = create_app(engine)

        async def run(name: str, body: object) -> None:
            replies[name] = await post(app, "/v1/completions", body)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                for name in ("first", "second"):
                    tasks.start_soon(run, name, GOOD)
                while engine.stats().num_output_tokens < 4:
                    await anyio.lowlevel.checkpoint()
                tasks.start_soon(run, "bad", {**BAD, "stream": stream})
        runner.release.set()
        if fault in DEADLY:
            for reply in replies.values():
                assert_dead(reply)
            await assert_dead_to_new(app)
            assert engine.dead
            with pytest.raises(EngineDeadError):
                engine.check()
        else:
            for name in ("first", "second"):
                assert (joined(replies[name]), reasons(replies[name])) == (TEXT, [(0, "length")])
            if fault == "memory":
                assert_well(replies["bad"], stream)
            else:
                assert_failed(replies["bad"], stream)
            runner.fault = None
            again = await post(app, "/v1/completions", BAD)
            assert again.json()["choices"][0]["text"] == ("!ab" * 7)[:20]
            assert (await get(app, "/health")).status == 200
            await idle(engine)
        outcomes = engine.metrics.outcomes
        assert sum(outcomes.values()) == (3 if fault in DEADLY else 4)


def assert_dead(reply: Reply) -> None:
    if reply.status == 200:
        assert reply.events()[-1]["error"]["code"] == "engine_dead"
        assert reply.complete
    else:
        assert reply.status == 503


async def assert_dead_to_new(app: ASGIApp) -> None:
    for reply in (await post(app, "/v1/completions", GOOD), await get(app, "/health"), await get(app, "/ready")):
        assert reply.status == 503
        assert reply.json()["error"]["code"] == "engine_dead"


def assert_failed(reply: Reply, stream: bool) -> None:
    if stream:
        events = reply.events()
        assert events[-1]["error"]["code"] == "request_failed"
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    else:
        assert reply.status == 500


def assert_well(reply: Reply, stream: bool) -> None:
    text = joined(reply) if stream else reply.json()["choices"][0]["text"]
    assert text == ("!ab" * 7)[:20]


@pytest.mark.parametrize("fault", ["die", "hang", "exit"])
def test_the_process_tells_its_clients_and_exits(fault: Fault) -> None:
    with server(fault=fault, step_timeout=1.0) as process, httpx.Client(timeout=10) as client:
        with client.stream("POST", process.url + "/v1/completions", json={**BAD, "stream": True}) as response:
            last = list(events(response.iter_lines()))[-1]
        assert last["error"]["code"] == "engine_dead"
        assert process.child.wait(timeout=8) != 0


def test_a_server_that_is_killed_leaves_no_answer_that_looks_whole() -> None:
    """There is no worker process: what kills the worker kills the server, and its clients' connections."""
    with server() as process, httpx.Client(timeout=10) as client:
        body = {**GOOD, "max_tokens": 4000}
        with client.stream("POST", process.url + "/v1/completions", json=body) as response:
            received = events(response.iter_lines())
            next(received)
            process.child.kill()
            with pytest.raises(httpx.TransportError):
                list(received)


def test_a_process_told_to_stay_says_that_it_is_dead() -> None:
    with server(fault="die", exit_on_death=False) as process, httpx.Client(timeout=10) as client:
        assert client.post(process.url + "/v1/completions", json=BAD).status_code == 503
        health = client.get(process.url + "/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert client.post(process.url + "/v1/completions", json=BAD).status_code == 503
        process.child.terminate()
        assert process.wait() == 1
