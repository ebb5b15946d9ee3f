"""The engine's loop: schedule, run, commit, deliver, with up to `depth` steps in flight.

Made and owned by engine.py, which runs `run` as its one task; everything here happens on the event loop. It never
blocks, polls or sleeps: with nothing to do it waits for a request, a cancellation or the next deadline. When it
cannot go on, every open stream ends with EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from aserve.errors import AserveError, DeadlineError, EngineDeadError, RequestFailedError
from aserve.executors import Executor, StepError
from aserve.metrics import Metrics
from aserve.output import Output
from aserve.plan import StepPlan, StepResult
from aserve.request import Delta, FinishReason, Request, Sequence
from aserve.scheduler import Event, Move, Scheduler
from aserve.steps import StepLog, StepRow

_SLICE = 128  # tokens delivered before other tasks get a turn: about half a millisecond
_log = logging.getLogger("aserve")


class InFlight(NamedTuple):
    """A step that was submitted, and when: by the loop's clock, and by the one that threads share."""

    plan: StepPlan
    result: Awaitable[StepResult]
    submitted: float
    scheduling: float  # when its planning began
    scheduled: float


class Pipeline:
    """Drives one scheduler over one executor. `clock` gives the loop's seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: Metrics,
        *,
        depth: int,
        step_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._metrics = metrics
        self._depth = depth
        self._step_timeout = step_timeout
        self._clock = clock
        self._in_flight: deque[InFlight] = deque()
        self._outputs: dict[Sequence, Output] = {}  # of every sequence whose last delta is not out
        self._reasons: dict[Request, list[FinishReason]] = {}  # of every live request: its ended choices' reasons
        self._woken = asyncio.Event()
        self.log: StepLog | None = None  # gets a row per step
        self._row: StepRow | None = None  # of the step whose tokens are being delivered
        self._stopping = False
        self.drained = asyncio.Event()  # no request is live, or there is no time to wait for those that are
        self.drained.set()
        self.dead: BaseException | None = None  # why it cannot go on
        self.died = asyncio.Event()  # set with `dead`, once every stream has been told
        self.last_step_seconds = 0.0
        self.last_step_time: float | None = None  # of the clock, when it was committed

    @property
    def num_in_flight(self) -> int:
        """Steps submitted and not yet committed."""
        return len(self._in_flight)

    def add(self, request: Request, outputs: list[Output]) -> None:
        """Takes an admitted request; its outputs get every event."""
        self._scheduler.add(request)
        self._reasons[request] = []
        for output in outputs:
            self._outputs[output.sequence] = output
        self.drained.clear()
        self._woken.set()

    def cancel(self, request: Request, reason: FinishReason, error: AserveError | None = None) -> None:
        """Marks a live request; the scheduler reaps it at the next step boundary."""
        if request in self._reasons:
            self._scheduler.cancel(request, reason, error)
            self._woken.set()

    def pause(self, request: Request, *, paused: bool) -> None:
        """Takes a live request off the running set until it is called again with False."""
        if request in self._reasons:
            self._scheduler.pause(request, paused=paused)
            self._woken.set()

    def cancel_all(self, reason: FinishReason, error: AserveError) -> None:
        """Marks every live request."""
        for request in list(self._reasons):
            self.cancel(request, reason, error)

    def wake(self) -> None:
        """What could not be planned may be planned now."""
        self._woken.set()

    def stop(self) -> None:
        """Lets `run` return once no request is live."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Serves until `stop`. Never raises but when cancelled: `dead` says why it ended early."""
        try:
            await self._run()
        except BaseException as error:
            self._die(error)
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            self._submit_ahead()
            if self._in_flight:
                events = await self._commit_next()
                self._submit_ahead()  # the model works on while this step's tokens are delivered
                await self._deliver(events)
            elif reaped := self._scheduler.take_events():
                await self._deliver(reaped)
            elif self._stopping and not self._reasons:
                return
            else:
                await self._wait_for_work()

    def _submit_ahead(self) -> None:
        while len(self._in_flight) < self._depth:
            now = self._clock()
            began = time.perf_counter()
            plan = self._scheduler.schedule(now)
            for move in self._scheduler.take_moves():
                move.request.changes.append((move.change, now))
                self._tell(move)
            if plan is None:
                return
            planned = time.perf_counter()
            self._in_flight.append(InFlight(plan, self._executor.submit(plan), now, began, planned))

    def _tell(self, move: Move) -> None:
        """The log says why a request was preempted; its reader may say to its client that it was."""
        if move.choice is not None:
            fields = {"event": "preempted", "request_key": move.request.key, "cause": move.cause}
            fields |= move.choice._asdict()
            _log.info("preempted %s for %s: %s", move.request.key, move.cause, move.choice, extra={"fields": fields})
        for sequence in move.request.sequences:
            output = self._outputs.get(sequence)
            if output is not None:
                try:
                    output.box.tell(move.change)
                except Exception as error:
                    self._fail_request(move.request, error)
                return

    async def _commit_next(self) -> list[Event]:
        flown = self._in_flight.popleft()
        plan = flown.plan
        try:
            async with asyncio.timeout(self._step_timeout):
                step = await flown.result
        except TimeoutError:
            raise EngineDeadError(f"step {plan.number} took longer than {self._step_timeout:g} s") from None
        except StepError as error:
            _log.error("step %d failed: %s", plan.number, error)
            self._metrics.num_failed_steps += 1
            failure = RequestFailedError(f"the model failed on this request: {error}")
            failure.__cause__ = error
            if error.memory:
                self._scheduler.shed()
                _log.warning("steps compute at most %d tokens from now on", self._scheduler.max_num_batched_tokens)
            return self._scheduler.fail(plan.number, error.slots, failure)
        num_draws = len(plan.decodes) + sum([len(chunk.draws) for chunk in plan.chunks])
        if len(step.tokens) != num_draws:
            raise EngineDeadError(f"step {plan.number} drew {len(step.tokens)} tokens where {num_draws} were due")
        now = self._clock()
        self.last_step_seconds = now - flown.submitted
        self.last_step_time = now
        self._metrics.loop_lag.observe(step.timings.lag)
        self._metrics.num_steps += 1
        self._metrics.step.observe(self.last_step_seconds)
        began = time.perf_counter()
        events = self._scheduler.commit(step, now)
        if self.log is not None:
            self._row = _row_of(flown, step, began, time.perf_counter())
        return events

    async def _wait_for_work(self) -> None:
        deadline = self._scheduler.next_deadline()
        delay = None if deadline is None else max(0.0, deadline - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._woken.wait()

    async def _deliver(self, events: list[Event]) -> None:
        """Text is made of a slice of the tokens, then pushed to its readers."""
        now = self._clock()
        detokenize = deliver = 0.0
        for start in range(0, len(events), _SLICE):
            if start:
                await asyncio.sleep(0)  # a turn for the readers woken so far
            began = time.perf_counter()
            deltas = self._make_deltas(events[start : start + _SLICE], now)
            made = time.perf_counter()
            self._push(deltas, now)
            detokenize += made - began
            deliver += time.perf_counter() - made
        if self.log is not None and self._row is not None:
            self.log.add(self._row._replace(detokenize=detokenize, deliver=deliver))
            self._row = None

    def _make_deltas(self, events: list[Event], now: float) -> list[tuple[Output, Delta]]:
        outputs = self._outputs
        deltas: list[tuple[Output, Delta]] = []
        gaps: dict[float, int] = {}  # those who run beside one another have the same
        num_tokens = 0
        for sequence, token_id, logprobs, reason in events:
            output = outputs.get(sequence)
            if output is None:
                continue
            if token_id is not None:
                num_tokens += 1
                if output.num_tokens:
                    gap = now - output.last_time
                    gaps[gap] = gaps.get(gap, 0) + 1
                elif sequence.index == 0:  # all choices have their first token in one step
                    self._metrics.first_token.observe(now - sequence.request.arrival)
                output.last_time = now
            try:
                if reason is not None:
                    delta = output.finish(token_id, logprobs, reason)
                    if token_id is None and delta.token_ids:  # a beam, whole
                        num_tokens += len(delta.token_ids)
                        if sequence.index == 0:
                            self._metrics.first_token.observe(now - sequence.request.arrival)
                else:
                    assert token_id is not None
                    delta = output.advance(token_id, logprobs)
                deltas.append((output, delta))
            except Exception as error:
                self._fail_request(sequence.request, error)
                if reason is not None:  # no other event will end this choice
                    deltas.append((output, Delta(sequence.index, "", (), "error", offset=output.num_tokens)))
        self._metrics.num_output_tokens += num_tokens
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(gap, count)
        return deltas

    def _push(self, deltas: list[tuple[Output, Delta]], now: float) -> None:
        for output, delta in deltas:
            try:
                if delta.finish_reason is None:
                    output.box.push(delta)
                else:
                    self._scheduler.finish(output.sequence, "stop")  # where its text ended it; else it has ended
                    self._end(output, delta, now)
            except Exception as error:
                self._fail_request(output.sequence.request, error)

    def _end(self, output: Output, delta: Delta, now: float) -> None:
        """The last delta of a choice; after a request's last choice, the end of its stream."""
        request = output.sequence.request
        reason = delta.finish_reason
        assert reason is not None
        del self._outputs[output.sequence]
        reasons = self._reasons[request]
        reasons.append(reason)
        error = request.error
        if isinstance(error, DeadlineError) and any(sequence.output for sequence in request.sequences):
            error = None  # the reader keeps what there is, and sees why it ends
        if error is None:
            output.box.push(delta)
        if error is not None or len(reasons) == len(request.sequences):
            output.box.end(error)
        if len(reasons) == len(request.sequences):
            del self._reasons[request]
            request.ended = now
            self._metrics.count_end(request, reasons, now)
            if not self._reasons:
                self.drained.set()

    def _fail_request(self, request: Request, cause: Exception) -> None:
        """A mistake in showing one request to its reader must not harm the others."""
        _log.error("request %s failed", request.key, exc_info=cause)
        error = RequestFailedError(f"the engine failed this request: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self.cancel(request, "error", error)
        request.error = request.error or error  # one whose last token this was is no longer the scheduler's to mark

    def _die(self, cause: BaseException) -> None:
        self.dead = cause.__cause__ if isinstance(cause, EngineDeadError) and cause.__cause__ else cause
        if isinstance(cause, asyncio.CancelledError):
            _log.warning("the engine's task was cancelled")
        else:
            _log.critical("the engine is dead: %s", cause, exc_info=cause)
        now = self._clock()
        boxes = {output.box for output in self._outputs.values()}
        self._outputs.clear()
        for request in self._reasons:
            request.ended = now
            self._metrics.count_end(request, ["error"], now)
        self._reasons.clear()
        for flown in self._in_flight:
            if isinstance(flown.result, asyncio.Future):
                flown.result.cancel()
        self._in_flight.clear()
        for box in boxes:
            box.end(dead_error(self.dead))
        self.drained.set()
        self.died.set()


def _row_of(flown: InFlight, step: StepResult, began: float, committed: float) -> StepRow:
    plan, timings = flown.plan, step.timings
    return StepRow(
        number=plan.number,
        num_decodes=len(plan.decodes),
        num_chunks=len(plan.chunks),
        num_tokens=plan.num_tokens,
        at=committed,
        schedule=flown.scheduled - flown.scheduling,
        queue=max(0.0, timings.began - flown.scheduled),
        inputs=timings.inputs,
        launch=timings.launch,
        gap=timings.gap,
        device=timings.compute,
        wait=timings.wait,
        lag=timings.lag,
        commit=committed - began,
        detokenize=0.0,
        deliver=0.0,
    )


def dead_error(cause: BaseException) -> EngineDeadError:
    """A fresh error for every caller: one that is raised again and again would grow its traceback."""
    if isinstance(cause, EngineDeadError):
        message = cause.message
    elif isinstance(cause, asyncio.CancelledError):
        message = "its task was cancelled"
    else:
        message = f"{type(cause).__name__}: {cause}"
    error = EngineDeadError(f"the engine is dead: {message}")
    error.__cause__ = cause
    return error
