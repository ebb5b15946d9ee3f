"""Walks of thousands of steps over the rules of test_scheduler_properties: what only a long life of a scheduler shows.

Hypothesis keeps its examples short, so these are drawn by a plain generator. Invariants are checked after every step,
and at the end every sequence has ended once, with its solo output or a beginning of it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from aserve.request import Phase, Request
from aserve.waiting import rank_of
from tests.test_scheduler_properties import PREFIX, SchedulerMachine, unfinished

STEPS = 5000
MAX_LIVE = 24  # requests: more are added only once some have ended, so that a bounded wait can be asked for
MAX_STILL = 40  # actions that the first in rank of those that run may go without progress
MAX_WAIT = 2500  # steps


class Walk:
    """One scheduler and what is done to it. `rng` decides everything."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.machine: Any = SchedulerMachine()
        self.machine.start(
            depth=rng.choice([1, 2, 3]),
            num_gpu_blocks=rng.randint(5, 16),
            num_cpu_blocks=rng.choice([0, 3, 40]),
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.choice([3, 8, 64]),
            policy=rng.choice(["fcfs", "priority", "fair"]),
            preemption=rng.choice(["auto", "swap", "recompute"]),
            prefix_caching=rng.random() < 0.5,
            eos_chance=rng.choice([0.0, 0.1]),
        )
        self.driver = self.machine.driver
        self.num_steps = 0
        self.checked = 0  # requests of the driver's list that were dropped after their check
        self.born: dict[Request, int] = {}

    def act(self) -> None:
        """One thing happens."""
        rng, machine = self.rng, self.machine
        left = unfinished(self.driver)
        name = rng.choices(
            ["add", "step", "launch", "collect", "pace", "leave", "cancel", "stop", "fail", "bad", "wait"],
            [24, 40, 8, 8, 3, 2, 2, 2, 1, 1, 1],
        )[0]
        if name == "add" and len({each.request for each in left}) < MAX_LIVE:
            self.add()
        elif name == "step":
            machine.step(1)
        elif name == "launch":
            machine.launch()
        elif name == "collect" and self.driver.in_flight:
            machine.collect()
        elif name == "fail":
            machine.fail_next_step(rng.choice(["one", "none", "all"]))
        elif name == "bad" and self.driver.scheduler.num_running:
            machine.break_slot(rng.randrange(6))
            self.driver.step()
            self.driver.runner.bad_slots.clear()
        elif name == "wait":
            machine.wait(rng.choice([0.5, 5.0]))
        elif left:
            pick = rng.randrange(len(left))
            if name == "pace":
                machine.change_pace(pick)
            elif name == "leave":
                machine.leave_or_return(pick)
            elif name == "cancel":
                machine.cancel(pick)
            elif name == "stop" and any(each.output for each in left):
                machine.find_stop_string(pick)

    def add(self) -> None:
        """A request like those of the machine's rule."""
        rng = self.rng
        self.machine.add(
            shared=rng.randint(0, len(PREFIX)),
            own=[rng.randrange(10, 1000) for _ in range(rng.randint(1, 6))],
            n=rng.choice([1, 1, 1, 2, 3]),
            beams=rng.choice([None, None, None, 1, 2, 3]),
            early_stopping=rng.choice([False, True, "never"]),
            max_tokens=rng.choice([None, 0, 2, 7, 20, 20]),
            seed=rng.randrange(4),
            min_tokens=rng.choice([0, 0, 3]),
            priority=rng.randrange(3),
            tenant=rng.choice("abc"),
            salt=rng.choice([None, None, "x"]),
            deadline=rng.choice([None, None, None, 30.0, 120.0]),
            first_token_deadline=rng.choice([None, None, None, 20.0]),
        )
        for request in self.driver.requests[len(self.born) :]:
            self.born[request] = self.num_steps

    def first_in_rank(self) -> Request | None:
        running = {each.request for each in unfinished(self.driver) if each.phase is Phase.RUNNING}
        return min(running, key=rank_of, default=None)


def walk(seed: int, steps: int = STEPS) -> tuple[int, int, int]:
    """Walks, checks, and returns the numbers of requests, preemptions and the longest wait for a first step."""
    this = Walk(seed)
    still, before = 0, None
    waits: dict[Request, int] = {}
    for this.num_steps in range(steps):
        this.act()
        first = this.first_in_rank()
        position = None if first is None else (first, [(each.num_computed, each.phase) for each in first.sequences])
        still = still + 1 if position is not None and position == before else 0
        before = position
        assert still <= MAX_STILL, "the first in rank stands still"
        for request in list(this.born.keys() - waits.keys()):
            if request.first_scheduled is not None or request.finished:
                waits[request] = this.num_steps - this.born[request]
    this.machine.teardown()
    num_ends = sum(len(request.sequences) for request in this.driver.requests)
    assert len(this.driver.ends) == num_ends
    assert max(waits.values(), default=0) <= MAX_WAIT
    return len(this.driver.requests), this.driver.scheduler.stats().num_preemptions, max(waits.values(), default=0)


def test_a_walk_of_a_thousand_steps_loses_nothing() -> None:
    walk(0, 1000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_walks_of_five_thousand_steps_lose_nothing(walks: int) -> None:
    requests = preemptions = longest = 0
    for seed in range(1, walks + 1):
        added, preempted, wait = walk(seed)
        requests, preemptions, longest = requests + added, preemptions + preempted, max(longest, wait)
    print(f"{walks} walks of {STEPS}: {requests} requests, {preemptions} preemptions, longest wait {longest} steps")
    assert preemptions > 10 * walks
