"""Engines come and go: start, stop, drain, death, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from aserve.engine import Engine
from aserve.errors import ConfigError, EngineDeadError, OverloadedError
from aserve.executors.thread import ThreadExecutor
from aserve.plan import StepPlan
from tests.engine_util import VIRTUAL, HeldExecutor, VirtualLoop, greedy, settle, word_runner, word_tokenizer
from tests.fakes import FakeRunner

pytestmark = pytest.mark.anyio
PROMPT = [300, 301, 302]
TEXT = word_tokenizer()


def aserve_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aserve")]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    for thread in aserve_threads():
        thread.join(5)
    assert aserve_threads() == []


async def test_fifty_starts_and_stops_leave_no_thread_task_file_engine_or_memory(depth: int) -> None:
    tasks = asyncio.all_tasks()
    engines: list[weakref.ref[Engine]] = []
    usage: list[tuple[int, int, int]] = []  # files, threads, bytes
    for turn in range(50):
        if turn in (10, 49):  # the first ones make what stays
            gc.collect()
            usage.append(await asyncio.to_thread(_usage))
        runner = word_runner(depth=depth)
        async with Engine(executor=ThreadExecutor(runner), tokenizer=TEXT) as engine:
            engines.append(weakref.ref(engine))
            await engine.generate_text(PROMPT, greedy(3))
            unread = await engine.submit(PROMPT, greedy(200))
            await anext(unread)
            del unread
        assert runner.closed
        del engine
    assert asyncio.all_tasks() == tasks
    gc.collect()
    assert [reference for reference in engines if reference() is not None] == []
    assert usage[1][:2] == usage[0][:2]
    assert usage[1][2] - usage[0][2] < 4 << 20


def _usage() -> tuple[int, int, int]:
    process = psutil.Process()
    return process.num_fds(), process.num_threads(), process.memory_info().rss


async def test_several_engines_serve_side_by_side() -> None:
    runners = [word_runner(num_gpu_blocks=64 + i) for i in range(3)]
    engines = [Engine(executor=ThreadExecutor(runner), tokenizer=TEXT) for runner in runners]
    for engine in engines:
        await engine.start()
    streams = [await engine.submit(PROMPT, greedy(30)) for engine in engines for _ in range(2)]
    results = await asyncio.gather(*(stream.completions() for stream in streams))
    assert {result[0].token_ids for result in results} == {tuple(runners[0].solo(PROMPT, greedy(30)))}
    for engine in engines:
        await engine.stop()


async def test_an_engine_starts_once_and_serves_only_while_it_runs() -> None:
    engine = Engine(executor=ThreadExecutor(word_runner()), tokenizer=TEXT)
    with pytest.raises(OverloadedError, match="not started"):
        await engine.submit(PROMPT)
    async with engine:
        engine.check()
        with pytest.raises(RuntimeError, match="once"):
            await engine.start()
    with pytest.raises(OverloadedError, match="shutting down"):
        engine.check()
    await engine.stop()


async def test_a_failed_start_raises_its_cause_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unloadable(FakeRunner):
        def load(self) -> Any:
            raise ConfigError("no such model", param="model")

    def unplannable(*_: object) -> None:
        raise ConfigError("no room", param="block_size")

    runner = Unloadable()
    with pytest.raises(ConfigError, match="no such model"):
        async with Engine(executor=ThreadExecutor(runner), tokenizer=TEXT):
            raise AssertionError("it must not start")
    assert runner.closed
    with pytest.raises(ConfigError, match="policy"):  # before anything is loaded
        await Engine(executor=ThreadExecutor(Unloadable()), tokenizer=TEXT, policy="nonsense").start()
    runner = word_runner()
    monkeypatch.setattr("aserve.engine.Scheduler.create", unplannable)
    with pytest.raises(ConfigError, match="no room"):  # found out after the worker has started
        await Engine(executor=ThreadExecutor(runner), tokenizer=TEXT).start()
    assert runner.closed


async def test_stop_without_a_drain_ends_open_streams(depth: int) -> None:
    runner = word_runner(depth=depth)
    engine = Engine(executor=ThreadExecutor(runner), tokenizer=TEXT)
    await engine.start()
    stream = await engine.submit(PROMPT, greedy(240))
    await anext(stream)
    await engine.stop()
    with pytest.raises(OverloadedError, match="shutting down"):
        await stream.completions()
    assert engine.metrics.outcomes["cancelled"] == 1
    assert runner.closed


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
async def test_a_drain_lets_live_requests_finish_and_refuses_new_ones(anyio_backend: object) -> None:
    executor = HeldExecutor(word_runner(), auto=False)
    engine = Engine(executor=executor, tokenizer=TEXT)
    await engine.start()
    stream = await engine.submit(PROMPT, greedy(5))
    stopping = asyncio.ensure_future(engine.stop(drain_timeout=60.0))
    await asyncio.sleep(0)
    assert engine.draining
    with pytest.raises(OverloadedError):
        await engine.submit(PROMPT)
    executor.let_go()
    assert len((await stream.completions())[0].token_ids) == 5
    await stopping
    assert executor.stopped == 1


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
async def test_a_drain_ends_at_its_timeout_or_when_hurried(anyio_backend: object) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    for hurried in (False, True):
        executor = HeldExecutor(word_runner(), auto=True)
        engine = Engine(executor=executor, tokenizer=TEXT)
        await engine.start()
        executor.auto = False
        stream = await engine.submit(PROMPT, greedy(200))
        await settle()
        begun = loop.time()
        stopping = asyncio.ensure_future(engine.stop(drain_timeout=30.0))
        if hurried:
            await asyncio.sleep(1.0)
            stopping = asyncio.ensure_future(engine.stop())
        loop.call_later(1.0 if hurried else 31.0, executor.let_go)  # a step is running all the while
        with pytest.raises(OverloadedError, match="shutting down"):
            await stream.text()
        await stopping
        assert loop.time() - begun == pytest.approx(2.0 if hurried else 31.0)


async def test_cancelling_stop_does_not_stop_the_stopping() -> None:
    executor = HeldExecutor(word_runner(), auto=False)
    engine = Engine(executor=executor, tokenizer=TEXT)
    await engine.start()
    await engine.submit(PROMPT, greedy(200))
    await settle()
    stopping = asyncio.ensure_future(engine.stop())
    await settle()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    executor.let_go()
    await engine.stop()
    assert executor.stopped == 1


async def test_a_dead_worker_fails_every_stream_and_later_calls(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    cause = RuntimeError("device lost")

    def die(plan: StepPlan) -> None:
        if plan.number == 6:
            raise cause

    runner = word_runner(depth=depth, before_step=die)
    engine = Engine(executor=ThreadExecutor(runner), tokenizer=TEXT)
    await engine.start()
    streams = [await engine.submit([300 + i], greedy(200)) for i in range(3)]
    for stream in streams:
        with pytest.raises(EngineDeadError, match="device lost") as failure:
            await stream.completions()
        assert failure.value.__cause__ is cause
    with pytest.raises(EngineDeadError, match="device lost"):
        await engine.submit(PROMPT)
    with pytest.raises(EngineDeadError):
        engine.check()
    assert engine.metrics.outcomes["error"] == 3
    assert engine.stats().num_in_flight == 0
    await engine.stop()
    assert runner.closed
    assert "device lost" in caplog.text


async def test_a_step_that_hangs_kills_the_engine_and_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    def hang(plan: StepPlan) -> None:
        go_on.wait(30)

    engine = Engine(
        executor=ThreadExecutor(word_runner(before_step=hang), name="aserve-hung"), tokenizer=TEXT, step_timeout=0.05
    )
    await engine.start()
    stream = await engine.submit(PROMPT, greedy(20))
    with pytest.raises(EngineDeadError, match=r"longer than 0\.05 s"):
        await stream.completions()
    with pytest.raises(EngineDeadError, match=r"longer than 0\.05 s"):
        await engine.submit(PROMPT)
    await engine.stop()  # does not wait for the thread
    assert [thread.name for thread in aserve_threads()] == ["aserve-hung-model"]
    go_on.set()


async def test_a_scheduler_that_breaks_is_a_dead_engine_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(executor=ThreadExecutor(word_runner()), tokenizer=TEXT)
    await engine.start()
    monkeypatch.setattr(engine._scheduler, "commit", lambda result, now: 1 / 0)
    with pytest.raises(EngineDeadError, match="division by zero"):
        await engine.generate_text(PROMPT, greedy(5))
    await engine.stop()


def test_a_program_that_is_interrupted_ends_cleanly() -> None:
    """asyncio.run cancels every task, the engine's own too."""
    runner = word_runner(depth=2)
    ends: list[str] = []

    async def main() -> None:
        async with Engine(executor=ThreadExecutor(runner), tokenizer=TEXT) as engine:
            stream = await engine.submit(PROMPT, greedy(200))
            await anext(stream)
            for task in asyncio.all_tasks():
                task.cancel()
            try:
                async for _ in stream:
                    pass
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert ends == ["cancelled"]


def test_importing_aserve_imports_no_torch_and_no_tokenizer() -> None:
    import subprocess
    import sys

    code = "import aserve, sys; aserve.Engine; print({'torch', 'transformers', 'httpx', 'jinja2'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
