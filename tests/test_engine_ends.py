"""How an engine's requests end early: by their reader, a deadline, a failure; with one and two steps in flight."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aserve.errors import DeadlineError, InvalidRequestError, RequestFailedError
from aserve.executors import StepError
from aserve.plan import StepPlan
from tests.engine_util import (
    PROMPT,
    TEXT,
    VIRTUAL,
    VirtualLoop,
    check_whole,
    greedy,
    held,
    serving,
    settle,
    until_idle,
    word_runner,
)

pytestmark = pytest.mark.anyio


# ways to go away


async def test_leaving_early_gives_the_blocks_back_within_depth_steps(depth: int) -> None:
    async with held(word_runner(depth=depth)) as (engine, executor):
        async with engine.generate(PROMPT, greedy(50)) as stream:
            await settle()
            executor.release()
            async for _ in stream:
                break
            assert engine.stats().num_blocks_used > 0
        for _ in range(depth):
            await settle()
            executor.release()
        await settle()
        check_whole(engine)
        assert engine.metrics.outcomes["cancelled"] == 1


async def test_a_dropped_stream_is_cancelled(depth: int) -> None:
    async with serving(word_runner(depth=depth)) as engine:
        stream = await engine.submit(PROMPT, greedy(200))
        await anext(stream)
        del stream
        gc.collect()
        await until_idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 1


async def test_a_dropped_queued_request_costs_no_step() -> None:
    runner = word_runner()
    async with held(runner) as (engine, executor):
        busy = await engine.submit(PROMPT, greedy(50))
        await settle()
        queued = await engine.submit([900, 901], greedy(50))
        del queued
        executor.let_go()
        assert len((await busy.completions())[0].token_ids) == 50
        assert not any(900 in chunk.tokens for plan in runner.plans for chunk in plan.chunks)


async def test_a_task_cancelled_while_it_encodes_submits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    go_on = threading.Event()
    encode = TEXT.encode

    def slow(*args: Any, **options: Any) -> list[int]:
        assert go_on.wait(30)
        return encode(*args, **options)

    async with serving(word_runner(max_model_len=9000, num_gpu_blocks=4000)) as engine:
        monkeypatch.setattr(TEXT, "encode", slow)
        submitting = asyncio.ensure_future(engine.submit("a" * 5000, greedy(5)))
        await settle()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        go_on.set()
        await settle()
        assert engine.stats().num_waiting == engine.stats().num_running == 0
        assert sum(engine.metrics.outcomes.values()) == 0


async def test_a_cancelled_reader_cancels_its_request(depth: int) -> None:
    async with held(word_runner(depth=depth)) as (engine, executor):
        reading = asyncio.ensure_future(engine.generate_text(PROMPT, greedy(50)))
        await settle()
        executor.release()
        await settle()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        executor.let_go()
        await until_idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 1


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
async def test_a_deadline_ends_a_running_request_and_leaves_it_its_tokens(anyio_backend: object, depth: int) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    runner = word_runner(depth=depth)
    async with held(runner) as (engine, executor):
        stream = await engine.submit(PROMPT, greedy(50), timeout=5.0)
        await settle()
        executor.release()
        await settle()
        loop.seconds += 6
        executor.let_go()
        (completion,) = await stream.completions()
        assert completion.finish_reason == "deadline"
        assert 0 < len(completion.token_ids) <= 1 + depth
        assert list(completion.token_ids) == runner.solo(PROMPT, greedy(len(completion.token_ids)))
        assert engine.metrics.outcomes["deadline"] == 1


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
@pytest.mark.parametrize("option", ["timeout", "ttft_timeout"])
async def test_a_deadline_before_the_first_token_is_an_error(anyio_backend: object, option: str, depth: int) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    async with held(word_runner(num_gpu_blocks=8, depth=depth)) as (engine, executor):
        big = await engine.submit([5] * 20, greedy(10))  # leaves no room
        await settle()
        queued = await engine.submit([6] * 20, greedy(10), **{option: 2.0})  # type: ignore[misc]
        await settle()
        loop.seconds += 3
        executor.let_go()
        with pytest.raises(DeadlineError):
            await queued.text()
        assert len((await big.completions())[0].token_ids) == 10
        with pytest.raises(DeadlineError):
            await (await engine.submit(PROMPT, greedy(5), **{option: -1.0})).text()  # type: ignore[misc]


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
async def test_a_deadline_that_is_met_does_nothing(anyio_backend: object) -> None:
    async with held(word_runner()) as (engine, executor):
        executor.let_go()
        stream = await engine.submit(PROMPT, greedy(10), timeout=2.0, ttft_timeout=1.0)
        assert (await stream.completions())[0].finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="timeout"):
            await engine.submit(PROMPT, greedy(10), timeout=float("nan"))


# failures


async def test_a_failed_step_ends_only_its_culprit(depth: int) -> None:
    culprit: list[int] = []

    def fail_once(plan: StepPlan) -> None:
        if plan.number == 4:
            culprit.append(plan.draws[0])
            raise StepError("row 0 is bad", (plan.draws[0],))

    runner = word_runner(depth=depth, before_step=fail_once)
    async with serving(runner) as engine:
        prompts = [[300 + i, 400 + i] for i in range(3)]
        streams = [await engine.submit(prompt, greedy(20)) for prompt in prompts]
        results = await asyncio.gather(*(stream.completions() for stream in streams), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in failed] == [RequestFailedError]
        for prompt, result in zip(prompts, results, strict=True):
            if not isinstance(result, BaseException):
                assert list(result[0].token_ids) == runner.solo(prompt, greedy(20))
        assert engine.metrics.outcomes["error"] == 1
        assert engine.metrics.num_failed_steps == 1


async def test_logits_that_are_not_finite_end_one_request(depth: int) -> None:
    runner = word_runner(depth=depth)
    async with serving(runner) as engine:
        good = await engine.submit(PROMPT, greedy(20))
        await anext(good)
        runner.bad_slots.add(1)
        with pytest.raises(RequestFailedError, match="finite"):
            await engine.generate_text([400, 401], greedy(20))
        await good.completions()
        assert good.usage.completion_tokens == 20


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("where", ["push", "flush"])  # in the middle, and with the last token
async def test_a_mistake_in_one_requests_text_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, where: str, n: int
) -> None:
    class Broken:
        def push(self, token_id: int) -> str:
            return "" if where == "flush" else str({}[token_id])

        def flush(self) -> str:
            return str({}["end"])

    runner = word_runner()
    async with serving(runner) as engine:
        good = await engine.submit(PROMPT, greedy(20))
        monkeypatch.setattr(TEXT, "detokenizer", lambda prompt, skip: Broken())
        with pytest.raises(RequestFailedError, match="KeyError"):
            async with engine.generate([400, 401], greedy(5, n=n)) as stream:
                await stream.completions()
        (completion,) = await good.completions()
        assert list(completion.token_ids) == runner.solo(PROMPT, greedy(20))
        await until_idle(engine)
        assert (engine.metrics.outcomes["length"], engine.metrics.outcomes["error"]) == (1, 1)


async def test_a_listener_that_raises_ends_its_own_request_alone(depth: int) -> None:
    def raises(change: str) -> None:
        raise KeyError(change)

    runner = word_runner(depth=depth, num_gpu_blocks=10)
    async with serving(runner) as engine:
        first = await engine.submit(PROMPT, greedy(20))
        second = await engine.submit([400, *PROMPT], greedy(20))
        second.on_change(raises)
        (completion,) = await first.completions()
        assert list(completion.token_ids) == runner.solo(PROMPT, greedy(20))
        with pytest.raises(RequestFailedError, match="preempted"):
            await second.completions()


async def test_every_request_is_counted_once_under_one_outcome() -> None:
    async with serving(word_runner(eos_chance=0.05), max_queue=100) as engine:
        finished = [await engine.submit([300 + i], greedy(5, ignore_eos=True)) for i in range(5)]
        aborted = [await engine.submit([400 + i], greedy(200, ignore_eos=True)) for i in range(5)]
        for stream in aborted:
            await anext(stream)
            await stream.aclose()
        for stream in finished:
            await stream.completions()
        await until_idle(engine)
        outcomes = engine.metrics.outcomes
        assert outcomes == {"stop": 0, "length": 5, "cancelled": 5, "deadline": 0, "error": 0}
        assert engine.metrics.request.count == engine.metrics.first_token.count == 10
        tokens = sum(stream.usage.completion_tokens for stream in finished + aborted)
        assert engine.metrics.num_output_tokens == tokens
        assert engine.metrics.inter_token.count == tokens - 10
