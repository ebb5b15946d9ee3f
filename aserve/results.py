"""What the steps in flight bring: tokens, ends, and failures.

Part of scheduler.py, which puts a Step here with each plan it makes and hands over the results in the same order. This
commits draws to their sequences and sends back for computation what a failed step touched. Never plans or admits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aserve.batch import Batch
from aserve.beam_groups import settle
from aserve.errors import AserveError, RequestFailedError
from aserve.plan import StepResult, TokenLogprobs
from aserve.preemption import CostModel
from aserve.quarantine import Quarantine
from aserve.request import FinishReason
from aserve.roster import Roster
from aserve.seat import Event, Row, Seat, Step


class Results:
    """Takes the outcome of each step, the oldest first."""

    def __init__(
        self, steps: deque[Step], batch: Batch, roster: Roster, quarantine: Quarantine, costs: CostModel
    ) -> None:
        self._steps = steps
        self._batch = batch
        self._roster = roster
        self._quarantine = quarantine
        self._costs = costs

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """The tokens and ends of the oldest step, after the ends that no step brought."""
        step = self._steps.popleft()
        if step.number != result.number:
            raise ValueError(f"result of step {result.number} came where step {step.number} was due")
        self._observe(step, result)
        if result.bad:
            self._fail_bad(step, result.bad)
        suspect = self._quarantine.on_trial
        if suspect is not None and any(seat.sequence.request is suspect and seat.live for seat in step.drawing()):
            self._quarantine.drew()
        events = self._roster.take_events()
        self._commit_draws(step.decoding, result, 0, events)
        index = len(step.decoding)
        for chunk, row in enumerate(step.rows):
            if chunk in result.prompt_logprobs:
                row.keep_prompt_logprobs(result.prompt_logprobs[chunk])
            index = self._commit_row(row, result, index, events, now)
        return events

    def _observe(self, step: Step, result: StepResult) -> None:
        """What the step took tells what tokens cost, and how fast they come at best."""
        seconds = result.timings.compute
        self._roster.forecast.observe_step(step.num_tokens, len(result.tokens), seconds)
        if step.swaps:
            return
        if step.rows:
            self._costs.observe_chunks(step.num_tokens - len(step.decoding), step.num_pairs, seconds)
        else:
            self._costs.observe_decode(seconds)

    def _commit_draws(self, seats: Iterable[Seat], result: StepResult, index: int, events: list[Event]) -> None:
        """The hot loop: appends each seat's token and ends it where the token, or their number, says so."""
        tokens = result.tokens
        logprobs = result.logprobs
        new_event = tuple.__new__  # half the cost of Event()
        for at, seat in enumerate(seats, index):
            if not seat.live:
                continue
            token = tokens[at]
            sequence = seat.sequence
            output = seat.output
            output.append(token)
            sequence.num_inflight -= 1
            reason: FinishReason | None = None
            if len(output) == seat.look_at:
                self._batch.committed(seat)
                if len(output) == seat.limit:
                    reason = "length"
            if token in seat.ends:
                reason = "stop"
                sequence.stop_token = token
            if seat.constraint is not None:
                try:
                    if seat.constraint.accept(token):
                        reason = "stop"
                except AserveError as error:
                    self._roster.fail(sequence.request, error)
                    continue
            if reason is not None:
                self._roster.end(sequence, reason)
            events.append(new_event(Event, (sequence, token, logprobs.get(at) if logprobs else None, reason)))

    def _commit_row(self, row: Row, result: StepResult, index: int, events: list[Event], now: float) -> int:
        """A chunk's blocks may be shared now; where it was the last one, its draws are the first tokens."""
        self._batch.settle(row)
        if not row.drawing:
            return index
        request = row.seat.sequence.request
        if not request.max_tokens:
            for seat in row.drawing:
                if seat.live:
                    self._roster.end(seat.sequence, "length")
                    events.append(Event(seat.sequence, None, None, "length"))
            return index
        if request.first_token is None and any(seat.live for seat in row.drawing):
            request.first_token = now
            self._roster.deadlines.reached_first_token(request)
        if request.beams is None:
            self._commit_draws(row.drawing, result, index, events)
        elif row.seat.live and row.seat.active:  # a preempted beam draws again
            self._commit_beam(row.seat, result.logprobs.get(index), events)
        return index + len(row.drawing)

    def _commit_beam(self, seat: Seat, found: TokenLogprobs | None, events: list[Event]) -> None:
        """What a beam drew does not count, but which tokens were the best. The last of its group moves the search
        on."""
        request = seat.sequence.request
        seat.sequence.num_inflight -= 1
        if found is None:
            self._roster.fail(request, RequestFailedError("the executor gave no logprobs, which beams are ranked by"))
        elif self._batch.beams.take(seat, found, self._batch.groups[request]):
            for sequence, reason in settle(request):
                self._roster.end(sequence, reason)
                events.append(Event(sequence, None, None, reason))

    # failures

    def fail(self, number: int, slots: tuple[int, ...], error: AserveError) -> list[Event]:
        """The oldest step failed: ends the requests of `slots`, or who is found guilty, and restarts the others."""
        step = self._steps.popleft()
        if step.number != number:
            raise ValueError(f"step {number} failed where step {step.number} was due")
        seats = [*step.decoding, *step.handed]
        for row in step.rows:
            seats += (row.seat, *row.drawing)
        touched = dict.fromkeys(seat.sequence.request for seat in seats if seat.live)
        culprits = dict.fromkeys(seat.sequence.request for seat in seats if seat.slot in slots and seat.live)
        for request in culprits if slots else self._quarantine.accuse(list(touched)):
            self._roster.fail(request, error)
        for request in dict.fromkeys((*touched, *step.swapped_out)):
            if request in self._roster.unfinished:
                self._roster.restart(request)
            if request in self._roster.paused:
                self._quarantine.excuse(request)
        return self._roster.take_events()

    def _fail_bad(self, step: Step, bad: tuple[int, ...]) -> None:
        """Draws from logits that were not finite: their requests end, the others go on, and nobody shares their KV."""
        drawn = [seat for seat in step.drawing() if seat.limit]
        for index in bad:
            seat = drawn[index]
            request = seat.sequence.request
            if seat.live and request in self._roster.unfinished:
                message = f"the model gave logits that are not finite at token {seat.sequence.num_tokens}"
                for each in drawn:
                    each.live = each.live and each.sequence.request is not request
                self._roster.fail(request, RequestFailedError(message), poisoned=True)
