"""Drives a Scheduler against a FakeRunner on a virtual clock, `depth` plans in flight, as the engine's loop would.

Checks after every step what must always hold: invariants, progress, events in order, one end per sequence.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from aserve.block_manager import BlockManager
from aserve.config import Preemption
from aserve.errors import RequestFailedError
from aserve.executors import StepError
from aserve.plan import StepPlan, StepResult
from aserve.policy import Policy, load_policy
from aserve.preemption import CostModel
from aserve.request import FinishReason, Request, SamplingParams, Sequence
from aserve.scheduler import Event, Scheduler
from tests.fakes import FakeRunner


class Driver:
    """One engine loop without asyncio. `outputs` and `ends` are what clients saw."""

    def __init__(
        self,
        *,
        num_gpu_blocks: int = 64,
        num_cpu_blocks: int = 0,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 256,
        depth: int = 1,
        policy: str | Policy = "fcfs",
        preemption: Preemption | CostModel = "auto",
        prefix_caching: bool = True,
        eos_chance: float = 0.0,
        vocab_size: int = 1000,
    ) -> None:
        self.blocks = BlockManager(num_gpu_blocks, num_cpu_blocks, block_size, prefix_caching=prefix_caching)
        self.runner = FakeRunner(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            depth=depth,
            eos_chance=eos_chance,
            vocab_size=vocab_size,
        )
        self.runner.is_cached = self.blocks.is_cached
        self.scheduler = Scheduler(
            blocks=self.blocks,
            policy=load_policy(policy) if isinstance(policy, str) else policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            depth=depth,
            preemption=preemption,
        )
        self.depth = depth
        self.now = 0.0
        self.in_flight: deque[tuple[StepPlan, StepResult | StepError]] = deque()
        self.requests: list[Request] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, FinishReason] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests.append(request)
            for sequence in request.sequences:
                self.outputs[sequence] = []
            self.scheduler.add(request)

    def launch(self) -> StepPlan | None:
        """Plans and launches one step, if there is one and it may be in flight."""
        if len(self.in_flight) >= self.depth:
            return None
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens
            try:
                self.in_flight.append((plan, self.runner.launch(plan)))
            except StepError as error:
                self.in_flight.append((plan, error))
        self.check()
        return plan

    def collect(self) -> list[Event]:
        """Commits the oldest step in flight."""
        plan, result = self.in_flight.popleft()
        if isinstance(result, StepError):
            error = RequestFailedError(str(result))
            events = self.scheduler.fail(plan.number, result.slots, error)
        else:
            events = self.scheduler.commit(result, self.now)
        self.take(events)
        self.check()
        return events

    def step(self) -> list[Event]:
        """Fills the pipeline, then commits one step. Something always moves while work is left."""
        while self.launch() is not None:
            pass
        if self.in_flight:
            events = self.collect()
        else:
            events = self.scheduler.take_events()
            self.take(events)
            left = self.scheduler.num_unfinished - self.scheduler.stats().num_paused
            assert events or not left, "nothing planned, nothing in flight, work left"
        self.now += 1.0
        return events

    def run(self, max_steps: int = 5000) -> None:
        """Steps until every request has ended and nothing is in flight."""
        for _ in range(max_steps):
            if not self.scheduler.num_unfinished and not self.in_flight:
                self.take(self.scheduler.take_events())
                self.check_idle()
                return
            self.step()
        raise AssertionError(f"still not done after {max_steps} steps")

    def finish(self, sequence: Sequence, reason: FinishReason = "stop") -> None:
        """What the engine does on a stop string."""
        if self.scheduler.finish(sequence, reason):
            assert sequence not in self.ends
            self.ends[sequence] = reason

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.sequence not in self.ends, "an event after the end"
            if event.token_id is not None:
                self.outputs[event.sequence].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.sequence] = event.finish_reason

    def expected(self, sequence: Sequence) -> list[int]:
        request = sequence.request
        return self.runner.solo(
            request.prompt,
            request.params,
            seed=request.seed,
            choice=sequence.index,
            max_tokens=request.max_tokens,
        )

    def check_beams(self, request: Request) -> None:
        """Every sequence ended once and shows nothing else than its beam; a search that was not cut found all."""
        reasons = {self.ends[sequence] for sequence in request.sequences}
        outputs = [sequence.output for sequence in request.sequences]
        assert request.beams is not None
        found, shown = request.beams.beams(), request.params.n
        assert outputs[:shown] == [list(beam.token_ids) for beam in found[:shown]] + [[]] * (shown - len(found))
        assert not any(outputs[shown:])
        if reasons <= {"stop", "length"}:
            assert found == self.runner.solo_beams(request), f"{request.id} differs"

    def check(self) -> None:
        self.scheduler.check_invariants()

    def check_idle(self) -> None:
        """Every sequence ended once, with its solo output or a beginning of it; no block is owned."""
        assert self.blocks.num_used == 0 and self.blocks.num_host_free == self.blocks.num_host_blocks
        for request in self.requests:
            if request.beams is not None:
                self.check_beams(request)
                continue
            for sequence in request.sequences:
                output, expected = self.outputs[sequence], self.expected(sequence)
                assert sequence in self.ends, f"sequence {request.id}.{sequence.index} never ended"
                assert output == sequence.output == expected[: len(output)], f"{request.id}.{sequence.index} differs"
                if self.ends[sequence] == "length" or sequence.stop_token is not None:
                    assert output == expected


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def sampled(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **options)


def prompt(length: int, start: int = 10) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def plan_of(driver: Driver) -> StepPlan:
    plan = driver.launch()
    assert plan is not None
    return plan


def fail_once(driver: Driver, *slots: int) -> None:
    def before_step(plan: StepPlan) -> None:
        driver.runner.before_step = None
        raise StepError("out of memory", slots)

    driver.runner.before_step = before_step
