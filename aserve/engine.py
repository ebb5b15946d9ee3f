"""The engine: what a program holds to serve one model, `async with Engine(...) as engine`.

It owns the executor, the scheduler and the loop task (pipeline.py), and turns calls into streams of requests that
intake.py admits. It installs no signal handlers, starts no process, reads no environment; several live in one program.
Nothing here blocks the event loop: loading, and encoding or rendering of long input, happen on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from aserve import loading
from aserve.admission import Limits
from aserve.chat_template import Message
from aserve.config import EngineConfig
from aserve.errors import AserveError, OverloadedError, RequestFailedError
from aserve.executors import Executor
from aserve.grammar import Grammars
from aserve.intake import Call, ChatOptions, Intake, RequestOptions
from aserve.metrics import EngineStats, Metrics
from aserve.output import outputs_of
from aserve.pipeline import Pipeline, dead_error
from aserve.plan import WorkerInfo
from aserve.policy import load_policy
from aserve.prompts import OffLoop, Prompt, PromptEncoder
from aserve.request import Request, SamplingParams
from aserve.scheduler import Scheduler
from aserve.steps import StepLog
from aserve.stream import Mailbox, SlowReader, Stream
from aserve.structured import StructuredOutputs
from aserve.tokenizer import Tokenizer

MAX_UNREAD = 1 << 20  # bytes

_STOP_SECONDS = 10.0  # how long a step may still take once the streams are ended; then its thread is left behind
_DEAD_STOP_SECONDS = 1.0


class Engine:
    """Serves one model. Options are EngineConfig's: `Engine(model="...", dtype="float32")`.

    With an `executor` nothing is loaded: it runs the steps, and `tokenizer` (None: token ids only) makes the text.
    `info`, `stats()` and the methods that submit need a started engine.
    """

    info: WorkerInfo

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> None:
        self.config = replace(config, **options) if config is not None else EngineConfig(**options)
        self.metrics = Metrics()
        self.tokenizer = tokenizer
        self.draining = False  # stop() was called: no new requests
        self._executor = executor
        self._model = loading.Model(self.config.model or "model")
        self._started = False
        self._pipeline: Pipeline | None = None
        self._stopping: asyncio.Task[None] | None = None

    # lifecycle

    async def start(self) -> None:
        """Loads the model and serves.

        Raises ConfigError, the loader's error, or OverloadedError where `stop` came first; then nothing is left
        running.
        """
        if self._started:
            raise RuntimeError("an engine starts once; make another")
        self._started = True
        self._loop = asyncio.get_running_loop()
        off_loop = OffLoop()
        load_policy(self.config.policy)  # a mistake in its name is worth no minutes of loading
        if self._executor is None:
            self._model = await off_loop(partial(loading.find, self.config))
            self._executor = await off_loop(partial(loading.make_executor, self._model, self.config))
        executor = self._executor
        worker = self._loop.create_task(executor.start())
        try:
            if self._model.files is not None and self.tokenizer is None:
                self.tokenizer = await off_loop(partial(loading.load_tokenizer, self._model, self.config))
            self.info = await worker
            if self.draining:
                raise OverloadedError("the engine was stopped while it started")
            self._scheduler = Scheduler.create(self.config, self.info)
        except BaseException:
            worker.cancel()
            await asyncio.wait([worker])
            if not worker.cancelled() and worker.exception() is None:
                await executor.stop()
            raise
        self._intake = Intake(
            Limits.create(self.config, self.info),
            prompts=PromptEncoder(self.tokenizer, self.info.max_model_len, off_loop),
            structured=self._make_structured(),
            tokenizer=self.tokenizer,
            off_loop=off_loop,
            end_token_ids=self.end_token_ids,
        )
        self._pipeline = Pipeline(
            self._scheduler,
            executor,
            self.metrics,
            depth=self._scheduler.depth,
            step_timeout=self.config.step_timeout,
            clock=self._loop.time,
        )
        self._task = self._loop.create_task(self._pipeline.run(), name="aserve-engine")
        self._intake.structured.build_when(self._pipeline.drained)

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Refuses new requests, lets live ones finish for `drain_timeout` seconds, ends the rest, frees the model.

        Idempotent: a later call joins the first and may shorten its drain. Cancelling a call leaves the stop going on.
        """
        self.draining = True
        if self._pipeline is None:
            return
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._shut_down(self._pipeline), name="aserve-stop")
        hurry = self._loop.call_later(drain_timeout, self._pipeline.drained.set)
        try:
            await asyncio.shield(self._stopping)
        finally:
            hurry.cancel()

    async def _shut_down(self, pipeline: Pipeline) -> None:
        assert self._executor is not None
        self._intake.structured.stay()  # what is idle now is not so for long
        await pipeline.drained.wait()
        pipeline.cancel_all("cancelled", OverloadedError("the engine is shutting down"))
        pipeline.stop()
        await asyncio.wait([self._task], timeout=_STOP_SECONDS)
        self._task.cancel()  # a step hangs, or the task has ended
        await asyncio.wait([self._task])
        self._intake.structured.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS if pipeline.dead is None else _DEAD_STOP_SECONDS):
                await self._executor.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # state

    @property
    def name(self) -> str:
        """The model's served name."""
        return self._model.name

    @property
    def started(self) -> bool:
        """True once `start` was called, whether or not the model is loaded yet."""
        return self._started

    async def warm_up(self) -> None:
        """Generates a token, unless some were: what is made at first use is made, and the model is seen to work."""
        if not self.metrics.num_output_tokens:
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            await (await self.submit([0], params, label="warm-up")).completions()

    @property
    def dead(self) -> bool:
        """True once the engine cannot go on; `check` says why."""
        return self._pipeline is not None and self._pipeline.dead is not None

    async def died(self) -> None:
        """Waits until the engine cannot go on, if ever. It must have been started."""
        assert self._pipeline is not None, "the engine is not started"
        await self._pipeline.died.wait()

    def check(self) -> None:
        """Raises EngineDeadError or OverloadedError when no request can be served."""
        if self._pipeline is not None and self._pipeline.dead is not None:
            raise dead_error(self._pipeline.dead)
        if self.draining:
            raise OverloadedError("the engine is shutting down")
        if self._pipeline is None:
            raise OverloadedError("the engine is not started")

    def stats(self) -> EngineStats:
        """Counts of this moment; cheap."""
        assert self._pipeline is not None, "the engine is not started"
        now, time = self._scheduler.stats(), self._loop.time()
        last = self._pipeline.last_step_time
        return EngineStats(
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_swapped=now.num_swapped,
            num_paused=now.num_paused,
            num_blocks_used=now.num_blocks_used,
            num_blocks=now.num_blocks,
            num_in_flight=self._pipeline.num_in_flight,
            num_steps=self.metrics.num_steps,
            num_output_tokens=self.metrics.num_output_tokens,
            num_prefix_hit_tokens=now.num_prefix_hit_tokens,
            num_preemptions=now.num_preemptions,
            swap_out_bytes=now.num_blocks_out * self.info.block_bytes,
            swap_in_bytes=now.num_blocks_in * self.info.block_bytes,
            last_step_seconds=self._pipeline.last_step_seconds,
            last_step_age=None if last is None else time - last,
            oldest_wait=self._scheduler.oldest_wait(time),
            preemptions={(kind, cause): n for (kind, cause), n in self._scheduler.preemptions.items()},
        )

    def log_steps(self, log: StepLog | None) -> None:
        """Has every step from now on add a row to the log, or none any more. See profiling.py."""
        assert self._pipeline is not None, "the engine is not started"
        self._pipeline.log = log

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output, unless a request says ignore_eos."""
        return self.tokenizer.eos_token_ids if self.tokenizer is not None else self._model.end_token_ids

    def default_sampling(self) -> dict[str, Any]:
        """SamplingParams fields that the model's authors recommend; used where a request gives no params."""
        return dict(self._model.sampling)

    # requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """A stream that submits at first use; a refusal is raised there. Dropping it cancels."""
        return self._stream(lambda: self._intake.prompts.encode(prompt, add_special_tokens), params, options)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """A stream of an admitted request.

        Raises InvalidRequestError (ContextLengthError too), OverloadedError or EngineDeadError before any output.
        """
        stream = self.generate(prompt, params, add_special_tokens=add_special_tokens, **options)
        await stream.submit()
        return stream

    async def generate_text(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        **options: Unpack[RequestOptions],
    ) -> str:
        """The whole text of one completion."""
        async with self.generate(prompt, params, add_special_tokens=add_special_tokens, **options) as stream:
            return await stream.text()

    def chat(
        self, messages: Items[Message], params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """`generate` of a conversation, written out by the model's chat template."""
        chat: dict[str, Any] = {name: value for name, value in options.items() if name in _CHAT_ONLY}
        rest: Any = {name: value for name, value in options.items() if name not in _CHAT_ONLY}
        return self._stream(lambda: self._intake.prompts.encode_chat(messages, **chat), params, rest)

    async def submit_chat(
        self, messages: Items[Message], params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """`submit` of a conversation."""
        stream = self.chat(messages, params, **options)
        await stream.submit()
        return stream

    def _stream(
        self, encode: Callable[[], Awaitable[Items[int]]], params: SamplingParams | None, options: RequestOptions
    ) -> Stream:
        if unknown := options.keys() - RequestOptions.__annotations__:
            raise TypeError(f"a request has no option {sorted(unknown)}; what to draw goes into SamplingParams")
        key = secrets.token_hex(16)
        box = Mailbox(
            asyncio.get_running_loop(),
            self._cancel,
            n=params.n if params else 1,
            limit=options.get("max_unread", MAX_UNREAD),
            pace=partial(self._pace, options.get("slow_reader", "coalesce")),
        )
        opener = partial(self._open, box, key, encode, params, options)
        return Stream(box, key=key, label=options.get("label"), n=params.n if params else 1, open=opener)

    async def _open(
        self,
        box: Mailbox,
        key: str,
        encode: Callable[[], Awaitable[Items[int]]],
        params: SamplingParams | None,
        options: RequestOptions,
    ) -> None:
        """Encodes, admits, hands over to the loop. No await follows admission, so nothing can be lost after it."""
        try:
            self.check()
            if asyncio.get_running_loop() is not self._loop:
                raise RuntimeError("this engine runs on another event loop")
            arrival = self._loop.time()
            params = params or SamplingParams(**self._model.sampling)
            prompt = await encode()
            constraints = await self._intake.constraints(params)
            self.check()
            call = Call(key, prompt, params, constraints, options, arrival)
            load = self._scheduler.load(options.get("tenant", ""), options.get("priority", 0))
            request = self._intake.admit(call, load, self._loop.time())
        except AserveError:
            self.metrics.num_refused += 1
            raise
        if box.ended:  # closed meanwhile
            return
        box.request = request
        assert self._pipeline is not None
        self._pipeline.add(request, outputs_of(request, box, partial(self._intake.detokenizer, request)))

    def _make_structured(self) -> StructuredOutputs:
        return StructuredOutputs(Grammars(self.tokenizer, self._wake_soon) if self.tokenizer is not None else None)

    def _wake_soon(self) -> None:
        """A slow mask is there: what was held back may be planned. Called on the mask thread."""
        if self._pipeline is not None:
            self._loop.call_soon_threadsafe(self._pipeline.wake)

    def _pace(self, policy: SlowReader, box: Mailbox) -> None:
        """The reader has fallen behind, or caught up. Coalescing needs nothing: a request's max_tokens bounds it."""
        if self._pipeline is None or box.request is None:
            return
        if box.behind and (box.away or policy == "cancel"):
            why = "it was away too long" if box.away else "it reads too slowly"
            self._pipeline.cancel(
                box.request, "cancelled", RequestFailedError(f"the reader left too much unread: {why}")
            )
        elif policy == "pause":
            self._pipeline.pause(box.request, paused=box.behind)

    def _cancel(self, request: Request) -> None:
        if self._pipeline is not None:
            self._pipeline.cancel(request, "cancelled")


_CHAT_ONLY = frozenset(ChatOptions.__annotations__) - frozenset(RequestOptions.__annotations__)
