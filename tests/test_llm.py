"""The synchronous face: whole completions from plain code, also where a loop is already running."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster

from aserve import LLM, SamplingParams
from aserve.engine import Engine
from aserve.errors import ConfigError, InvalidRequestError
from aserve.executors.thread import ThreadExecutor
from tests.engine_util import greedy, word_runner, word_tokenizer
from tests.fakes import FakeRunner

TEXT = word_tokenizer(chat_templates="{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture
def runner() -> FakeRunner:
    return word_runner()


@pytest.fixture
def llm(runner: FakeRunner) -> Iterator[LLM]:
    with LLM(engine=Engine(executor=ThreadExecutor(runner, name="aserve-llm-test"), tokenizer=TEXT)) as llm:
        yield llm
    for thread in threading.enumerate():
        if thread.name.startswith("aserve-llm"):
            thread.join(5)
            assert not thread.is_alive()


def test_prompts_are_completed_in_order(llm: LLM, runner: FakeRunner) -> None:
    prompts = [[300 + i] for i in range(20)]
    results = llm.generate(prompts, greedy(5))
    for prompt, (completion,) in zip(prompts, results, strict=True):
        assert list(completion.token_ids) == runner.solo(prompt, greedy(5))


def test_one_prompt_may_stand_alone_and_params_may_differ(llm: LLM, runner: FakeRunner) -> None:
    assert len(llm.generate("ab", greedy(3))) == 1
    assert len(llm.generate([300, 301], greedy(3))) == 1
    short, long = llm.generate(["a", "b"], [greedy(2), SamplingParams(n=2, max_tokens=4, seed=1)])
    assert [len(completion.token_ids) for completion in short + long] == [2, 4, 4]
    assert llm.generate([]) == []
    with pytest.raises(ValueError, match="2 params for 1"):
        llm.generate(["a"], [greedy(1), greedy(1)])


def test_conversations_come_alone_or_in_a_list(llm: LLM) -> None:
    chat = [{"role": "user", "content": "ab"}]
    alone = llm.chat(chat, greedy(3))
    assert llm.chat([chat, chat], greedy(3)) == alone * 2
    assert alone == [llm.generate([TEXT.encode("ab", False)], greedy(3))[0]]


def test_a_refused_prompt_raises_and_cancels_the_others(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate([[300], []], greedy(200))
    assert len(llm.generate([[300]], greedy(200))[0][0].token_ids) == 200
    assert llm.engine.stats().num_running == 0


@pytest.mark.anyio
async def test_it_works_where_a_loop_is_running(llm: LLM, no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # a notebook that asks for a synchronous call means to wait
    assert len(llm.generate("ab", greedy(3))) == 1
    no_blocking_calls.activate()


def test_a_closed_one_says_so(runner: FakeRunner) -> None:
    llm = LLM(engine=Engine(executor=ThreadExecutor(runner), tokenizer=TEXT))
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_a_model_that_is_not_there_raises_and_leaves_no_thread(tmp_path_factory: pytest.TempPathFactory) -> None:
    missing = tmp_path_factory.mktemp("models") / "nothing"
    with pytest.raises(ConfigError):
        LLM(str(missing))
    assert not any(thread.name == "aserve-llm" for thread in threading.enumerate())
