"""Grammars compiled off the loop: limits on time and places, and what becomes of a request whose grammar fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aserve import Engine, EngineConfig, SamplingParams, StructuredOutput
from aserve.errors import InvalidRequestError, OverloadedError, RequestFailedError
from aserve.executors.thread import ThreadExecutor
from aserve.grammar import Grammars, Matcher
from aserve.structured import MAX_THREADS, StructuredOutputs
from tests.fakes import FakeRunner
from tests.serving import EOS, LETTERS, TOKENIZER, VOCAB_SIZE

pytestmark = pytest.mark.anyio

DIGITS = StructuredOutput("regex", "[0-9]{5}x")


class Stuck(Grammars):
    """Compiles "stuck" only once it is let go."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.go = threading.Event()

    def compile(self, structured: StructuredOutput) -> Matcher:
        if structured.value == "stuck":
            assert self.go.wait(30)
        return super().compile(structured)


@pytest.fixture
async def stuck() -> AsyncIterator[Stuck]:
    grammars = Stuck()
    yield grammars
    grammars.go.set()


async def test_a_compile_that_takes_too_long_is_refused_and_others_go_on(stuck: Stuck) -> None:
    outputs = StructuredOutputs(stuck, seconds=0.05)
    await outputs.build()
    with pytest.raises(InvalidRequestError, match="longer") as caught:
        await outputs.constraints(StructuredOutput("regex", "stuck", name="guided_regex"), 1)
    assert caught.value.param == "guided_regex"
    (constraint,) = await StructuredOutputs(stuck).constraints(DIGITS, 1)
    assert constraint is not None


async def test_what_is_left_behind_takes_up_a_place_until_it_ends(stuck: Stuck) -> None:
    outputs = StructuredOutputs(stuck, seconds=0.05)
    await outputs.build()
    for _ in range(MAX_THREADS):
        with pytest.raises(InvalidRequestError):
            await outputs.constraints(StructuredOutput("regex", "stuck"), 1)
    with pytest.raises(OverloadedError):
        await outputs.constraints(DIGITS, 1)
    stuck.go.set()
    while outputs._places.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await outputs.constraints(DIGITS, 1)


async def test_it_is_prepared_in_the_first_idle_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.structured.START_SECONDS", 0.0)
    grammars = Grammars(TOKENIZER)
    outputs = StructuredOutputs(grammars)
    idle = asyncio.Event()
    outputs.build_when(idle)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not grammars.built
    idle.set()
    while not grammars.built:  # noqa: ASYNC110
        await asyncio.sleep(0)
    outputs.close()


async def test_each_choice_has_a_constraint_of_its_own() -> None:
    constraints = await StructuredOutputs(Grammars(TOKENIZER)).constraints(DIGITS, 3)
    assert len(set(map(id, constraints))) == 3


async def test_without_a_tokenizer_it_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        await StructuredOutputs(None).constraints(DIGITS, 1)
    assert await StructuredOutputs(None).constraints(None, 2) == [None, None]


def fake_engine(**options: Any) -> Engine:
    config: dict[str, Any] = {"num_gpu_blocks": 256, "block_size": 4, "max_model_len": 128, "vocab_size": VOCAB_SIZE}
    runner = FakeRunner(**(config | options), eos_token_id=EOS)
    return Engine(EngineConfig(model="fake", block_size=4), executor=ThreadExecutor(runner), tokenizer=TOKENIZER)


@pytest.mark.parametrize("depth", [1, 2])
async def test_outputs_of_an_engine_match_their_grammar(depth: int) -> None:
    params = SamplingParams(structured=DIGITS, max_tokens=20, n=3, seed=4)
    async with fake_engine(depth=depth) as engine:
        stream = await engine.submit("abc", params)
        free = await engine.generate("abc", SamplingParams(max_tokens=9, seed=1)).completions()
        for completion in await stream.completions():
            assert completion.text[:5].isdigit()
            assert completion.text[5:] == "x"
            assert completion.finish_reason == "stop"
            assert len(completion.token_ids) == 6
        assert free == await engine.generate("abc", SamplingParams(max_tokens=9, seed=1)).completions()


async def test_ignore_eos_does_not_go_on_past_a_whole_output() -> None:
    params = SamplingParams(structured=StructuredOutput("regex", "a?"), ignore_eos=True, max_tokens=20, seed=3)
    async with fake_engine() as engine:
        (completion,) = await engine.generate("abc", params).completions()
        assert completion.finish_reason == "stop"
        assert completion.text in ("", "a")


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_preempted_outputs_equal_those_that_run_alone(preemption: Any) -> None:
    words = StructuredOutput("regex", "([a-z]{6} ){6}")
    requests = [(f"prompt {number}", SamplingParams(structured=words, seed=number, n=2)) for number in range(6)]

    async def run(prompt: str, params: SamplingParams, engine: Engine) -> list[str]:
        return [completion.text for completion in await engine.generate(prompt, params).completions()]

    async with fake_engine() as engine:
        alone = [await run(*request, engine) for request in requests]
    runner = FakeRunner(
        num_gpu_blocks=52, num_cpu_blocks=200, block_size=4, max_model_len=128, vocab_size=VOCAB_SIZE, eos_token_id=EOS
    )
    config = EngineConfig(model="fake", block_size=4, preemption=preemption)
    async with Engine(config, executor=ThreadExecutor(runner), tokenizer=TOKENIZER) as engine:
        together = await asyncio.gather(*(run(*request, engine) for request in requests))
        assert engine.stats().num_preemptions > 0
    assert together == alone


async def test_a_slow_mask_holds_up_nobody_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.grammar.SLOW_SECONDS", -1.0)  # every row waits for its mask
    async with fake_engine(depth=2) as engine:
        stream = await engine.submit("abc", SamplingParams(structured=DIGITS, max_tokens=20))
        assert (await stream.text())[-1] == "x"  # alone, it is the mask thread that wakes the loop


async def test_a_compiler_that_breaks_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(self: Grammars, structured: StructuredOutput) -> Matcher:
        raise MemoryError("no more")

    async with fake_engine() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Grammars, "compile", explode)
            with pytest.raises(RequestFailedError, match="no more"):
                await engine.submit("abc", SamplingParams(structured=DIGITS))
        assert engine.stats().num_waiting == 0
        assert len(await engine.generate_text("abc", SamplingParams(structured=DIGITS))) == 6


async def test_greedy_text_goes_on_while_a_grammar_compiles(stuck: Stuck) -> None:
    async with fake_engine() as engine:
        engine._intake.structured = StructuredOutputs(stuck)
        waiting = asyncio.ensure_future(
            engine.submit("abc", SamplingParams(structured=StructuredOutput("regex", "stuck")))
        )
        params = SamplingParams(max_tokens=30, allowed_token_ids=LETTERS)
        assert len(await engine.generate_text("abc", params)) == 30
        assert not waiting.done()
        stuck.go.set()
        assert await (await waiting).text() == "stuck"
