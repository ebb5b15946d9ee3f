"""Overload: three times what a machine with memory for all slots can serve, on pools of a part of what they need.

    python docs/benchmarks/overload.py [PRESET ...] [--seconds 300] [--policy fair] [--seed 0]

The chat workload in the simulator, so every run prints the same. "All slots" is the throughput with a pool that never
runs out; "bound" what no scheduler can exceed in the work that was done, swaps for nothing; "oracle" knows all lengths
and preempts nobody (aserve/simulation/bound.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence

from aserve.bench.workload import lengths
from aserve.simulation.bound import Oracle, least_seconds
from aserve.simulation.machine import PRESETS, Machine
from aserve.simulation.report import Report
from aserve.simulation.simulator import Simulator
from aserve.simulation.trace import TraceRequest

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
EVERYTHING = 10**6  # blocks


def chats(rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """The chat workload, at random times, of four tenants."""
    draw = random.Random(seed)  # nosec B311 # no secret
    now, trace = 0.0, []
    for prompt, output in lengths(round(rate * seconds), seed):
        now += draw.expovariate(rate)
        trace.append(TraceRequest(now, prompt, output, tenant=str(draw.randrange(4))))
    return trace


def serve(machine: Machine, trace: Sequence[TraceRequest], seconds: float, policy: str) -> Report:
    """What the scheduler makes of it."""
    return Simulator(machine, policy=policy, max_queue=10**9).run(trace, until=seconds)


def measure(machine: Machine, seconds: float, policy: str, seed: int) -> None:
    """Prints the table of one machine."""
    large = dataclasses.replace(machine, num_gpu_blocks=EVERYTHING)
    burst = [request._replace(arrival=0.0) for request in chats(100.0 * machine.max_num_seqs / seconds, seconds, seed)]
    full = serve(large, burst, seconds, policy)  # to its end, or as long as the load will last
    capacity = full.outcomes["finished"] / full.seconds
    trace = chats(3 * capacity, seconds, seed)
    best = serve(large, trace, seconds, policy)
    print(f"{capacity:.2f} requests/s, {best.throughput:.0f} tokens/s, {best.most_blocks} blocks; {len(trace)} come")
    print(
        "share  blocks  tokens/s  of all slots  bound  oracle  of bound  of oracle  preemptions per request  of those"
    )
    for share in SHARES:
        pool = dataclasses.replace(machine, num_gpu_blocks=round(share * best.most_blocks))
        report = serve(pool, trace, seconds, policy)
        found = report.throughput
        bound = found * report.seconds / least_seconds(pool, report.served)
        oracle = Oracle(pool).run(trace, until=seconds)
        count = report.num_preemptions["memory"] + report.num_preemptions["fairness"]
        print(
            f"{share:5.2f} {pool.num_gpu_blocks:7} {found:9.1f} {found / best.throughput:13.3f} "
            f"{bound / best.throughput:6.3f} {oracle / best.throughput:7.3f} {found / bound:9.3f} "
            f"{found / oracle:10.3f} {count / len(report.served):24.2f} "
            f"{count / max(1, report.num_preempted_sequences):9.2f}",
            flush=True,
        )


def main() -> None:
    """Measures the machines that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["cpu-gemma-270m", "h200-llama-8b"])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--policy", default="fair")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.presets:
        print(f"{name}, {args.policy}: ", end="", flush=True)
        measure(PRESETS[name], args.seconds, args.policy, args.seed)


if __name__ == "__main__":
    main()
