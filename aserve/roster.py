"""Requests from their arrival until each of their sequences has ended, exactly once.

Part of scheduler.py: it adds requests here, and reaps at every step boundary those that were cancelled or are late.
`end` is the one place where a sequence ends and gives back its slot and blocks. Never plans, admits or preempts.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from aserve.batch import Batch
from aserve.beam_groups import settle
from aserve.deadlines import Deadlines
from aserve.errors import AserveError, DeadlineError
from aserve.forecast import Forecast
from aserve.quarantine import Quarantine
from aserve.request import FinishReason, Phase, Request, Sequence
from aserve.residency import Residency
from aserve.seat import Event, Step
from aserve.waiting import WaitingLine

MAX_REAPED = 512  # requests ended by one reap(): a few ms at most where thousands leave at once


class Roster:
    """Who has not ended, and where each of them has to be struck off when it does."""

    def __init__(
        self, batch: Batch, residency: Residency, line: WaitingLine, quarantine: Quarantine, steps: deque[Step]
    ) -> None:
        self._batch = batch
        self._residency = residency
        self._line = line
        self._quarantine = quarantine
        self._steps = steps  # in flight
        self._cancelled: deque[Request] = deque()  # those that hold memory first
        self._events: list[Event] = []  # ends that no step brings
        self.unfinished: dict[Request, None] = {}
        self.paused: dict[Request, None] = {}  # their readers are behind
        self.deadlines = Deadlines()
        self.forecast = Forecast()

    def add(self, request: Request) -> None:
        """An admitted request waits."""
        self.unfinished[request] = None
        self._line.add(request)
        self.deadlines.add(request)

    def cancel(self, request: Request, reason: FinishReason, error: AserveError | None) -> None:
        """Marks the request for the next reap(). The first reason stays."""
        if request in self.unfinished and request.cancel_reason is None:
            request.cancel_reason = reason
            request.error = error
            holds_memory = request in self._batch.groups or self._residency.holds(request)
            if holds_memory:
                self._cancelled.appendleft(request)
            else:
                self._cancelled.append(request)
                self._line.remove(request)

    def pause(self, request: Request, *, paused: bool) -> None:
        """Takes a running request's slots, and its memory once that is short; or lets it come back. One that is not
        running is left alone."""
        if paused and request in self._batch.groups and request.cancel_reason is None:
            self._residency.park(request)
            self._quarantine.excuse(request)
            self.paused[request] = None
        elif not paused and request in self.paused:
            del self.paused[request]
            self._residency.unpark(request)
            self._line.put_back(request)

    def take_events(self) -> list[Event]:
        """Ends that no step brings, since the last call."""
        events, self._events = self._events, []
        return events

    def reap(self, now: float) -> None:
        """Ends what was cancelled or has expired."""
        count = min(MAX_REAPED, len(self._cancelled))
        for _ in range(count):
            self.end_all(self._cancelled.popleft())
        for request in islice(self.deadlines.take_expired(now), MAX_REAPED - count):
            self.end_all(request)
        for request in self._hopeless(now):
            self.end_all(request)

    def _hopeless(self, now: float) -> list[Request]:
        """Requests whose prompt surely cannot be computed by their first-token deadline: others get their memory."""
        found = []
        for seat in self._batch.prefilling:
            request, due = seat.sequence.request, seat.sequence.request.first_token_deadline
            if due is None or request.first_token is not None or request in found:
                continue
            left = seat.sequence.num_tokens - seat.sequence.num_computed
            if not self.forecast.can_compute(left, due - now):
                request.cancel_reason = "deadline"
                request.error = DeadlineError(
                    f"{left} prompt tokens are left and {due - now:.3f} s to the first token: that cannot be met"
                )
                found.append(request)
        return found

    def fail(self, request: Request, error: AserveError, *, poisoned: bool = False) -> None:
        """Ends the request with the error, unless another reason came first. Nobody may share KV that is poisoned."""
        if poisoned:
            self._residency.withdraw(request)
        request.cancel_reason = request.cancel_reason or "error"
        request.error = request.error or error
        self.end_all(request)

    def restart(self, request: Request) -> None:
        """Nothing of it in memory can be trusted: drops its draws in flight and has it computed again."""
        resumes = request in self._batch.groups
        for sequence in request.sequences:
            self.drop_draws(sequence)
        self._residency.discard(request)
        if resumes:
            self._line.put_back(request)

    def end_all(self, request: Request) -> None:
        """Ends what is unfinished of a request for its cancel_reason, each sequence with an event."""
        assert request.cancel_reason is not None
        if request.beams is not None:
            settle(request, request.cancel_reason)
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self.end(sequence, request.cancel_reason)
                self._events.append(Event(sequence, None, None, request.cancel_reason))

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one place where a sequence ends: its slot and blocks in both pools are free from the next plan on."""
        self.drop_draws(sequence)
        self._residency.forget(sequence)
        sequence.finish_reason = reason
        if reason in ("stop", "length"):
            self.forecast.observe_end(len(sequence.output))
        sequence.move(Phase.FINISHED)
        request = sequence.request
        if request.finished:
            del self.unfinished[request]
            self.paused.pop(request, None)
            self._quarantine.forget(request)
            self.deadlines.remove(request)
            self._line.remove(request)

    def drop_draws(self, sequence: Sequence) -> None:
        """Steps in flight draw nothing for the sequence any more."""
        seat = self._batch.seats.get(sequence)
        if seat is not None:
            seat.live = False
        elif sequence.num_inflight:  # preempted since; a sequence is seated again only with no draw in flight
            for step in self._steps:
                for seat in step.drawing():
                    seat.live = seat.live and seat.sequence is not sequence
        sequence.num_inflight = 0

    def check_invariants(self) -> None:
        """Raises AssertionError where phases and queues disagree."""
        returning = set(self._line.returning)
        for request in self.unfinished:
            phases = {sequence.phase for sequence in request.sequences} - {Phase.FINISHED}
            assert len(phases) == 1, f"request {request.id} is in {phases}"
            assert (request in self._batch.groups) == (Phase.RUNNING in phases)
            assert (request in self.paused) == (Phase.PAUSED in phases)
            assert Phase.SWAPPED not in phases or request in returning
            if not self._steps:
                assert not any(sequence.num_inflight for sequence in request.sequences)
