"""Beam searches through the engine, over the fake runner: what their readers see, and how they end."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from aserve import beam_search
from aserve.errors import InvalidRequestError, RequestFailedError
from aserve.executors import StepError
from aserve.plan import StepPlan, StepResult
from aserve.request import SamplingParams
from tests.engine_util import (
    PROMPT,
    TEXT,
    VIRTUAL,
    greedy,
    held,
    serving,
    settle,
    until_idle,
    word_runner,
    words,
)
from tests.fakes import FakeRunner, make_request

pytestmark = pytest.mark.anyio


def beams(width: int, max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("depth", [1, 2])
async def test_searches_side_by_side_give_what_each_gives_alone(depth: int) -> None:
    runner = word_runner(depth=depth, num_gpu_blocks=60, eos_chance=0.1)
    widths = (1, 2, 3, 4)
    async with serving(runner, enable_prefix_caching=False) as engine:
        plain = asyncio.ensure_future(engine.generate(PROMPT, greedy(30)).completions())
        found = await asyncio.gather(*(beam_search(engine, PROMPT, width=w, max_tokens=20) for w in widths))
        [completion] = await plain
        assert list(completion.token_ids) == runner.solo(PROMPT, greedy(30))
        for width, group in zip(widths, found, strict=True):
            expected = runner.solo_beams(make_request(PROMPT, beams(width, 20)))
            assert [(b.token_ids, b.score, b.finish_reason) for b in group] == [
                (b.token_ids, b.score, b.finish_reason) for b in expected
            ]
            for beam in group:
                assert beam.text == TEXT.decode([token for token in beam.token_ids if token != runner.eos_token_id])


async def test_a_reader_sees_nothing_before_the_end_and_then_each_beam_once() -> None:
    runner = word_runner()
    async with serving(runner) as engine:
        deltas = [delta async for delta in engine.generate(PROMPT, beams(3, 9, logprobs=1))]
        expected = runner.solo_beams(make_request(PROMPT, beams(3, 9, logprobs=1)))
        assert [(d.index, d.token_ids, d.offset, d.logprobs) for d in deltas] == [
            (index, beam.token_ids, 9, beam.logprobs) for index, beam in enumerate(expected)
        ]


async def test_open_max_tokens_is_what_the_pool_leaves_for_every_beam() -> None:
    async with serving(word_runner(num_gpu_blocks=9, block_size=4)) as engine:
        found = await beam_search(engine, PROMPT[:4], width=2)
        assert [len(beam.token_ids) for beam in found] == [16, 16]


async def test_stop_strings_end_beams_at_the_same_place_as_the_text() -> None:
    runner = word_runner()
    async with serving(runner) as engine:
        [first, *_] = await beam_search(engine, PROMPT, width=3, max_tokens=12)
        stop = words([first.token_ids[5]]).strip()
        params = beams(3, 12, stop=(stop,), early_stopping="never")
        found = await engine.generate(PROMPT, params).completions()
        assert len(found) == 3 and any(done.stop_reason == stop for done in found)
        for done in found:
            assert stop not in done.text
            assert (done.stop_reason == stop) == (done.finish_reason == "stop")
            if done.stop_reason == stop:
                assert TEXT.decode(list(done.token_ids)) == done.text + stop


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
async def test_a_deadline_gives_the_best_so_far() -> None:
    runner = word_runner()
    async with held(runner) as (engine, executor):
        stream = await engine.submit(PROMPT, beams(2, 50), timeout=5.0)
        for _ in range(4):
            await settle()
            executor.release()
        await asyncio.sleep(6.0)
        executor.let_go()
        found = await stream.completions()
        assert [done.finish_reason for done in found] == ["deadline"] * 2
        assert len(found[0].token_ids) >= 4 and found[0].token_ids != found[1].token_ids


async def test_a_caller_that_is_cancelled_cancels_its_beams() -> None:
    async with held(word_runner()) as (engine, executor):
        search = asyncio.ensure_future(beam_search(engine, PROMPT, width=4, max_tokens=40))
        await settle()
        executor.release()
        await settle()
        assert engine.stats().num_running == 4
        search.cancel()
        executor.let_go()
        await until_idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 1


async def test_a_search_that_breaks_steps_ends_alone() -> None:
    def break_beams(plan: StepPlan) -> None:
        slots = tuple(chunk.slot for chunk in plan.chunks if chunk.start > len(PROMPT))
        if slots:
            raise StepError("these beams do not compute", slots[:1])

    runner = word_runner(before_step=break_beams, depth=2)
    async with serving(runner) as engine:
        plain = asyncio.ensure_future(engine.generate(PROMPT, greedy(20)).completions())
        with pytest.raises(RequestFailedError, match="do not compute"):
            await beam_search(engine, PROMPT, width=2, max_tokens=20)
        assert len((await plain)[0].token_ids) == 20


class Silent(FakeRunner):
    """Gives no logprobs, whoever asks."""

    def launch(self, plan: StepPlan) -> StepResult:
        return dataclasses.replace(super().launch(plan), logprobs={})


async def test_an_executor_without_logprobs_fails_the_search_and_nothing_else() -> None:
    async with serving(Silent()) as engine:
        with pytest.raises(RequestFailedError, match="no logprobs"):
            await beam_search(engine, PROMPT, width=2, max_tokens=5)
        assert len((await engine.generate(PROMPT, greedy(5)).completions())[0].token_ids) == 5


async def test_best_of_draws_more_and_returns_the_best() -> None:
    runner = word_runner()
    async with serving(runner) as engine:
        params = SamplingParams(n=2, best_of=5, max_tokens=7, temperature=1.0, seed=4)
        stream = engine.generate(PROMPT, params)
        found = await stream.completions()
        every = [runner.solo(PROMPT, params, choice=index) for index in range(5)]
        assert all(list(done.token_ids) in every and done.logprobs is None for done in found)
        assert stream.usage.completion_tokens == 35
        ranked = await engine.generate(PROMPT, dataclasses.replace(params, n=5, best_of=None)).completions()
        assert {done.token_ids for done in found} <= {done.token_ids for done in ranked}


@pytest.mark.parametrize("best_of", [0, 1, 129])
def test_best_of_is_at_least_n(best_of: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(n=2, best_of=best_of)
    assert caught.value.param == "best_of"
