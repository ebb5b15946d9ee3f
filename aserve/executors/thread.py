"""The default executor: the model on a thread of its own.

One daemon thread owns the runner and everything it allocates; with more than one step in flight a second thread
waits for results, so that the first may launch ahead. engine.py starts and stops it, pipeline.py submits; results come
back to the event loop with one callback per step. The loop is never blocked, and a thread that hangs is left behind,
never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, cast

from aserve.errors import EngineDeadError
from aserve.executors import Runner, StepError
from aserve.plan import StepPlan, StepResult, WorkerInfo

_DRAIN_SECONDS = 1.0  # how long a dying worker waits for steps it launched before
_QUIET_SECONDS = 0.25  # a burst's last results and the next one's requests need the interpreter for themselves
_Step = tuple[StepPlan, "asyncio.Future[StepResult]"]
_LOOK = object()  # among the plans: no step is in flight any more
_Launched = tuple[object, "asyncio.Future[StepResult]"]


class ThreadExecutor:
    """Runs a runner's steps in order. `runner` may be a function that makes one, called on the model thread."""

    def __init__(self, runner: Runner | Callable[[], Runner], *, name: str = "aserve") -> None:
        self._make: Callable[[], Runner] = runner if callable(runner) else lambda: runner
        self._name = name
        self._plans: SimpleQueue[_Step | object | None] = SimpleQueue()
        self._idles = True  # the runner has work that could wait
        self._launched: SimpleQueue[_Launched | None] = SimpleQueue()
        self._in_flight: set[asyncio.Future[StepResult]] = set()
        self._thread: threading.Thread | None = None
        self._dead: BaseException | None = None  # why no step can run any more

    async def start(self) -> WorkerInfo:
        """Makes and loads the runner on the model thread. Raises what loading raised; nothing is left running."""
        if self._thread is not None:
            raise RuntimeError("an executor starts once")
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        loaded: asyncio.Future[WorkerInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loaded,), name=f"{self._name}-model", daemon=True)
        self._thread.start()
        try:
            return await loaded
        except asyncio.CancelledError:
            self._plans.put(None)  # the thread closes the runner once it has loaded
            raise
        except BaseException:
            await self._exited.wait()
            raise

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queues a plan. Raises EngineDeadError after a failure or stop."""
        if self._dead is not None:
            raise _dead_error(self._dead)
        future: asyncio.Future[StepResult] = self._loop.create_future()
        self._in_flight.add(future)
        self._plans.put((plan, future))
        return future

    async def stop(self) -> None:
        """Lets submitted plans finish; returns when the threads end. Cancelling it leaves a hung thread to itself."""
        if self._thread is None:
            return
        if self._dead is None:
            self._dead = RuntimeError("the executor is stopped")
        self._plans.put(None)
        await self._exited.wait()  # the last thing it says; joining would block the loop

    # --- on the model thread ---

    def _main(self, loaded: asyncio.Future[WorkerInfo]) -> None:
        runner: Runner | None = None
        waiter: threading.Thread | None = None
        try:
            runner = self._make()
            info = runner.load()
            if info.depth > 1:
                waiter = threading.Thread(target=self._wait, args=(runner,), name=f"{self._name}-wait", daemon=True)
                waiter.start()
            self._post(_settle, loaded, info, None)
            self._launch(runner, ahead=waiter is not None)
        except BaseException as error:
            if waiter is not None:  # steps launched before are good
                self._launched.put(None)
                waiter.join(_DRAIN_SECONDS)
            self._post(self._fail, error)
            self._post(_settle, loaded, None, error)
        finally:
            if waiter is not None:
                self._launched.put(None)
                waiter.join()
            if runner is not None:
                with contextlib.suppress(Exception):  # a dead runner may not be able to close
                    runner.close()
            self._post(self._exited.set)

    def _launch(self, runner: Runner, *, ahead: bool) -> None:
        """Launches plans until told to stop. With depth 1 the result is waited for here, saving a thread switch."""
        while (step := self._next(runner)) is not None:
            plan, future = step
            try:
                handle = runner.launch(plan)
                if ahead:
                    self._launched.put((handle, future))
                else:
                    self._deliver(future, runner.wait(handle))
            except StepError as error:
                self._post(self._finish, future, None, error)

    def _next(self, runner: Runner) -> _Step | None:
        """The next plan. After a quiet moment, and until there is one, the runner does what could wait."""
        while True:
            try:
                step = self._plans.get(timeout=_QUIET_SECONDS if self._idles and not self._in_flight else None)
            except Empty:
                while self._idles and self._plans.empty() and not self._in_flight:
                    self._idles = runner.idle()
            else:
                if step is not _LOOK:
                    return cast("_Step | None", step)

    def _wait(self, runner: Runner) -> None:
        """On the waiting thread: gives out results in order of launch."""
        while (step := self._launched.get()) is not None:
            handle, future = step
            try:
                self._deliver(future, runner.wait(handle))
            except StepError as error:
                self._post(self._finish, future, None, error)
            except BaseException as error:
                self._post(self._fail, error)
                self._plans.put(None)
                return

    def _deliver(self, future: asyncio.Future[StepResult], result: StepResult) -> None:
        result.timings.lag = -time.perf_counter()  # _finish makes it the time between
        self._post(self._finish, future, result, None)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)

    # --- on the event loop ---

    def _finish(
        self, future: asyncio.Future[StepResult], result: StepResult | None, error: BaseException | None
    ) -> None:
        self._in_flight.discard(future)
        if result is not None:
            result.timings.lag += time.perf_counter()
        if self._idles and not self._in_flight:
            self._plans.put(_LOOK)
        _settle(future, result, error)

    def _fail(self, error: BaseException) -> None:
        """The worker is dead: every step in flight fails, later ones are refused."""
        if self._dead is None:
            self._dead = error
        for future in self._in_flight:
            _settle(future, None, _dead_error(self._dead))
        self._in_flight.clear()


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # cancelled by its owner
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # an owner that is gone need not be warned


def _dead_error(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the model thread died: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
