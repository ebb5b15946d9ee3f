"""The way of a request's output from the engine to whoever reads it.

A `Mailbox` is the engine's end: it never waits and is never full, since deltas that pile up are joined per choice;
past a bound it tells the engine, which may pause or cancel the request. A `Stream` is the user's end; the engine holds
no reference to it, so that dropping it can cancel the request. Nothing here may block or create a task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal, Self

from aserve.beams import Beam
from aserve.errors import AserveError, DeadlineError, InvalidRequestError
from aserve.request import Change, Completion, Delta, Request, Timeline, Usage

SlowReader = Literal["coalesce", "pause", "cancel"]  # what happens to a request whose reader is behind
_TOKEN_BYTES = 4  # what an id counts against a limit
_MANY_DELTAS = 64  # unread ones are joined past this number: a reader that keeps up never has so many


class Mailbox:
    """Undelivered deltas of one request, and how it ended. Everything but `abandon` runs on the loop's thread.

    With a `limit`, `pace` is called when more than that many bytes are unread, with `behind` set, and again when they
    are read, with `behind` cleared.
    """

    __slots__ = (
        "_away_limit",
        "_cancel",
        "_deltas",
        "_end_waiter",
        "_limit",
        "_loop",
        "_many",
        "_pace",
        "_waiter",
        "behind",
        "ended",
        "error",
        "on_change",
        "request",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cancel: Callable[[Request], None],
        *,
        n: int = 1,
        limit: int | None = None,
        pace: Callable[[Mailbox], None] | None = None,
    ) -> None:
        self._loop = loop
        self._cancel = cancel  # marks the request; the scheduler reaps it
        self._deltas: list[Delta] = []
        self._many = max(_MANY_DELTAS, 2 * n)  # joining leaves at most n
        self._limit = limit
        self._away_limit: int | None = None  # in its place while nobody reads
        self._pace = pace
        self.behind = False  # more is unread than the limit allows
        self._waiter: asyncio.Future[None] | None = None  # at most one reader
        self._end_waiter: asyncio.Future[None] | None = None  # the same, of one that wants the whole
        self.request: Request | None = None  # None until admitted
        self.on_change: Callable[[Change], None] | None = None
        self.ended = False  # no delta will follow
        self.error: AserveError | None = None  # raised to the reader once the deltas are read

    def tell(self, change: Change) -> None:
        """The request was preempted, or runs again."""
        if self.on_change is not None:
            self.on_change(change)

    def push(self, delta: Delta) -> None:
        """Leaves a delta and wakes the reader."""
        self._deltas.append(delta)
        if self._waiter is not None:
            self._wake()
        elif len(self._deltas) > self._many:
            self._pile_up()

    def _pile_up(self) -> None:
        """The reader is late, unless it wants the whole: what waits is joined, and counted against the limit."""
        self._deltas = join(self._deltas)
        if self._end_waiter is not None:
            return
        limit = self._limit if self._away_limit is None else self._away_limit
        if limit is None or self.behind or self._pace is None:
            return
        if sum(len(delta.text.encode()) + _TOKEN_BYTES * len(delta.token_ids) for delta in self._deltas) > limit:
            self.behind = True
            self._pace(self)

    @property
    def away(self) -> bool:
        """True while nobody reads and the request runs on."""
        return self._away_limit is not None

    def leave(self, limit: int) -> None:
        """Nobody reads from now on: up to `limit` bytes are kept."""
        self._away_limit = limit
        self._catch_up()
        if self.request is not None:
            self.request.detached = True

    def come_back(self) -> None:
        """A reader is there again."""
        self._away_limit = None
        if self.request is not None:
            self.request.detached = False

    def _catch_up(self) -> None:
        if self.behind and self._pace is not None:
            self.behind = False
            self._pace(self)

    def end(self, error: AserveError | None = None) -> None:
        """No delta will follow. The first call decides."""
        if not self.ended:
            self.ended, self.error = True, error
            if self._waiter is not None:
                self._wake()
            if self._end_waiter is not None and not self._end_waiter.done():
                self._end_waiter.set_result(None)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> list[Delta]:
        """All that is there, at most one delta per choice."""
        deltas = self._deltas
        if not deltas:
            return []
        self._deltas = []
        if self.behind:
            self._catch_up()
        return deltas if len(deltas) == 1 else join(deltas)

    async def whole(self) -> list[Delta]:
        """What is left to read, at the end and at most one delta per choice. Raises the request's error.

        Unlike `take` after `wait`, in a loop, this wakes the reader once and not for every token.
        """
        if not self.ended:
            self._check_one_reader()
            self._end_waiter = self._loop.create_future()
            self._catch_up()
            try:
                await self._end_waiter
            finally:
                self._end_waiter = None
        if self.error is not None:
            raise self.error
        return self.take()

    def _check_one_reader(self) -> None:
        if self._waiter is not None or self._end_waiter is not None:
            raise RuntimeError("another task is already reading this stream")

    async def wait(self) -> bool:
        """True once a delta is there, False at the end. Raises the request's error after its last delta."""
        while not self._deltas:
            if self.ended:
                if self.error is not None:
                    raise self.error
                return False
            self._check_one_reader()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def cancel(self) -> None:
        """The reader wants no more."""
        if not self.ended:
            self.end()
            self._deltas.clear()
            if self.request is not None:
                self._cancel(self.request)

    def abandon(self) -> None:
        """`cancel` from a finalizer, which may run on any thread, or after the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.cancel)


class Stream:
    """The output of one request: `async for delta in stream`.

    Leaving `async with`, `await aclose()`, cancelling the task that iterates, or dropping the stream cancels a request
    that is not finished. Deltas that come faster than they are read are joined, one per choice. A stream from
    `Engine.generate` submits its request at first use, and a refusal is raised there.
    """

    __slots__ = ("__weakref__", "_ahead", "_box", "_open", "key", "label", "n")

    def __init__(
        self,
        box: Mailbox,
        *,
        key: str,
        label: str | None = None,
        n: int = 1,
        open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._box = box
        self._open = open  # submits the request; None once called
        self._ahead: deque[Delta] = deque()  # taken, not yet yielded
        self.key = key  # the request's name on the wire
        self.label = label  # the client's own id
        self.n = n

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ahead:
            return self._ahead.popleft()
        if self._open is not None:
            await self.submit()
        try:
            if not await self._box.wait():
                raise StopAsyncIteration
        except asyncio.CancelledError:
            self._box.cancel()
            raise
        deltas = self._box.take()
        if len(deltas) > 1:
            self._ahead.extend(deltas[1:])
        return deltas[0]

    async def submit(self) -> None:
        """Submits the request, if that is still to be done. Raises its refusal."""
        if self._open is not None:
            open_, self._open = self._open, None
            try:
                await open_()
            except BaseException:
                self._box.cancel()
                raise

    async def ready(self) -> bool:
        """Waits for output: True when `take_nowait` has some, False at the end; raises what the request failed with.

        Unlike iteration, cancelling this wait (a timeout, say) leaves the request running.
        """
        if self._open is not None:
            await self.submit()
        return bool(self._ahead) or await self._box.wait()

    def take_nowait(self) -> list[Delta]:
        """Everything undelivered, at most one delta per choice; empty if nothing is there."""
        deltas = [*self._ahead, *self._box.take()] if self._ahead else self._box.take()
        self._ahead.clear()
        return deltas

    async def completions(self) -> list[Completion]:
        """Reads to the end; one Completion per choice, by index."""
        await self.submit()
        try:
            rest = await self._box.whole()
        except asyncio.CancelledError:
            self._box.cancel()
            raise
        deltas = join([*self._ahead, *rest])
        self._ahead.clear()
        return [
            Completion(d.index, d.text, d.token_ids, d.finish_reason or "cancelled", d.stop_reason, d.logprobs)
            for d in sorted(deltas, key=lambda delta: delta.index)
        ]

    async def text(self) -> str:
        """Reads to the end; the text of the only choice.

        Raises InvalidRequestError where n > 1, and DeadlineError where that cut it: iteration and `completions` give
        what there is.
        """
        if self.n != 1:
            raise InvalidRequestError(f"text() needs n = 1, this stream has n = {self.n}", param="n")
        text = ""
        for done in await self.completions():  # none where it was read before
            if done.finish_reason == "deadline":
                raise DeadlineError("the request's deadline passed before its text was whole")
            text += done.text
        return text

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model sees it; empty before the request is submitted."""
        return self._box.request.prompt if self._box.request is not None else ()

    @property
    def prompt_logprobs(self) -> list[object]:
        """TokenLogprobs of the prompt from its second token, where asked; there once the first delta is."""
        return self._box.request.prompt_logprobs if self._box.request is not None else []

    @property
    def usage(self) -> Usage:
        """Tokens so far; final at the end."""
        request = self._box.request
        if request is None:
            return Usage(0, 0, 0)
        num_output = sum(len(sequence.output) for sequence in request.sequences)
        return Usage(len(request.prompt), num_output, request.num_cached)

    @property
    def timeline(self) -> Timeline | None:
        """When its request came, ran, spoke and ended; None before it is submitted."""
        request = self._box.request
        if request is None:
            return None
        return Timeline(
            request.arrival, request.first_scheduled, request.first_token, request.ended, tuple(request.changes)
        )

    @property
    def beams(self) -> list[Beam]:
        """Of a beam search, the beams that have ended, best first and without their text; final at the end."""
        request = self._box.request
        return [] if request is None or request.beams is None else request.beams.beams()

    @property
    def ended(self) -> bool:
        """True once no delta will follow those already there."""
        return self._box.ended

    def on_change(self, call: Callable[[Change], None] | None) -> None:
        """Has the engine call that when the request is preempted for want of memory, and when it runs again."""
        self._box.on_change = call

    def detach(self, limit: int) -> None:
        """Nobody reads for now. The request runs on, is the first to be preempted, and is cancelled once more than
        `limit` bytes wait."""
        self._box.leave(limit)

    def attach(self) -> None:
        """The reader is back."""
        self._box.come_back()

    def cancel(self) -> None:
        """Cancels the request if it is not finished. Idempotent."""
        self._open = None
        self._ahead.clear()
        self._box.cancel()

    async def aclose(self) -> None:
        """`cancel`, as `async with` and `contextlib.aclosing` call it."""
        self.cancel()

    async def __aenter__(self) -> Self:
        await self.submit()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        box = self._box
        if not box.ended and box.request is not None:
            box.abandon()


def join(deltas: list[Delta]) -> list[Delta]:
    """One delta per choice, in the order in which the choices appear."""
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.index, []).append(delta)
    return [group[0] if len(group) == 1 else _join_choice(group) for group in choices.values()]


def _join_choice(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    with_logprobs = any(delta.logprobs is not None for delta in deltas)
    return Delta(
        last.index,
        "".join([delta.text for delta in deltas]),
        tuple([token_id for delta in deltas for token_id in delta.token_ids]),
        last.finish_reason,
        last.stop_reason,
        last.offset,
        tuple([entry for delta in deltas for entry in delta.logprobs or ()]) if with_logprobs else None,
    )
