"""Enumerates the places where a piece of asyncio code can be interrupted, by counting its suspensions on the loop.

`Points` installs a task factory: every task made inside `watch` (and every task those make) counts each time it gives
the loop its turn. At the chosen count something happens: the root task is cancelled, say. Running the code once with
no choice gives the number of points; then each can be tried. `places` collects the lines that were waited at, so that
a test can say which `await`s of a source file no scenario has stopped at.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

_watched: ContextVar[Points | None] = ContextVar("watched", default=None)


class Points:
    """Suspensions of one piece of code. `act` is called at suspension number `at`, before it is resumed."""

    def __init__(self, at: int | None, act: Callable[[Points], None]) -> None:
        self.at = at
        self.act = act
        self.count = 0
        self.places: set[tuple[str, int]] = set()  # file and line of every frame that waited
        self.root: asyncio.Task[Any] | None = None

    def passed(self, code: Any) -> None:
        """`code` is suspended. Each coroutine names the one that it waits for."""
        self.count += 1
        while (frame := getattr(code, "cr_frame", None) or getattr(code, "ag_frame", None)) is not None:
            self.places.add((frame.f_code.co_filename, frame.f_lineno))
            code = code.cr_await if inspect.iscoroutine(code) else code.ag_await
            if code is not None and not inspect.iscoroutine(code):  # what steps an asynchronous generator hides it
                code = next(filter(inspect.isasyncgen, gc.get_referents(code)), None)
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


class Wait(NamedTuple):
    """An `await`, `async for` or `async with` of a source file: the lines that a frame is at while it waits."""

    function: str
    code: str
    first: int
    last: int


def waits(path: Path) -> list[Wait]:
    """Every place in a file's coroutines where they may wait."""
    source = path.read_text(encoding="utf-8")
    found: list[Wait] = []

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Await):
            found.append(Wait(function, ast.unparse(node), node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.AsyncFor | ast.AsyncWith):
            head = node.iter if isinstance(node, ast.AsyncFor) else node.items[-1].context_expr
            text = ast.unparse(node).splitlines()[0]
            found.append(Wait(function, text, node.lineno, head.end_lineno or node.lineno))
        for child in ast.iter_child_nodes(node):
            walk(child, function)

    walk(ast.parse(source), "")
    return found


def _factory(
    loop: asyncio.AbstractEventLoop, code: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    points = _watched.get()
    if points is not None and inspect.iscoroutine(code):
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
            self._points.passed(self._code)
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
