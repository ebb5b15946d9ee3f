"""Whatever arrives, leaves or fails, and however small the pool: outputs equal the solo run and nothing is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from aserve.admission import Limits, admit
from aserve.errors import AserveError
from aserve.executors import StepError
from aserve.plan import StepPlan
from aserve.request import Phase, Request, SamplingParams, Sequence
from tests.driver import Driver
from tests.fakes import make_request

PREFIX = tuple(range(10, 40))  # prompts begin with a part of it, so that prefixes are shared


def unfinished(driver: Driver) -> list[Sequence]:
    return [each for request in driver.requests for each in request.sequences if each.phase is not Phase.FINISHED]


def add_request(driver: Driver, prompt: tuple[int, ...], params: SamplingParams, **options: Any) -> bool:
    """Adds it where admission lets it in."""
    info = driver.runner.info
    limits = Limits(
        max_model_len=info.max_model_len,
        num_blocks=info.num_gpu_blocks,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
        max_num_seqs=driver.scheduler.max_num_seqs,
    )
    try:
        max_tokens = admit(prompt, params, limits)
    except AserveError:
        return False
    driver.add(make_request(prompt, params, max_tokens=max_tokens, arrival=driver.now, **options))
    return True


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        num_gpu_blocks=st.integers(4, 24),
        num_cpu_blocks=st.sampled_from([0, 3, 40]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([3, 8, 64]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        prefix_caching=st.booleans(),
        eos_chance=st.sampled_from([0.0, 0.1]),
    )
    def start(self, **options: Any) -> None:
        self.driver = Driver(max_model_len=64, **options)
        self.paused: list[Request] = []
        self.failures: list[str] = []  # whose fault the next steps' failures are
        self.driver.runner.before_step = self.maybe_fail

    def maybe_fail(self, plan: StepPlan) -> None:
        if self.failures == ["copy"] and not (plan.swap_out or plan.swap_in or plan.copies):
            return
        if self.failures:
            slots = {"one": plan.draws[:1], "all": (), "none": (99,), "copy": ()}[self.failures.pop()]
            raise StepError("the step failed", slots)

    @rule(
        shared=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(10, 999), min_size=1, max_size=6),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        beams=st.sampled_from([None, None, 1, 2, 3]),
        early_stopping=st.sampled_from([False, True, "never"]),
        max_tokens=st.sampled_from([None, 0, 1, 2, 7, 20]),
        seed=st.integers(0, 3),
        min_tokens=st.sampled_from([0, 0, 3]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        salt=st.sampled_from([None, None, "x"]),
        deadline=st.sampled_from([None, None, None, 3.0, 12.0]),
        first_token_deadline=st.sampled_from([None, None, None, 2.0]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        n: int,
        beams: int | None,
        early_stopping: Any,
        max_tokens: int | None,
        seed: int,
        min_tokens: int,
        priority: int,
        tenant: str,
        salt: str | None,
        deadline: float | None,
        first_token_deadline: float | None,
    ) -> None:
        now = self.driver.now
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        params = SamplingParams(temperature=1.0, n=n, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)
        if beams is not None and max_tokens != 0:
            params = replace(
                params, n=min(n, beams), best_of=beams, use_beam_search=True, early_stopping=early_stopping
            )
        add_request(
            self.driver,
            (*PREFIX[:shared], *own),
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=salt,
            deadline=None if deadline is None else now + deadline,
            first_token_deadline=None if first_token_deadline is None else now + first_token_deadline,
        )

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @precondition(lambda self: bool(self.driver.in_flight))
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @precondition(lambda self: bool(unfinished(self.driver)))
    @rule(pick=st.integers(0, 100))
    def change_pace(self, pick: int) -> None:
        left = unfinished(self.driver)
        request = left[pick % len(left)].request
        if request in self.paused:
            self.paused.remove(request)
            self.driver.scheduler.pause(request, paused=False)
        else:
            self.paused.append(request)
            self.driver.scheduler.pause(request, paused=True)

    @precondition(lambda self: bool(unfinished(self.driver)))
    @rule(pick=st.integers(0, 100))
    def leave_or_return(self, pick: int) -> None:
        left = unfinished(self.driver)
        request = left[pick % len(left)].request
        request.detached = not request.detached

    @precondition(lambda self: bool(unfinished(self.driver)))
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        left = unfinished(self.driver)
        self.driver.scheduler.cancel(left[pick % len(left)].request, "cancelled")

    @rule(pick=st.integers(0, 100))
    def find_stop_string(self, pick: int) -> None:
        left = [each for each in unfinished(self.driver) if each.output and each.request.beams is None]
        if left:
            self.driver.finish(left[pick % len(left)])

    @rule(fault=st.sampled_from(["one", "none", "all", "copy"]))
    def fail_next_step(self, fault: str) -> None:
        self.failures.append(fault)

    @precondition(lambda self: len(self.driver.in_flight) < self.driver.depth < 3)
    @rule(pick=st.integers(0, 100))
    def preempt(self, pick: int) -> None:
        """Whoever it is, whatever of it is in flight; and as ever, nobody comes in with the same plan."""
        scheduler = self.driver.scheduler
        running = list(scheduler._batch.groups)
        if running:
            scheduler._preempt(running[pick % len(running)], "memory")
            self.driver.check()
            with mock.patch.object(scheduler, "_admit"):
                self.driver.launch()

    @precondition(lambda self: self.driver.scheduler.num_running > 0)
    @rule(slot=st.integers(0, 5))
    def break_slot(self, slot: int) -> None:
        self.driver.runner.bad_slots ^= {slot}

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.failures.clear()
            for request in self.paused:
                self.driver.scheduler.pause(request, paused=False)
            self.driver.run()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("num_cpu_blocks", [6, 60])
def test_a_pool_under_pressure_changes_no_output(depth: int, preemption: Any, num_cpu_blocks: int) -> None:
    preemptions = swaps = 0
    for seed in range(12):
        rng = random.Random(seed)
        driver = Driver(
            depth=depth,
            num_gpu_blocks=rng.randint(16, 24),
            num_cpu_blocks=num_cpu_blocks,
            preemption=preemption,
            prefix_caching=rng.random() < 0.7,
            max_num_batched_tokens=rng.choice([8, 16, 64]),
        )
        for _ in range(10):
            prompt = (*PREFIX[: rng.randint(0, 6)], *(rng.randrange(10, 999) for _ in range(rng.randint(1, 5))))
            params = SamplingParams(temperature=1.0, seed=rng.randrange(9), n=rng.choice([1, 1, 3]), max_tokens=30)
            if rng.random() < 0.3:
                params = replace(params, best_of=3, use_beam_search=True)
            if not add_request(driver, prompt, params, priority=rng.choice([0, 0, 1])):
                add_request(driver, prompt, SamplingParams(temperature=1.0, max_tokens=30, seed=1))
            for _ in range(rng.randint(0, 3)):
                driver.step()
        driver.run()
        preemptions += driver.scheduler.stats().num_preemptions
        swaps += driver.scheduler.stats().num_swaps
    assert preemptions > 50
    assert (swaps > 10) == (preemption == "swap")
