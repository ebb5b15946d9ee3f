"""What one scheduler step costs on one core: schedule() + commit() of a steady decode batch, and of one that changes.

    python docs/benchmarks/schedule_cost.py

Prints microseconds per step (median and p99) by running sequences and waiting requests, without a model: results are
made up, one token per draw. It must stay flat in the number waiting: both lengths of the queue take turns, so that they
meet the same machine. Processor time; garbage collection stays on.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

from aserve.block_manager import BlockManager
from aserve.plan import StepResult
from aserve.policy import load_policy
from aserve.request import Request, SamplingParams, Sequence
from aserve.scheduler import Scheduler

STEPS = 1000
PROMPT = 64


def build(num_running: int, num_waiting: int, policy: str) -> Scheduler:
    """A scheduler with `num_running` sequences decoding and the rest waiting for a slot."""
    length = PROMPT + 16 + 4 * STEPS
    scheduler = Scheduler(
        blocks=BlockManager(num_running * (length // 16 + 1), 0, 16),
        policy=load_policy(policy),
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        max_model_len=length,
        depth=1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=4 * STEPS)
    for number in range(num_running + num_waiting):
        request = Request(
            id=number,
            key="",
            prompt=tuple(range(number, number + PROMPT + number % 16)),  # blocks fill at different steps
            params=params,
            seed=0,
            max_tokens=4 * STEPS,
            arrival=float(number),
            end_token_ids=(1,),
            tenant=str(number % 100),
        )
        request.sequences = [Sequence(request, 0)]
        scheduler.add(request)
    while scheduler.num_running < num_running:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Seconds of the processor that one schedule and commit take: a busy machine does not count."""
    start = time.thread_time()
    plan = scheduler.schedule(0.0)
    middle = time.thread_time()
    assert plan is not None
    result = StepResult(plan.number, [7] * len(plan.draws))
    resume = time.thread_time()
    scheduler.commit(result, 0.0)
    return time.thread_time() - resume + middle - start


class Changing:
    """A full batch in which about two requests arrive, two start and two end in each step, of 100 tenants."""

    def __init__(self, num_running: int, num_waiting: int, policy: str) -> None:
        self.output = num_running // 2
        self.params = {n: SamplingParams(temperature=0.0, max_tokens=n) for n in range(1, self.output + 1)}
        self.numbers = itertools.count()
        self.scheduler = Scheduler(
            blocks=BlockManager(num_running * ((PROMPT + 16 + self.output) // 16 + 2), 0, 16),
            policy=load_policy(policy),
            max_num_seqs=num_running,
            max_num_batched_tokens=8192,
            max_model_len=4096,
        )
        for number in range(num_running):
            self.arrive(1 + number * self.output // num_running)
        for _ in range(num_waiting):
            self.arrive(self.output)

    def arrive(self, length: int) -> None:
        """A request for `length` tokens."""
        number = next(self.numbers)
        request = Request(
            id=number,
            key="",
            prompt=tuple(range(number % 5000, number % 5000 + PROMPT + number % 16)),
            params=self.params[length],
            seed=0,
            max_tokens=length,
            arrival=float(number),
            end_token_ids=(1,),
            tenant=str(number % 100),
        )
        request.sequences = [Sequence(request, 0)]
        self.scheduler.add(request)

    def step(self) -> float:
        """Seconds of one step."""
        self.arrive(self.output)
        self.arrive(self.output)
        return step(self.scheduler)


def take_turns(steps: Iterable[Callable[[], float]]) -> list[list[float]]:
    """Sorted times of STEPS steps of each, in turns of 50; the first ones of a turn find the caches cold."""
    times: list[tuple[Callable[[], float], list[float]]] = [(each, []) for each in steps]
    for _ in range(STEPS // 50):
        for each, found in times:
            found += [each() for _ in range(60)][10:]
    return [sorted(found) for _, found in times]


def show(head: str, times: list[float]) -> None:
    """A line of a table."""
    print(f"{head} {statistics.median(times) * 1e6:10.1f} {times[int(len(times) * 0.99)] * 1e6:7.1f}")


def main() -> None:
    """Prints the tables."""
    waiting = (10, 100_000)
    print("policy  running  waiting  median us  p99 us")
    for policy in ("fcfs", "fair"):
        for num_running in (1, 64, 256):
            steady = [partial(step, build(num_running, each, policy)) for each in waiting]
            for each, times in zip(waiting, take_turns(steady), strict=True):
                show(f"{policy:6} {num_running:8} {each:8}", times)
    print("changing:")
    for policy in ("fcfs", "fair"):
        batches = [Changing(256, each, policy).step for each in waiting]
        for go in batches:
            for _ in range(STEPS // 5):
                go()
        for each, times in zip(waiting, take_turns(batches), strict=True):
            show(f"{policy:6} {256:8} {each:8}", times)


if __name__ == "__main__":
    main()
