"""The thread executor: order, isolation of a failed step, death, hanging, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from aserve.errors import EngineDeadError
from aserve.executors import StepError
from aserve.executors.thread import ThreadExecutor
from aserve.plan import StepPlan, StepResult, WorkerInfo

pytestmark = pytest.mark.anyio


class ScriptedRunner:
    """Draws its plan's number. `on_launch` and `on_wait` are called first: they may raise or block."""

    def __init__(self, depth: int = 1) -> None:
        self.info = WorkerInfo(8, 0, 16, 128, 100, depth, "fake", "float32")
        self.on_load: Callable[[], None] = lambda: None
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_wait: Callable[[StepPlan], None] = lambda plan: None
        self.on_idle: Callable[[], bool] = lambda: False
        self.threads: list[tuple[str, str]] = []
        self.closed = 0

    def _note(self, what: str) -> None:
        self.threads.append((what, threading.current_thread().name))

    def load(self) -> WorkerInfo:
        self._note("load")
        self.on_load()
        return self.info

    def launch(self, plan: StepPlan) -> object:
        self._note("launch")
        self.on_launch(plan)
        return plan

    def wait(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        self._note("wait")
        self.on_wait(handle)
        return StepResult(handle.number, [handle.number])

    def idle(self) -> bool:
        return self.on_idle()

    def close(self) -> None:
        self._note("close")
        self.closed += 1


@pytest.fixture
def threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} is left behind"


def failing(number: int, error: Exception) -> Callable[[StepPlan], None]:
    def check(plan: StepPlan) -> None:
        if plan.number == number:
            raise error

    return check


def block_on(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.parametrize("depth", [1, 2])
async def test_results_come_in_order_from_the_threads_that_own_them(depth: int, threads_end: None) -> None:
    runner = ScriptedRunner(depth)
    executor = ThreadExecutor(runner, name="x")
    assert await executor.start() == runner.info
    results = [executor.submit(StepPlan(number)) for number in range(10)]
    assert [(await result).tokens for result in results] == [[number] for number in range(10)]
    await executor.stop()
    assert runner.closed == 1
    waiter = "x-model" if depth == 1 else "x-wait"
    assert {name for what, name in runner.threads if what == "wait"} == {waiter}
    assert {name for what, name in runner.threads if what != "wait"} == {"x-model"}


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_runner_does_what_can_wait_while_no_step_is_in_flight(depth: int, threads_end: None) -> None:
    runner = ScriptedRunner(depth)
    pieces = 4
    idled, running, hold, finished = (threading.Event() for _ in range(4))
    during: list[int] = []

    def idle() -> bool:
        nonlocal pieces
        if running.is_set():
            during.append(pieces)
        if pieces == 2:
            idled.set()
            block_on(hold)
        pieces -= 1
        if not pieces:
            finished.set()
        return pieces > 0

    runner.on_idle = idle
    runner.on_launch = lambda plan: running.set()
    runner.on_wait = lambda plan: running.clear()
    executor = ThreadExecutor(runner)
    await executor.start()
    await asyncio.to_thread(block_on, idled)
    step = executor.submit(StepPlan(1))  # comes in the midst of a piece
    hold.set()
    assert (await step).tokens == [1]
    await asyncio.to_thread(block_on, finished)
    assert (await executor.submit(StepPlan(2))).tokens == [2]
    assert during == []
    await executor.stop()


async def test_what_can_wait_leaves_the_interpreter_to_a_burst(
    monkeypatch: pytest.MonkeyPatch, threads_end: None
) -> None:
    monkeypatch.setattr("aserve.executors.thread._QUIET_SECONDS", 60.0)
    runner = ScriptedRunner()
    idled: list[int] = []
    runner.on_idle = lambda: bool(idled.append(1))
    executor = ThreadExecutor(runner)
    await executor.start()
    for number in (1, 2, 3):
        assert (await executor.submit(StepPlan(number))).tokens == [number]
    await executor.stop()
    assert idled == []


async def test_a_runner_can_be_made_on_the_model_thread(threads_end: None) -> None:
    made: list[str] = []

    def make() -> ScriptedRunner:
        made.append(threading.current_thread().name)
        return ScriptedRunner()

    executor = ThreadExecutor(make)
    await executor.start()
    await executor.stop()
    assert made == ["aserve-model"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
async def test_a_failed_step_leaves_the_others_alone(depth: int, where: str, threads_end: None) -> None:
    runner = ScriptedRunner(depth)
    setattr(runner, where, failing(1, StepError("row 3 is bad", (3,))))
    executor = ThreadExecutor(runner)
    await executor.start()
    first, second, third = (executor.submit(StepPlan(number)) for number in range(3))
    assert (await first).tokens == [0]
    with pytest.raises(StepError) as failure:
        await second
    assert failure.value.slots == (3,)
    assert (await third).tokens == [2]
    await executor.stop()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
async def test_any_other_exception_kills_it(depth: int, where: str, threads_end: None) -> None:
    runner = ScriptedRunner(depth)
    cause = RuntimeError("device lost")
    setattr(runner, where, failing(1, cause))
    executor = ThreadExecutor(runner)
    await executor.start()
    results = [executor.submit(StepPlan(number)) for number in range(4)]
    assert (await results[0]).tokens == [0]
    for result in results[1:]:
        with pytest.raises(EngineDeadError, match="device lost") as failure:
            await result
        assert failure.value.__cause__ is cause
    with pytest.raises(EngineDeadError):
        executor.submit(StepPlan(9))
    await executor.stop()
    assert runner.closed == 1


async def test_a_load_that_fails_leaves_nothing_running(threads_end: None) -> None:
    runner = ScriptedRunner()
    cause = MemoryError("no room")

    def fail() -> None:
        raise cause

    runner.on_load = fail
    executor = ThreadExecutor(runner)
    with pytest.raises(MemoryError) as failure:
        await executor.start()
    assert failure.value is cause
    await executor.stop()


async def test_stop_lets_submitted_steps_finish(threads_end: None) -> None:
    executor = ThreadExecutor(ScriptedRunner())
    await executor.start()
    results = [executor.submit(StepPlan(number)) for number in range(5)]
    await executor.stop()
    assert [result.result().number for result in results] == [0, 1, 2, 3, 4]
    with pytest.raises(EngineDeadError, match="stopped"):
        executor.submit(StepPlan(9))
    await executor.stop()


async def test_stop_without_start_is_nothing() -> None:
    await ThreadExecutor(ScriptedRunner()).stop()


async def test_a_cancelled_start_still_closes_the_runner(threads_end: None) -> None:
    runner = ScriptedRunner()
    loop = asyncio.get_running_loop()
    loading, go_on = asyncio.Event(), threading.Event()

    def load() -> None:
        loop.call_soon_threadsafe(loading.set)
        go_on.wait(30)

    runner.on_load = load
    executor = ThreadExecutor(runner)
    start = asyncio.ensure_future(executor.start())
    await loading.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    go_on.set()
    await executor.stop()
    assert runner.closed == 1


async def test_cancelling_stop_leaves_a_hung_step_to_itself(threads_end: None) -> None:
    runner = ScriptedRunner()
    go_on = threading.Event()
    runner.on_launch = lambda plan: block_on(go_on)
    executor = ThreadExecutor(runner)
    await executor.start()
    result = executor.submit(StepPlan(0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await executor.stop()
    assert not result.done()
    go_on.set()
    assert (await result).number == 0  # it came back after all
    await executor.stop()


async def test_an_owner_that_went_away_is_no_error(threads_end: None) -> None:
    runner = ScriptedRunner()
    go_on = threading.Event()
    runner.on_launch = lambda plan: block_on(go_on)
    executor = ThreadExecutor(runner)
    await executor.start()
    gone, kept = executor.submit(StepPlan(0)), executor.submit(StepPlan(1))
    gone.cancel()
    go_on.set()
    assert (await kept).number == 1
    await executor.stop()


def test_a_thread_that_outlives_its_loop_ends_quietly(threads_end: None) -> None:
    runner = ScriptedRunner()
    go_on = threading.Event()
    runner.on_launch = lambda plan: block_on(go_on)

    async def main() -> threading.Thread:
        executor = ThreadExecutor(runner)
        await executor.start()
        executor.submit(StepPlan(0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await executor.stop()
        assert executor._thread is not None
        return executor._thread

    thread = asyncio.run(main())
    go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert runner.closed == 1
