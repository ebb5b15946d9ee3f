"""Enumerates the places where a piece of asyncio code can be interrupted, by counting its suspensions on the loop.

`Points` installs a task factory: every task made inside `watch` (and every task those make) counts each time it gives
the loop its turn. At the chosen count something happens: the root task is cancelled, say. Running the code once with
no choice gives the number of points; then each can be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

_watched: ContextVar[Points | None] = ContextVar("watched", default=None)


class Points:
    """Suspensions of one piece of code. `act` is called at suspension number `at`, before it is resumed."""

    def __init__(self, at: int | None, act: Callable[[Points], None]) -> None:
        self.at = at
        self.act = act
        self.count = 0
        self.root: asyncio.Task[Any] | None = None

    def passed(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.act(self)

    async def watch(self, code: Coroutine[Any, Any, Any]) -> Any:
        """Runs the code in a task of its own; what it raises is returned."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(_factory)
        token = _watched.set(self)
        try:
            self.root = loop.create_task(code)
        finally:
            _watched.reset(token)
        try:
            [result] = await asyncio.gather(self.root, return_exceptions=True)
            return result
        finally:
            loop.set_task_factory(before)


def _factory(
    loop: asyncio.AbstractEventLoop, code: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    points = _watched.get()
    if points is not None and asyncio.iscoroutine(code):
        return asyncio.Task(_counted(code, points), loop=loop, **options)
    return asyncio.Task(code, loop=loop, **options)  # type: ignore[arg-type]


async def _counted(code: Coroutine[Any, Any, Any], points: Points) -> Any:
    return await _Counter(code, points)


class _Counter(Awaitable[Any]):
    def __init__(self, code: Coroutine[Any, Any, Any], points: Points) -> None:
        self._code = code
        self._points = points

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._code.__await__()
        resume: Callable[[], Any] = lambda: next(steps)  # noqa: E731
        while True:
            try:
                waiting = resume()
            except StopIteration as end:
                return end.value
            self._points.passed()
            try:
                value = yield waiting
            except BaseException as error:
                resume = _thrower(steps, error)
            else:
                resume = _sender(steps, value)


def _thrower(steps: Generator[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: steps.throw(error)


def _sender(steps: Generator[Any, Any, Any], value: Any) -> Callable[[], Any]:
    return lambda: steps.send(value)
