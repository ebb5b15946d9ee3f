"""Replays a trace through the real admission, scheduler, policy and block manager, on a virtual clock.

command.py and tests drive it. It does what pipeline.py does, with a cost model in place of the executor: the clock
jumps to the next result, arrival or deadline. Pure: no model, no sleep, no asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aserve.admission import Limits, admit
from aserve.block_manager import BlockManager
from aserve.config import Preemption
from aserve.errors import AserveError
from aserve.plan import SlotUpdate, StepPlan, StepResult, StepTimings
from aserve.policy import Policy, load_policy
from aserve.preemption import CostModel
from aserve.request import Request, SamplingParams, Sequence
from aserve.scheduler import Event, Scheduler
from aserve.simulation.machine import Machine
from aserve.simulation.report import Report
from aserve.simulation.trace import TraceRequest

END, TOKEN, FIRST_ID = 0, 1, 2  # token ids: ends a sequence; any other draw; the first that prompts are made of
VOCABULARY = 2**62


class SimulatedModel:
    """Knows how many tokens each sequence draws before its end, and what a step costs.

    A slot that decodes does so in every step until it ends or is handed over, so its position and its end are kept
    relative to the number of steps, and a step costs this class what changes in it.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.lengths: dict[int, int] = {}  # tokens to draw, by request seed
        self._updates: list[SlotUpdate | None] = [None] * machine.max_num_seqs
        self._end_at = [0] * machine.max_num_seqs  # step in which the slot draws its end
        self._behind = [0] * machine.max_num_seqs  # position of the slot less the number of the step
        self._decodes: tuple[int, ...] = ()
        self._sum_behind = 0

    def launch(self, plan: StepPlan) -> StepResult:
        """Draws. The result's `timings.compute` is how long the step keeps the device busy."""
        step = plan.number
        for update in plan.slots:
            self._updates[update.slot] = update
        if plan.decodes is not self._decodes:
            self._decodes = plan.decodes
            self._sum_behind = sum(map(self._behind.__getitem__, plan.decodes))
        end_at = self._end_at
        tokens = [END if end_at[slot] == step else TOKEN for slot in plan.decodes]
        num_tokens = len(tokens)
        context = self._sum_behind + num_tokens * step
        pairs = 0.0
        for chunk in plan.chunks:
            count = len(chunk.tokens)
            end = chunk.start + count
            num_tokens += count
            context += end
            pairs += count * (chunk.start + count / 2)
            for slot in chunk.draws:
                tokens.append(self._first_draw(slot, end, step))
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        seconds = self._machine.step_seconds(num_tokens, context, pairs, num_copies)
        return StepResult(step, tokens, timings=StepTimings(compute=seconds))

    def _first_draw(self, slot: int, position: int, step: int) -> int:
        """The slot draws from a chunk and will decode from the next step on."""
        update = self._updates[slot]
        assert update is not None
        left = self.lengths[update.seed] - 1 - (position - update.num_prompt_tokens)
        self._end_at[slot] = step + left
        self._behind[slot] = position - step
        return END if left == 0 else TOKEN


class Simulator:
    """One machine, one policy. `now` is the virtual clock; `run` replays a trace, `step` moves to the next event."""

    def __init__(
        self,
        machine: Machine,
        *,
        policy: str | Policy = "fair",
        preemption: Preemption = "auto",
        prefix_caching: bool = True,
        max_queue: int = 10_000,
    ) -> None:
        self.machine = machine
        self.now = 0.0
        self.report = Report(policy if isinstance(policy, str) else type(policy).__name__)
        blocks = BlockManager(
            machine.num_gpu_blocks, machine.num_cpu_blocks, machine.block_size, prefix_caching=prefix_caching
        )
        self.scheduler = Scheduler(
            blocks=blocks,
            policy=load_policy(policy) if isinstance(policy, str) else policy,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_model_len=machine.max_model_len,
            depth=machine.depth,
            preemption=CostModel(
                preemption,
                block_size=machine.block_size,
                block_bytes=machine.block_bytes,
                copy_rate=machine.copy_rate,
            ),
        )
        self._limits = Limits(
            max_model_len=machine.max_model_len,
            num_blocks=machine.num_gpu_blocks,
            block_size=machine.block_size,
            vocab_size=VOCABULARY,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_queue=max_queue,
        )
        self._model = SimulatedModel(machine)
        self._arrivals: deque[TraceRequest] = deque()
        self._in_flight: deque[tuple[StepResult, float]] = deque()  # and when it is there
        self._busy_until = 0.0
        self._num_added = 0
        self._prefixes: dict[str, int] = {}
        self._params: dict[tuple[int, int | None], SamplingParams] = {}

    def run(self, trace: Iterable[TraceRequest], until: float = float("inf")) -> Report:
        """Replays the trace, which is in order of arrival, to its end or to that time."""
        self._arrivals.extend(trace)
        while self.now < until and self.step():
            pass
        self.report.close(self.now, self.scheduler)
        return self.report

    def step(self) -> bool:
        """Fills the pipeline, then moves the clock to the next result, or to the next arrival or deadline where
        nothing is in flight. False once all is done."""
        self._arrive()
        self._submit_ahead()
        if self._in_flight:
            result, end = self._in_flight.popleft()
            self.now = end
            self._arrive()
            self._take(self.scheduler.commit(result, end))
            return True
        if events := self.scheduler.take_events():
            self._take(events)
            return True
        times = [self._arrivals[0].arrival] if self._arrivals else []
        if (deadline := self.scheduler.next_deadline()) is not None:
            times.append(deadline)
        if not times:
            if self.scheduler.num_unfinished:
                raise RuntimeError(f"{self.scheduler.num_unfinished} requests wait and nothing is planned")
            return False
        self.now = max(self.now, min(times))
        return True

    def _submit_ahead(self) -> None:
        while len(self._in_flight) < self.machine.depth:
            plan = self.scheduler.schedule(self.now)
            if plan is None:
                return
            result = self._model.launch(plan)
            self._busy_until = max(self._busy_until, self.now) + result.timings.compute
            self._in_flight.append((result, self._busy_until))
            self.report.num_steps += 1
            self.report.most_blocks = max(self.report.most_blocks, self.scheduler.blocks.num_used)

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].arrival <= self.now:
            traced = self._arrivals.popleft()
            try:
                request = self._admit(traced)
            except AserveError as error:
                self.report.refuse(traced.tenant, error)
                continue
            self._model.lengths[request.seed] = traced.output
            self.scheduler.add(request)
            self.report.arrive(request)

    def _admit(self, traced: TraceRequest) -> Request:
        number = self._num_added
        self._num_added += 1
        params = self._params.get((traced.n, traced.max_tokens))
        if params is None:
            params = self._params[traced.n, traced.max_tokens] = SamplingParams(
                n=traced.n, max_tokens=traced.max_tokens
            )
        prompt = (FIRST_ID + 2 * number,) * (traced.prompt - traced.prefix_tokens)
        if traced.prefix is not None:
            prefix = self._prefixes.setdefault(traced.prefix, len(self._prefixes))
            prompt = (FIRST_ID + 2 * prefix + 1,) * traced.prefix_tokens + prompt
        load = self.scheduler.load(traced.tenant, traced.priority)
        max_tokens = admit(prompt, params, self._limits, load, patience=traced.first_token_deadline)
        arrival = traced.arrival
        request = Request(
            id=number,
            key="",
            prompt=prompt,
            params=params,
            seed=number,
            max_tokens=max_tokens,
            arrival=arrival,
            end_token_ids=(END,),
            deadline=None if traced.deadline is None else arrival + traced.deadline,
            first_token_deadline=None if traced.first_token_deadline is None else arrival + traced.first_token_deadline,
            priority=traced.priority,
            tenant=traced.tenant,
        )
        request.sequences = [Sequence(request, index) for index in range(traced.n)]
        return request

    def _take(self, events: list[Event]) -> None:
        self.report.num_output_tokens += len(events)
        for event in events:
            if event.finish_reason is not None:
                if event.token_id is None:
                    self.report.num_output_tokens -= 1
                request = event.sequence.request
                if request.finished and self._model.lengths.pop(request.seed, None) is not None:
                    self.report.end(request, self.now)
