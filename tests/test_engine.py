"""An engine's requests: output, stops and refusals, with one and with two steps in flight."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.errors import (
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    TooManyRequestsError,
)
from aserve.request import SamplingParams
from tests.engine_util import (
    EOS,
    PROMPT,
    TEXT,
    WORDS,
    check_whole,
    greedy,
    held,
    serving,
    settle,
    until_idle,
    word_runner,
    words,
)

pytestmark = pytest.mark.anyio


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
