"""Compiles grammars off the event loop, with limits on how long and how many at once.

Owned by engine.py, which awaits `constraints` before a request is admitted: a grammar that is refused, or takes too
long, ends its own request and nothing else. A compile cannot be stopped from outside: one that runs over is left
behind on its daemon thread, and takes up one of the few places until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from aserve.constraint import Constraint, StructuredOutput
from aserve.errors import AserveError, InvalidRequestError, OverloadedError, RequestFailedError
from aserve.grammar import Grammars

T = TypeVar("T")
COMPILE_SECONDS = 5.0
START_SECONDS = 1.0  # that a start gets before anything is prepared
MAX_THREADS = 2


class StructuredOutputs:
    """Constraints for the requests of one engine. `grammars` None refuses them: there is no tokenizer."""

    def __init__(self, grammars: Grammars | None, *, seconds: float = COMPILE_SECONDS) -> None:
        self._grammars = grammars
        self._seconds = seconds
        self._places = asyncio.Semaphore(MAX_THREADS)
        self._ahead: asyncio.Task[None] | None = None

    def build_when(self, idle: asyncio.Event) -> None:
        """Builds once `idle` says that no stream is open, but not at once, if no request came first.

        It holds the GIL for a second where the vocabulary is large: a start should not wait for it, nor a stream.
        """
        if self._grammars is not None:
            self._ahead = asyncio.get_running_loop().create_task(self._build_when(idle), name="aserve-grammar")

    async def _build_when(self, idle: asyncio.Event) -> None:
        await asyncio.sleep(START_SECONDS)
        await idle.wait()
        with contextlib.suppress(AserveError):  # a tokenizer that cannot: the first request that asks is told
            await self.build()

    async def build(self) -> None:
        """Prepares the tokenizer's view."""
        if self._grammars is not None and not self._grammars.built:
            await self._places.acquire()
            await self._on_thread(self._grammars.build)

    async def constraints(self, structured: StructuredOutput | None, count: int) -> list[Constraint | None]:
        """One constraint per choice, none where the output is free.

        Raises InvalidRequestError naming the field, OverloadedError where others' grammars take all places, or
        RequestFailedError where the compiler breaks.
        """
        if structured is None:
            return [None] * count
        grammars = self._grammars
        if grammars is None:
            raise InvalidRequestError(f"{structured.name} needs a tokenizer", param=structured.name)
        started = False
        try:
            await self.build()
            async with asyncio.timeout(self._seconds):
                await self._places.acquire()
                started = True
                first = await self._on_thread(lambda: grammars.compile(structured))
            return [first, *(first.fork() for _ in range(count - 1))]
        except TimeoutError:
            if not started:
                raise OverloadedError("other requests' grammars are being compiled; try again later") from None
            message = f"{structured.name}: it takes longer than {self._seconds:g} s to compile"
            raise InvalidRequestError(message, param=structured.name) from None
        except AserveError:
            raise
        except Exception as error:
            raise RequestFailedError(f"the grammar compiler failed: {type(error).__name__}: {error}") from error

    async def _on_thread(self, call: Callable[[], T]) -> T:
        """Runs the call on a daemon thread, which gives its place back when it ends, awaited or not."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            self._places.release()
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = call()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(settle, result, failure)

        try:
            threading.Thread(target=run, name="aserve-grammar", daemon=True).start()
        except RuntimeError:  # no more threads
            self._places.release()
            raise
        return await future

    def stay(self) -> None:
        """Prepares nothing any more."""
        if self._ahead is not None:
            self._ahead.cancel()

    def close(self) -> None:
        """Ends the mask thread."""
        self.stay()
        if self._grammars is not None:
            self._grammars.close()
