"""What one scheduler step costs on one core: schedule() + commit() of a steady decode batch, and of one that changes.

    python docs/benchmarks/schedule_cost.py

Prints microseconds per step (median and p99) by running sequences and waiting requests, without a model: results are
made up, one token per draw. It must stay flat in the number waiting. Processor time; garbage collection stays on.
"""

from __future__ import annotations

import itertools
import statistics
import time

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


def changing(num_running: int, num_waiting: int) -> list[float]:
    """Seconds of steps in which about two requests arrive, two start and two end, of 100 tenants, under `fair`."""
    output = num_running // 2
    blocks = BlockManager(num_running * ((PROMPT + 16 + output) // 16 + 2), 0, 16)
    scheduler = Scheduler(
        blocks=blocks,
        policy=load_policy("fair"),
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        max_model_len=4096,
    )
    numbers = itertools.count()

    def arrive(length: int) -> None:
        number = next(numbers)
        request = Request(
            id=number,
            key="",
            prompt=tuple(range(number % 5000, number % 5000 + PROMPT + number % 16)),
            params=params[length],
            seed=0,
            max_tokens=length,
            arrival=float(number),
            end_token_ids=(1,),
            tenant=str(number % 100),
        )
        request.sequences = [Sequence(request, 0)]
        scheduler.add(request)

    params = {n: SamplingParams(temperature=0.0, max_tokens=n) for n in range(1, output + 1)}
    for number in range(num_running):
        arrive(1 + number * output // num_running)
    for _ in range(num_waiting):
        arrive(output)
    times = []
    for _ in range(STEPS):
        arrive(output)
        arrive(output)
        times.append(step(scheduler))
    return sorted(times[STEPS // 5 :])


def main() -> None:
    """Prints the tables."""
    print("policy  running  waiting  median us  p99 us")
    for policy in ("fcfs", "fair"):
        for num_running in (1, 64, 256):
            for num_waiting in (10, 100_000):
                scheduler = build(num_running, num_waiting, policy)
                for _ in range(50):
                    step(scheduler)
                times = sorted(step(scheduler) for _ in range(STEPS))
                median, p99 = statistics.median(times), times[int(len(times) * 0.99)]
                print(f"{policy:6} {num_running:8} {num_waiting:8} {median * 1e6:10.1f} {p99 * 1e6:7.1f}")
    print("changing: running  waiting  median us  p99 us")
    for num_waiting in (10, 100_000):
        times = changing(256, num_waiting)
        median, p99 = statistics.median(times), times[int(len(times) * 0.99)]
        print(f"{256:17} {num_waiting:8} {median * 1e6:10.1f} {p99 * 1e6:7.1f}")


if __name__ == "__main__":
    main()
