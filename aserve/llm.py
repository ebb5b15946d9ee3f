"""The synchronous face of an engine, for scripts and notebooks: `LLM(model).generate(prompts)`.

It runs an Engine on a private event loop in a daemon thread, so it also works where a loop is already running. A
server uses Engine itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from aserve.chat_template import Message
from aserve.config import EngineConfig
from aserve.engine import Engine
from aserve.prompts import Prompt
from aserve.request import Completion, SamplingParams
from aserve.stream import Stream

T = TypeVar("T")
Params = SamplingParams | Items[SamplingParams] | None
_OPEN_AT_ONCE = 1024  # requests submitted and not finished; far more than run at a time


class LLM:
    """Loads a model and serves it to this program. Options are EngineConfig's, or an `engine` that is not started
    takes their place. `close()` it, or use `with`.

    Raises ConfigError, or the loader's error. Methods may be called from several threads.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        if model is not None:
            options["model"] = model
        self.engine = engine or Engine(config, **options)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._loop.run_forever, name="aserve-llm", daemon=True
        )
        self._thread.start()
        try:
            self._call(self.engine.start())
        except BaseException:
            self._end_loop()
            raise

    def generate(self, prompts: Prompt | Items[Prompt], params: Params = None) -> list[list[Completion]]:
        """The completions of each prompt, n per prompt, in order; one prompt may stand for a list of one.

        `params` is for all prompts, or one each. The first refused or failed prompt raises its error, and the
        others are cancelled.
        """
        batch = [cast(Prompt, prompts)] if _is_one(prompts) else list(cast("Items[Prompt]", prompts))
        each = _per_item(params, len(batch))
        return self._call(
            self._all([lambda p=p, q=q: self.engine.generate(p, q) for p, q in zip(batch, each, strict=True)])
        )

    def chat(
        self, conversations: Items[Message] | Items[Items[Message]], params: Params = None, **options: Any
    ) -> list[list[Completion]]:
        """`generate` of one conversation (a list of messages) or several. Options are Engine.chat's."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        batch = cast("list[Items[Message]]", [conversations] if one else list(conversations))
        each = _per_item(params, len(batch))
        return self._call(
            self._all([lambda m=m, q=q: self.engine.chat(m, q, **options) for m, q in zip(batch, each, strict=True)])
        )

    async def _all(self, makers: list[Any]) -> list[list[Completion]]:
        room = asyncio.Semaphore(_OPEN_AT_ONCE)

        async def complete(make: Any) -> list[Completion]:
            async with room:
                stream: Stream
                async with make() as stream:
                    return await stream.completions()

        tasks = [asyncio.ensure_future(complete(make)) for make in makers]
        try:
            return await asyncio.gather(*tasks)
        finally:  # after a failure: end the others before it is raised
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the private loop; an interrupt here cancels it there."""
        if self._thread is None:
            work.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stops the engine and frees the model. Idempotent."""
        if self._thread is not None:
            try:
                self._call(self.engine.stop())
            finally:
                self._end_loop()

    def _end_loop(self) -> None:
        assert self._thread is not None
        thread, self._thread = self._thread, None
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_one(prompts: Prompt | Items[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _per_item(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} params for {count} prompts")
    return list(params)
