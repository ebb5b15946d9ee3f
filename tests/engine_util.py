"""What engine tests share: a tokenizer of plain words, an executor that holds steps back, a loop with its own clock."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from aserve.engine import Engine
from aserve.executors import Runner, StepError
from aserve.executors.thread import ThreadExecutor
from aserve.plan import StepPlan, StepResult, WorkerInfo
from aserve.request import SamplingParams
from aserve.tokenizer import Tokenizer
from aserve.tokenizer_files import from_backend
from tests.fakes import FakeRunner

EOS = 2


def word_tokenizer(vocab_size: int = 1000, **options: Any) -> Tokenizer:
    """Token n is "<w>n" with a leading space, n >= 256; below, one byte each, but 0 <s>, 1 <unk> and 2 </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "<unk>": 1, "</s>": EOS, "<x>": 3}
    vocab |= {char: 4 + index for index, char in enumerate(alphabet)}
    vocab |= {f"Ġw{number}": number for number in range(len(vocab), vocab_size)}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<unk>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return from_backend(backend, options={"bos_token": "<s>", "eos_token": "</s>"}, **options)


class HeldExecutor:
    """Runs steps inline, and gives results out when told to: `auto` at the loop's next turn, else by `release`."""

    def __init__(self, runner: Runner, *, auto: bool = True) -> None:
        self.runner = runner
        self.auto = auto
        self.held: deque[tuple[asyncio.Future[StepResult], StepResult | Exception]] = deque()
        self.stopped = 0

    async def start(self) -> WorkerInfo:
        return self.runner.load()

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        try:
            outcome: StepResult | Exception = self.runner.wait(self.runner.launch(plan))
        except StepError as error:
            outcome = error
        self.held.append((future, outcome))
        if self.auto:
            loop.call_soon(self.release)
        return future

    def release(self) -> None:
        """The oldest step is done."""
        if self.held:
            future, outcome = self.held.popleft()
            if not future.done():
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def let_go(self) -> None:
        """From now on every step is done at once."""
        self.auto = True
        while self.held:
            self.release()

    async def stop(self) -> None:
        self.stopped += 1
        self.runner.close()


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type,misc]
    """Where the loop would wait for a timer, moves its clock there instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.loop.seconds += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers cost no time. Not for tests with threads: those take real time."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.seconds


VIRTUAL = ("asyncio", {"loop_factory": VirtualLoop})


async def settle(turns: int = 20) -> None:
    """Lets everything that can run without more results run."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until_idle(engine: Engine) -> None:
    """Waits until no request is live and the last step's result is back."""
    assert engine._pipeline is not None
    await engine._pipeline.drained.wait()
    while engine.stats().num_in_flight > 0:  # noqa: ASYNC110
        await asyncio.sleep(0)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def check_whole(engine: Engine, *, used: int = 0) -> None:
    """The pool has all its blocks back, or `used` are out."""
    engine._scheduler.check_invariants()
    assert engine.stats().num_blocks_used == used


def words(ids: list[int]) -> str:
    """The text word_tokenizer gives for ids of words."""
    return "".join(f" w{number}" for number in ids)


def word_runner(**options: Any) -> FakeRunner:
    """A FakeRunner that draws words only, so that texts are easy to read."""
    return FakeRunner(vocab_size=1000, eos_token_id=EOS, **options)


WORDS = tuple(range(300, 1000))
PROMPT = [300, 301, 302, 303, 304]
TEXT = word_tokenizer()


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
