"""Many streams at once, half of which go away at random: the others never notice, and the pool is whole again."""

from __future__ import annotations

import asyncio
import random

import pytest

from aserve.engine import Engine
from aserve.executors.thread import ThreadExecutor
from aserve.request import SamplingParams
from tests.engine_util import check_whole, until_idle, word_runner, word_tokenizer, words

pytestmark = pytest.mark.anyio
TEXT = word_tokenizer()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_gpu_blocks", [64, 400])
async def test_survivors_of_64_streams_equal_their_solo_runs(depth: int, num_gpu_blocks: int) -> None:
    rng = random.Random(depth * 1000 + num_gpu_blocks)
    runner = word_runner(depth=depth, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=32, eos_chance=0.01)
    lost = 0

    async def client(number: int, leave_after: int | None) -> None:
        nonlocal lost
        shared = [500 + i for i in range(rng.choice((0, 8)))]  # some share a prefix
        prompt = [*shared, *(rng.randrange(300, 1000) for _ in range(rng.randrange(1, 30)))]
        params = SamplingParams(max_tokens=rng.randrange(1, 60), seed=number, temperature=float(number % 2))
        expected = runner.solo(prompt, params)
        got: list[int] = []
        text = ""
        async with await engine.submit(prompt, params) as stream:
            async for delta in stream:
                got += delta.token_ids
                text += delta.text
                if leave_after is not None and len(got) > leave_after:
                    lost += 1
                    break
        assert got == expected[: len(got)]
        if leave_after is None:
            assert got == expected
            assert text == TEXT.decode(expected)

    async with Engine(executor=ThreadExecutor(runner), tokenizer=TEXT) as engine:
        leaving = [rng.randrange(0, 20) if number % 2 else None for number in range(64)]
        await asyncio.gather(*(client(number, leave) for number, leave in enumerate(leaving)))
        await until_idle(engine)
        check_whole(engine)
        outcomes = engine.metrics.outcomes
        assert sum(outcomes.values()) == 64
        assert outcomes["error"] == outcomes["deadline"] == 0
        assert 0 < outcomes["cancelled"] <= lost


@pytest.mark.parametrize("depth", [1, 2])
async def test_tasks_cancelled_at_any_moment_leave_nothing(depth: int) -> None:
    rng = random.Random(depth)
    runner = word_runner(depth=depth, num_gpu_blocks=100)
    async with Engine(executor=ThreadExecutor(runner), tokenizer=TEXT) as engine:
        tasks = []
        for number in range(200):
            prompt = words([rng.randrange(300, 1000) for _ in range(5)])
            options = SamplingParams(max_tokens=20, seed=number)
            tasks.append(asyncio.ensure_future(engine.generate_text(prompt, options)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert {task.exception() for task in tasks if not task.cancelled()} == {None}
        await until_idle(engine)
        check_whole(engine)
