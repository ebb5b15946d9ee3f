"""Which tokens each step computes: continuous batching over paged memory.

pipeline.py calls schedule, hands the plan to an executor, and calls commit with its result, keeping up to `depth` plans
in flight. Order: running, then preempted, then waiting. Pure: no asyncio, no torch, no clock (times are passed in).
Work per step follows what changes, plus one tight loop over the draws; it does not depend on how many wait. Its parts:
roster.py (who has not ended), batch.py (who runs), residency.py (in and out of memory), results.py (what steps bring).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Self

from aserve.admission import Load
from aserve.batch import Batch
from aserve.block_manager import BlockManager
from aserve.claims import find_yielding
from aserve.config import EngineConfig, Preemption
from aserve.errors import AserveError
from aserve.plan import BlockCopy, StepPlan, StepResult, WorkerInfo
from aserve.policy import Policy, load_policy
from aserve.preemption import Choice, CostModel, PreemptionKind
from aserve.quarantine import Quarantine
from aserve.request import FinishReason, Phase, Request, Sequence
from aserve.residency import Entry, Residency
from aserve.results import Results
from aserve.roster import Roster
from aserve.seat import Draft, Event, Move, PreemptionCause, SchedulerStats, Seat, Step
from aserve.waiting import WaitingLine

__all__ = ["Event", "Move", "Scheduler", "SchedulerStats"]

MAX_LATER = 16  # requests set aside while others compute the prefix they share


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
        self._quarantine = Quarantine()
        self._steps: deque[Step] = deque()
        self._roster = Roster(self._batch, self._residency, self._line, self._quarantine, self._steps)
        self._results = Results(self._steps, self._batch, self._roster, self._quarantine, self.costs)
        self._swap_out: list[BlockCopy] = []  # they go first in the next plan
        self._swapped_out: list[Request] = []
        self._moves: list[Move] = []
        self.preemptions: Counter[tuple[PreemptionKind, PreemptionCause]] = Counter()
        self._number = self._num_blocks_out = self._num_blocks_in = 0
        self._num_preemptions = self._num_swaps = self._num_yields = 0
        self._num_prompt_tokens = self._num_prefix_hit_tokens = 0

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
        self._roster.add(request)

    def cancel(self, request: Request, reason: FinishReason, error: AserveError | None = None) -> None:
        """Marks the request; the next schedule() ends what is unfinished of it. The first reason stays."""
        self._roster.cancel(request, reason, error)

    def pause(self, request: Request, *, paused: bool) -> None:
        """Takes a running request's slots, and its memory once that is short; or lets it come back. One that is not
        running is left alone."""
        self._roster.pause(request, paused=paused)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence now, because of its text; its draws in flight are dropped and no event is made.

        Returns False where it had ended already.
        """
        if sequence.phase is Phase.FINISHED:
            return False
        self._roster.end(sequence, reason)
        return True

    def next_deadline(self) -> float | None:
        """When schedule() must be called even if nothing else happens."""
        return self._roster.deadlines.next()

    def take_events(self) -> list[Event]:
        """Ends found by schedule() that no commit has returned yet."""
        return self._roster.take_events()

    def take_moves(self) -> list[Move]:
        """Who was preempted and who resumed since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def oldest_wait(self, now: float) -> float:
        """Seconds since the arrival of the oldest request that has not run yet; 0 where there is none."""
        return next((now - each.arrival for each in self._roster.unfinished if each.first_scheduled is None), 0.0)

    def load(self, tenant: str, priority: int) -> Load:
        """What a request of the tenant and priority would meet, for admission."""
        share = 1.0 - self._num_prefix_hit_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 1.0
        ahead = self._line.ahead(tenant, priority)
        wait = self._roster.forecast.least_wait(ahead, self.max_num_seqs, share)
        return Load(self.num_waiting, self._line.num_new(tenant), wait)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._roster.unfinished)

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
            num_paused=len(self._roster.paused),
            num_blocks=self.blocks.num_device_blocks,
            num_blocks_used=self.blocks.num_used,
            num_blocks_cached=self.blocks.num_cached,
            num_preemptions=self._num_preemptions,
            num_swaps=self._num_swaps,
            num_blocks_out=self._num_blocks_out,
            num_blocks_in=self._num_blocks_in,
            num_yields=self._num_yields,
            num_prompt_tokens=self._num_prompt_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
        )

    # one step

    def schedule(self, now: float) -> StepPlan | None:
        """Ends what was cancelled or has expired, then plans a step. None where nothing can be planned now."""
        if len(self._steps) >= self.depth:
            raise RuntimeError(f"{self.depth} steps are in flight already")
        self._roster.reap(now)
        draft = Draft()
        growing = self._batch.growing()
        preempted = self._make_room(growing) if growing else False
        claimant = None if preempted else self._claim(growing, now)
        if growing:
            self._batch.grow(draft, [seat for seat in growing if seat.active])
        decodes = self._batch.plan_decodes(draft)
        self._batch.plan_beams(draft, self.max_num_batched_tokens)
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
        self._num_blocks_out += len(plan.swap_out)
        self._num_blocks_in += len(plan.swap_in)
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
        while (state := self._residency.enter(request, draft)) == "no blocks":
            # a plan's copies out go before those in: they must not take host blocks that these are still read from
            if draft.swap_in or not self._evict_parked(request):
                break
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

    # its outcome

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Takes the result of the oldest plan in flight. Returns its tokens and ends, after those schedule() found."""
        return self._results.commit(result, now)

    def fail(self, number: int, slots: tuple[int, ...], error: AserveError) -> list[Event]:
        """The oldest plan in flight failed. Requests of the culprit `slots` end with the error; the others are computed
        again from their committed tokens. Where no slot is named, they come back one by one to find the culprit."""
        return self._results.fail(number, slots, error)

    def shed(self) -> None:
        """A step ran out of memory: later ones compute fewer tokens."""
        self.max_num_batched_tokens = max(self.max_num_seqs, self.max_num_batched_tokens // 2)

    def check_invariants(self) -> None:
        """Raises AssertionError where blocks, phases and queues disagree. O(everything): for idle moments and tests."""
        self.blocks.check_invariants()
        self._residency.check_invariants()
        self._roster.check_invariants()
        if not self._roster.unfinished:
            assert self.num_waiting == self.num_running == self.num_swapped == self.blocks.num_used == 0
