"""Which tokens each step computes: continuous batching over paged memory.

engine.py calls schedule, hands the plan to an executor, and calls commit with its result, keeping up to `depth` plans
in flight. Order: running, then preempted, then waiting. Pure: no asyncio, no torch, no clock (times are passed in).
Work per step follows what changes, plus one tight loop over the draws; it does not depend on how many wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from typing import Self

from aserve.batch import Batch
from aserve.block_manager import BlockManager
from aserve.claims import find_yielding
from aserve.config import EngineConfig, Preemption
from aserve.deadlines import Deadlines
from aserve.errors import AserveError, RequestFailedError
from aserve.plan import BlockCopy, StepPlan, StepResult, WorkerInfo
from aserve.policy import Policy, load_policy
from aserve.preemption import Choice, CostModel
from aserve.quarantine import Quarantine
from aserve.request import FinishReason, Phase, Request, Sequence
from aserve.residency import Entry, Residency
from aserve.seat import Draft, Event, Move, PreemptionCause, PreemptionKind, Row, SchedulerStats, Seat, Step
from aserve.waiting import WaitingLine

__all__ = ["Event", "Move", "Scheduler", "SchedulerStats"]

MAX_LATER = 16  # requests set aside while others compute the prefix they share
MAX_REAPED = 512  # requests ended by one schedule(): a few ms at most where thousands leave at once


class Scheduler:
    """Requests from add() until each of their sequences has ended, exactly once."""

    def __init__(
        self,
        *,
        blocks: BlockManager,
        policy: Policy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        depth: int = 1,
        preemption: Preemption | CostModel = "auto",
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # every decode fits a step
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.depth = depth
        if not isinstance(preemption, CostModel):
            preemption = CostModel(preemption, block_size=blocks.block_size)
        self.costs = preemption
        self._line = WaitingLine(policy)
        self._batch = Batch(blocks, policy, self.max_num_seqs)
        self._residency = Residency(blocks, self._batch, self.costs)
        self._unfinished: dict[Request, None] = {}
        self._paused: dict[Request, None] = {}  # their readers are behind
        self._quarantine = Quarantine()
        self._cancelled: deque[Request] = deque()  # those that hold memory first
        self._deadlines = Deadlines()
        self._steps: deque[Step] = deque()
        self._events: list[Event] = []  # ends that no step brings
        self._swap_out: list[BlockCopy] = []  # they go first in the next plan
        self._swapped_out: list[Request] = []
        self._moves: list[Move] = []
        self.preemptions: Counter[tuple[PreemptionKind, PreemptionCause]] = Counter()
        self._number = 0
        self._num_preemptions = self._num_swaps = self._num_yields = self._num_prompt_tokens = (
            self._num_prefix_hit_tokens
        ) = 0

    @classmethod
    def create(cls, config: EngineConfig, info: WorkerInfo) -> Self:
        """The scheduler of an engine whose worker has started. Raises ConfigError for a policy that does not load."""
        caching = config.enable_prefix_caching
        return cls(
            blocks=BlockManager(info.num_gpu_blocks, info.num_cpu_blocks, info.block_size, prefix_caching=caching),
            policy=load_policy(config.policy),
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            depth=config.depth or info.depth,
            preemption=CostModel(
                config.preemption,
                block_size=info.block_size,
                block_bytes=info.block_bytes,
                copy_rate=info.copy_rate,
            ),
        )

    # requests in and out

    def add(self, request: Request) -> None:
        """Takes an admitted request. It waits until schedule() finds room."""
        if len(request.prompt) + request.max_tokens > self.max_model_len:
            raise ValueError(f"request {request.id} was not admitted: it does not fit the context")
        self._unfinished[request] = None
        self._line.add(request)
        self._deadlines.add(request)

    def cancel(self, request: Request, reason: FinishReason, error: AserveError | None = None) -> None:
        """Marks the request; the next schedule() ends what is unfinished of it. The first reason stays."""
        if request in self._unfinished and request.cancel_reason is None:
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
            self._paused[request] = None
        elif not paused and request in self._paused:
            del self._paused[request]
            self._residency.unpark(request)
            self._line.put_back(request)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence now, because of its text; its draws in flight are dropped and no event is made.

        Returns False where it had ended already.
        """
        if sequence.phase is Phase.FINISHED:
            return False
        self._end(sequence, reason)
        return True

    def next_deadline(self) -> float | None:
        """When schedule() must be called even if nothing else happens."""
        return self._deadlines.next()

    def take_events(self) -> list[Event]:
        """Ends found by schedule() that no commit has returned yet."""
        events, self._events = self._events, []
        return events

    def take_moves(self) -> list[Move]:
        """Who was preempted and who resumed since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def oldest_wait(self, now: float) -> float:
        """Seconds since the arrival of the oldest request that has not run yet; 0 where there is none."""
        return next((now - each.arrival for each in self._unfinished if each.first_scheduled is None), 0.0)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory yet, or none any more."""
        return len(self._line) - self._residency.num_swapped

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._batch.seats)

    @property
    def num_swapped(self) -> int:
        """Requests in the host pool."""
        return self._residency.num_swapped

    def stats(self) -> SchedulerStats:
        """A snapshot, O(1)."""
        return SchedulerStats(
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_swapped=self.num_swapped,
            num_paused=len(self._paused),
            num_blocks=self.blocks.num_device_blocks,
            num_blocks_used=self.blocks.num_used,
            num_blocks_cached=self.blocks.num_cached,
            num_preemptions=self._num_preemptions,
            num_swaps=self._num_swaps,
            num_yields=self._num_yields,
            num_prompt_tokens=self._num_prompt_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
        )

    # one step

    def schedule(self, now: float) -> StepPlan | None:
        """Ends what was cancelled or has expired, then plans a step. None where nothing can be planned now."""
        if len(self._steps) >= self.depth:
            raise RuntimeError(f"{self.depth} steps are in flight already")
        self._reap(now)
        draft = Draft()
        growing = self._batch.growing()
        preempted = self._make_room(growing) if growing else False
        claimant = None if preempted else self._claim(growing, now)
        if growing:
            self._batch.grow(draft, [seat for seat in growing if seat.active])
        decodes = self._batch.plan_decodes(draft)
        self._batch.plan_prefills(draft, self.max_num_batched_tokens)
        if not preempted:
            self._admit(draft, now, claimant)
        if not draft.num_tokens:
            return None
        self._number += 1
        plan = draft.build(self._number, decodes, self._swap_out)
        self._steps.append(
            Step(
                self._number,
                draft.decoding,
                draft.rows,
                draft.handed,
                self._swapped_out,
                draft.num_tokens,
                draft.num_pairs,
                bool(plan.swap_out or plan.swap_in),
            )
        )
        self._swap_out, self._swapped_out = [], []
        return plan

    def _make_room(self, growing: list[Seat]) -> bool:
        """Preempts from the end of the running order until the others' next blocks are free."""
        preempted = False
        while self._batch.num_growth(growing) > self.blocks.num_free:
            if self._evict_parked():
                continue
            victim = self._batch.victim()
            self._preempt(victim, "away" if victim.detached else "memory")
            self._residency.widen()
            growing = [seat for seat in growing if seat.active]
            preempted = True
        return preempted

    def _claim(self, growing: list[Seat], now: float) -> Request | None:
        """The waiting request that is next by right of its tenant, after others have made room for it."""
        request = self._line.peek(now)
        if request is None or self._quarantine or self._batch.num_due >= self.max_num_batched_tokens:
            return None
        if self._residency.parked and self._batch.loser(request) is not None:
            need = self.blocks.blocks_for(len(request.prompt)) + self._batch.num_growth(growing)
            while need > self.blocks.num_free and self._evict_parked():
                pass
        yielding = find_yielding(request, self._batch, self.blocks, self._batch.num_growth(growing))
        if yielding is None:
            return None
        for each in yielding:
            self._preempt(each, "fairness")
        self._num_yields += len(yielding)
        return request

    def _preempt(self, victim: Request, cause: PreemptionCause) -> None:
        choice, copies = self._residency.preempt(victim)
        self._line.put_back(victim)
        self._note_preemption(victim, cause, choice, copies)

    def _evict_parked(self, keep: Request | None = None) -> bool:
        """Takes the memory of a request whose reader is behind. False where none has any."""
        evicted = self._residency.evict_parked(keep) if self._residency.parked else None
        if evicted is None:
            return False
        request, choice, copies = evicted
        self._note_preemption(request, "away", choice, copies)
        return True

    def _note_preemption(
        self, victim: Request, cause: PreemptionCause, choice: Choice, copies: list[BlockCopy]
    ) -> None:
        if copies:
            self._swap_out += copies
            self._swapped_out.append(victim)
            self._num_swaps += 1
        self._num_preemptions += 1
        self.preemptions[choice.kind, cause] += 1
        self._moves.append(Move(victim, "preempted", cause, choice))

    def _admit(self, draft: Draft, now: float, claimant: Request | None) -> None:
        """Brings in the claimant, preempted requests, and waiting ones, while tokens, slots and blocks are left."""
        if claimant is not None:
            if self._residency.enter(claimant, draft, urgent=True) != "in":
                return  # what was freed for it stays free
            self._line.remove(claimant)
            self._start(claimant, draft, now)
        num_later = 0
        for request in self._line.returning:
            if not self._has_room(draft):
                return
            if not self._quarantine.admits(request):
                continue
            state = self._enter(request, draft)
            if state in ("no slots", "no blocks"):
                return
            if state == "later":
                num_later += 1
                continue
            self._line.remove(request)
            self._start(request, draft, now)
        while not self._quarantine and self._has_room(draft) and (new := self._line.peek(now)) is not None:
            state = self._enter(new, draft)
            if state in ("no slots", "no blocks") or (state == "later" and num_later >= MAX_LATER):
                return
            self._line.remove(new)
            if state == "later":
                num_later += 1
                self._line.put_back(new)
                continue
            self._start(new, draft, now)

    def _enter(self, request: Request, draft: Draft) -> Entry:
        """Seats the request where there is room, or where requests whose readers are behind have some."""
        while (state := self._residency.enter(request, draft)) == "no blocks" and self._evict_parked(request):
            pass
        return state

    def _has_room(self, draft: Draft) -> bool:
        return draft.num_tokens < self.max_num_batched_tokens and self._batch.num_free_slots > 0

    def _start(self, request: Request, draft: Draft, now: float) -> None:
        if request.num_preemptions:
            self._moves.append(Move(request, "resumed"))
        self._quarantine.enter(request)
        if request.first_scheduled is None:
            request.first_scheduled = now
            self._num_prompt_tokens += len(request.prompt)
            self._num_prefix_hit_tokens += request.num_cached
        for seat in self._batch.groups[request]:
            waits = seat.shared is not None and seat.shared.leader is not seat
            if seat in self._batch.prefilling and not waits and draft.num_tokens < self.max_num_batched_tokens:
                self._batch.plan_chunk(draft, seat, self.max_num_batched_tokens)

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Takes the result of the oldest plan in flight. Returns its tokens and ends, after those schedule() found."""
        step = self._steps.popleft()
        if step.number != result.number:
            raise ValueError(f"result of step {result.number} came where step {step.number} was due")
        self._observe(step, result.timings.compute)
        if result.bad:
            self._fail_bad(step, result.bad)
        suspect = self._quarantine.on_trial
        if suspect is not None and any(seat.sequence.request is suspect and seat.live for seat in step.drawing()):
            self._quarantine.drew()
        events = self.take_events()
        self._commit_draws(step.decoding, result, 0, events)
        index = len(step.decoding)
        for chunk, row in enumerate(step.rows):
            if chunk in result.prompt_logprobs:
                row.keep_prompt_logprobs(result.prompt_logprobs[chunk])
            index = self._commit_row(row, result, index, events, now)
        return events

    def _observe(self, step: Step, seconds: float) -> None:
        """What the step took tells the cost model what tokens cost."""
        if step.swaps:
            return
        if step.rows:
            self.costs.observe_chunks(step.num_tokens - len(step.decoding), step.num_pairs, seconds)
        else:
            self.costs.observe_decode(seconds)

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
                    self._fail(sequence.request, error)
                    continue
            if reason is not None:
                self._end(sequence, reason)
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
                    self._end(seat.sequence, "length")
                    events.append(Event(seat.sequence, None, None, "length"))
            return index
        if request.first_token is None and any(seat.live for seat in row.drawing):
            request.first_token = now
            self._deadlines.reached_first_token(request)
        self._commit_draws(row.drawing, result, index, events)
        return index + len(row.drawing)

    def fail(self, number: int, slots: tuple[int, ...], error: AserveError, now: float) -> list[Event]:
        """The oldest plan in flight failed. Requests of the culprit `slots` end with the error; the others are computed
        again from their committed tokens. Where no slot is named, they come back one by one to find the culprit."""
        step = self._steps.popleft()
        if step.number != number:
            raise ValueError(f"step {number} failed where step {step.number} was due")
        seats = [*step.decoding, *step.handed]
        for row in step.rows:
            seats += (row.seat, *row.drawing)
        touched = dict.fromkeys(seat.sequence.request for seat in seats if seat.live)
        culprits = dict.fromkeys(seat.sequence.request for seat in seats if seat.slot in slots and seat.live)
        for request in culprits if slots else self._quarantine.accuse(list(touched)):
            self._fail(request, error)
        for request in dict.fromkeys((*touched, *step.swapped_out)):
            if request in self._unfinished:
                self._rebuild(request)
            if request in self._paused:
                self._quarantine.excuse(request)
        return self.take_events()

    def shed(self) -> None:
        """A step ran out of memory: later ones compute fewer tokens."""
        self.max_num_batched_tokens = max(self.max_num_seqs, self.max_num_batched_tokens // 2)

    def _rebuild(self, request: Request) -> None:
        """Nothing in memory can be trusted: drops its draws in flight and computes it again."""
        resumes = request in self._batch.groups
        for sequence in request.sequences:
            self._drop_draws(sequence)
        self._residency.discard(request)
        if resumes:
            self._line.put_back(request)

    # ends

    def _reap(self, now: float) -> None:
        count = min(MAX_REAPED, len(self._cancelled))
        for _ in range(count):
            self._end_all(self._cancelled.popleft())
        for request in islice(self._deadlines.take_expired(now), MAX_REAPED - count):
            self._end_all(request)

    def _fail(self, request: Request, error: AserveError) -> None:
        """Ends the request with the error, unless another reason came first."""
        request.cancel_reason = request.cancel_reason or "error"
        request.error = request.error or error
        self._end_all(request)

    def _end_all(self, request: Request) -> None:
        """Ends what is unfinished of a request for its cancel_reason, each sequence with an event."""
        assert request.cancel_reason is not None
        for sequence in request.sequences:
            if sequence.phase is not Phase.FINISHED:
                self._end(sequence, request.cancel_reason)
                self._events.append(Event(sequence, None, None, request.cancel_reason))

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one place where a sequence ends: its slot and blocks in both pools are free from the next plan on."""
        self._drop_draws(sequence)
        self._residency.forget(sequence)
        sequence.finish_reason = reason
        sequence.move(Phase.FINISHED)
        request = sequence.request
        if request.finished:
            del self._unfinished[request]
            self._paused.pop(request, None)
            self._quarantine.forget(request)
            self._deadlines.remove(request)
            self._line.remove(request)

    def _drop_draws(self, sequence: Sequence) -> None:
        """Steps in flight draw nothing for the sequence any more."""
        seat = self._batch.seats.get(sequence)
        if seat is not None:
            seat.live = False
        elif sequence.num_inflight:  # preempted since; a sequence is seated again only with no draw in flight
            for step in self._steps:
                for seat in step.drawing():
                    seat.live = seat.live and seat.sequence is not sequence
        sequence.num_inflight = 0

    def _fail_bad(self, step: Step, bad: tuple[int, ...]) -> None:
        """Draws from logits that were not finite: their requests end, the others go on, and nobody shares their KV."""
        drawn = [seat for seat in step.drawing() if seat.limit]
        for index in bad:
            seat = drawn[index]
            request = seat.sequence.request
            if seat.live and request in self._unfinished:
                request.cancel_reason = "error"
                request.error = RequestFailedError(
                    f"the model gave logits that are not finite at token {seat.sequence.num_tokens}"
                )
                for each in drawn:
                    each.live = each.live and each.sequence.request is not request
                for each in self._batch.groups.get(request, ()):
                    self.blocks.withdraw(each.table)
                self._end_all(request)

    def check_invariants(self) -> None:
        """Raises AssertionError where blocks, phases and queues disagree. O(everything): for idle moments and tests."""
        self.blocks.check_invariants()
        self._residency.check_invariants()
        returning = set(self._line.returning)
        for request in self._unfinished:
            phases = {sequence.phase for sequence in request.sequences} - {Phase.FINISHED}
            assert len(phases) == 1, f"request {request.id} is in {phases}"
            assert (request in self._batch.groups) == (Phase.RUNNING in phases)
            assert (request in self._paused) == (Phase.PAUSED in phases)
            assert Phase.SWAPPED not in phases or request in returning
            if not self._steps:
                assert not any(sequence.num_inflight for sequence in request.sequences)
        if not self._unfinished:
            assert self.num_waiting == self.num_running == self.num_swapped == self.blocks.num_used == 0
