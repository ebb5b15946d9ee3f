"""An engine's requests: output, stops, ends, refusals and cancellation, with one and with two steps in flight."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aserve.engine import Engine
from aserve.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    TooManyRequestsError,
)
from aserve.executors import StepError
from aserve.executors.thread import ThreadExecutor
from aserve.plan import StepPlan
from aserve.request import SamplingParams
from tests.engine_util import (
    EOS,
    VIRTUAL,
    WORDS,
    HeldExecutor,
    VirtualLoop,
    check_whole,
    greedy,
    settle,
    until_idle,
    word_runner,
    word_tokenizer,
    words,
)
from tests.fakes import FakeRunner

pytestmark = pytest.mark.anyio
PROMPT = [300, 301, 302, 303, 304]
TEXT = word_tokenizer()


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@asynccontextmanager
async def serving(runner: FakeRunner, **options: Any) -> AsyncIterator[Engine]:
    """An engine over `runner` on a real model thread; afterwards nothing may be left in the pool."""
    options.setdefault("tokenizer", TEXT)
    async with Engine(executor=ThreadExecutor(runner), **options) as engine:
        yield engine
        await until_idle(engine)
        check_whole(engine)


@asynccontextmanager
async def held(runner: FakeRunner, **options: Any) -> AsyncIterator[tuple[Engine, HeldExecutor]]:
    """The same, with steps that end when the test says so."""
    executor = HeldExecutor(runner, auto=False)
    async with Engine(executor=executor, tokenizer=TEXT, **options) as engine:
        yield engine, executor
        executor.let_go()
        await until_idle(engine)
        check_whole(engine)


# output


async def test_a_stream_gives_the_tokens_and_text_of_a_solo_run(depth: int) -> None:
    runner = word_runner(depth=depth)
    params = greedy(20, allowed_token_ids=WORDS)
    async with serving(runner) as engine:
        stream = await engine.submit(PROMPT, params)
        deltas = [delta async for delta in stream]
        expected = runner.solo(PROMPT, params)
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert "".join(delta.text for delta in deltas) == words(expected) == TEXT.decode(expected)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        assert deltas[-1].offset == 20
        assert stream.usage == (5, 20, 0)
        assert stream.ended


async def test_every_choice_ends_once_and_the_first_is_as_if_alone(depth: int) -> None:
    runner = word_runner(depth=depth, eos_chance=0.1)
    params = SamplingParams(n=4, max_tokens=30, seed=7)
    async with serving(runner) as engine:
        stream = await engine.submit(PROMPT, params)
        completions = await stream.completions()
        assert [completion.index for completion in completions] == [0, 1, 2, 3]
        for completion in completions:
            expected = runner.solo(PROMPT, params, choice=completion.index)
            assert list(completion.token_ids) == expected
            assert completion.finish_reason == ("stop" if expected[-1] == EOS else "length")
        assert stream.usage.completion_tokens == sum(len(completion.token_ids) for completion in completions)
        (alone,) = await engine.generate(PROMPT, SamplingParams(max_tokens=30, seed=7)).completions()
        assert alone.token_ids == completions[0].token_ids


async def test_text_prompts_are_encoded_with_their_special_tokens() -> None:
    async with serving(word_runner()) as engine:
        stream = await engine.submit("ab", greedy(1))
        assert stream.prompt_token_ids == tuple(TEXT.encode("ab"))
        assert stream.prompt_token_ids[0] == TEXT.bos_token_id
        await stream.completions()
        bare = await engine.submit("ab", greedy(1), add_special_tokens=False)
        assert bare.prompt_token_ids == stream.prompt_token_ids[1:]
        assert len(await bare.text()) > 0


async def test_without_a_tokenizer_token_ids_go_in_and_come_out() -> None:
    runner = word_runner()
    async with serving(runner, tokenizer=None) as engine:
        (completion,) = await engine.generate(PROMPT, greedy(5)).completions()
        assert (list(completion.token_ids), completion.text) == (runner.solo(PROMPT, greedy(5)), "")
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await engine.submit("text")


async def test_unseeded_draws_differ_and_seeded_ones_repeat() -> None:
    async with serving(word_runner()) as engine:
        free, fixed = SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, seed=-3)
        assert len({await engine.generate_text(PROMPT, free) for _ in range(5)}) == 5
        assert len({await engine.generate_text(PROMPT, fixed) for _ in range(5)}) == 1


async def test_a_reader_that_comes_late_gets_everything_in_one_delta() -> None:
    runner = word_runner()
    async with serving(runner) as engine:
        stream = await engine.submit(PROMPT, greedy(30))
        await until_idle(engine)
        (delta,) = [delta async for delta in stream]
        assert list(delta.token_ids) == runner.solo(PROMPT, greedy(30))
        assert delta.offset == 30


async def test_logprobs_come_with_their_tokens() -> None:
    async with serving(word_runner()) as engine:
        (completion,) = await engine.generate(PROMPT, greedy(5, logprobs=2)).completions()
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)  # type: ignore[attr-defined]


# stops


async def test_a_stop_string_across_two_tokens_cuts_exactly(depth: int) -> None:
    runner = word_runner(depth=depth)
    params = greedy(40, allowed_token_ids=WORDS)
    tokens = runner.solo(PROMPT, params)
    stop = f"{words(tokens[5:6])[-2:]}{words(tokens[6:7])[:3]}"  # begins inside token 5, ends inside token 6
    text = words(tokens)
    cut = text.index(stop)
    for include in (False, True):
        async with serving(runner) as engine:
            asked = greedy(40, allowed_token_ids=WORDS, stop=(stop,), include_stop_str_in_output=include)
            stream = await engine.submit(PROMPT, asked)
            (completion,) = await stream.completions()
            assert completion.text == text[: cut + len(stop) * include]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert list(completion.token_ids) == tokens[:7]
            assert stream.usage.completion_tokens == 7


async def test_a_late_stop_drops_the_steps_in_flight(depth: int) -> None:
    runner = word_runner(depth=depth)
    params = greedy(40, allowed_token_ids=WORDS)
    tokens = runner.solo(PROMPT, params)
    async with held(runner) as (engine, executor):
        stream = await engine.submit(PROMPT, greedy(40, allowed_token_ids=WORDS, stop=(words(tokens[2:3]),)))
        for _ in range(3):
            await settle()
            assert len(executor.held) == depth
            executor.release()
        await settle()  # the stop is found while up to `depth` later steps run
        assert stream.ended
        assert await stream.text() == words(tokens[:2])
        assert stream.usage.completion_tokens == 3
        for _ in range(depth):
            executor.release()
            await settle()
        check_whole(engine)


async def test_a_stop_token_ends_without_text_and_is_named(depth: int) -> None:
    runner = word_runner(depth=depth)
    tokens = runner.solo(PROMPT, greedy(20, allowed_token_ids=WORDS))
    async with serving(runner) as engine:
        asked = greedy(20, allowed_token_ids=WORDS, stop_token_ids=(tokens[4],))
        (completion,) = await engine.generate(PROMPT, asked).completions()
        assert completion.text == words(tokens[:4])
        assert list(completion.token_ids) == tokens[:5]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[4])


async def test_an_end_token_is_a_stop_without_a_reason(depth: int) -> None:
    runner = word_runner(depth=depth, eos_chance=0.2)
    async with serving(runner) as engine:
        (completion,) = await engine.generate(PROMPT, greedy(200)).completions()
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.token_ids[-1] == EOS
        assert completion.text == TEXT.decode(completion.token_ids[:-1])
        (forced,) = await engine.generate(PROMPT, greedy(50, ignore_eos=True)).completions()
        assert (forced.finish_reason, len(forced.token_ids)) == ("length", 50)


async def test_held_back_text_comes_out_at_the_length_limit() -> None:
    runner = word_runner()
    tokens = runner.solo(PROMPT, greedy(6, allowed_token_ids=WORDS))
    async with serving(runner) as engine:
        asked = greedy(6, allowed_token_ids=WORDS, stop=(words(tokens[4:6]) + "never",))
        (completion,) = await engine.generate(PROMPT, asked).completions()
        assert (completion.text, completion.finish_reason) == (words(tokens), "length")


async def test_a_stop_string_may_not_end_it_before_min_tokens() -> None:
    runner = word_runner()
    tokens = runner.solo(PROMPT, greedy(9, allowed_token_ids=WORDS, min_tokens=5))
    async with serving(runner) as engine:
        early, late = words(tokens[2:3]), words(tokens[6:7])
        asked = greedy(9, allowed_token_ids=WORDS, min_tokens=5, stop=(early, late))
        (completion,) = await engine.generate(PROMPT, asked).completions()
        assert (completion.text, completion.stop_reason) == (words(tokens[:6]), late)


async def test_special_tokens_are_shown_on_request() -> None:
    runner = word_runner()
    async with serving(runner) as engine:
        only = greedy(2, allowed_token_ids=(0,), ignore_eos=True)
        assert await engine.generate_text(PROMPT, only) == ""
        shown = greedy(2, allowed_token_ids=(0,), ignore_eos=True, skip_special_tokens=False)
        assert await engine.generate_text(PROMPT, shown) == "<s><s>"


# refusals


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], greedy(1), InvalidRequestError),
        ([1000], greedy(1), InvalidRequestError),
        ([-1], greedy(1), InvalidRequestError),
        ([True], greedy(1), InvalidRequestError),
        ([1.5], greedy(1), InvalidRequestError),
        ([5] * 256, greedy(1), ContextLengthError),
        ("a" * 256, greedy(1), ContextLengthError),
        ("a" * 100_000, greedy(1), ContextLengthError),
        ("\ud800", greedy(1), InvalidRequestError),
        ("a" * 3000 + "\ud800", greedy(1), InvalidRequestError),
        ([5], greedy(256), ContextLengthError),
        ([5], greedy(1, stop_token_ids=(1000,)), InvalidRequestError),
    ],
)
async def test_what_can_never_be_served_is_refused_before_any_output(
    prompt: Any, params: SamplingParams, error: type[Exception]
) -> None:
    async with serving(word_runner()) as engine:
        with pytest.raises(error):
            await engine.submit(prompt, params)
        lazy = engine.generate(prompt, params)  # refused only when used
        with pytest.raises(error):
            await anext(lazy)
        assert engine.metrics.num_refused == 2
        assert len(await engine.generate_text(PROMPT, greedy(3))) > 0


async def test_a_full_queue_refuses(depth: int) -> None:
    async with held(word_runner(depth=depth), max_queue=2) as (engine, _):
        first = await engine.submit(PROMPT, greedy(3))
        second = await engine.submit(PROMPT, greedy(3))
        with pytest.raises(OverloadedError):
            await engine.submit(PROMPT, greedy(3))
        await first.aclose()
        await second.aclose()


async def test_a_full_queue_of_one_tenant_refuses_that_tenant_alone(depth: int) -> None:
    async with held(word_runner(depth=depth), max_queue_per_tenant=1) as (engine, _):
        streams = [await engine.submit(PROMPT, greedy(3), tenant=tenant) for tenant in ("a", "b")]
        with pytest.raises(TooManyRequestsError, match="--max-queue-per-tenant 1") as caught:
            await engine.submit(PROMPT, greedy(3), tenant="a")
        assert caught.value.status == 429 and caught.value.retry_after == 1.0
        for stream in streams:
            await stream.aclose()
        assert engine.metrics.num_refused == 1


async def test_long_text_is_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    names: list[str] = []
    encode = TEXT.encode

    def spy(*args: Any, **options: Any) -> list[int]:
        names.append(threading.current_thread().name)
        return encode(*args, **options)

    monkeypatch.setattr(TEXT, "encode", spy)
    async with serving(word_runner(max_model_len=9000, num_gpu_blocks=4000)) as engine:
        main = threading.current_thread().name
        for size in (10, 5000):
            stream = await engine.submit("a" * size, greedy(1))
            assert len(stream.prompt_token_ids) == size + 1
            await stream.completions()
        assert names[0] == main
        assert names[1] != main
        for size, inline in ((10, True), (200, False)):
            names.clear()
            stream = await engine.submit([300], greedy(1, bad_words=[f"{n}" + "a" * size for n in range(8)]))
            await stream.completions()
            assert (set(names) == {main}) is inline and len(names) == 16


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
