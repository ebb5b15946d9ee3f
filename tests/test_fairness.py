"""What tenants and requests are promised under load, shown with the real scheduler in the simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from aserve.policy import FairPolicy, Policy
from aserve.request import Phase, Request
from aserve.simulation.machine import PRESETS, Machine
from aserve.simulation.report import Report, Tenant, quantile
from aserve.simulation.simulator import Simulator
from aserve.simulation.trace import Load, TraceRequest, generate
from aserve.waiting import rank_of

H200, CPU = PRESETS["h200-llama-8b"], PRESETS["cpu-gemma-270m"]


def load(kind: str, **options: object) -> list[TraceRequest]:
    return list(generate(kind, Load(**options)))  # type: ignore[arg-type]


def merged(*loads: list[TraceRequest]) -> list[TraceRequest]:
    return sorted((request for each in loads for request in each), key=lambda request: request.arrival)


def p99(tenant: Tenant) -> float:
    return quantile(sorted(tenant.first_token), 0.99)


def full_step(machine: Machine) -> float:
    """Seconds of a step that uses the whole token budget over a batch of mean context 512."""
    return machine.step_seconds(machine.max_num_batched_tokens, machine.max_num_seqs * 512, 0.0, 0)


# a flood of one tenant beside another

FLOODED = {
    "slots are short": (dataclasses.replace(H200, max_num_seqs=64), 256, 400),
    "memory is short": (dataclasses.replace(H200, num_gpu_blocks=1600), 256, 400),
    "one step takes all": (CPU, 32, 32),
    "few slots": (dataclasses.replace(CPU, max_num_seqs=8), 32, 32),
    "few slots, small steps": (dataclasses.replace(CPU, max_num_seqs=8, max_num_batched_tokens=64), 32, 32),
}


def flooded(case: str, policy: str | Policy) -> tuple[Report, float, float]:
    """The report beside a flood, the guest's p99 of time to first token alone, and the bound on it."""
    machine, prompt, output = FLOODED[case]
    guest = load("steady", rate=1.0, n=60, prompt=prompt, output=output, sigma=0.5, tenant="guest")
    flood = load("burst", n=100, start=2.5, prompt=prompt, output=2 * output, sigma=0.5, tenant="flood")
    alone = p99(Simulator(machine).run(guest).tenants["guest"])
    report = Simulator(machine, policy=policy).run(merged(guest, flood))
    return report, alone, 2 * alone + 2 * full_step(machine)


@pytest.mark.parametrize("case", FLOODED)
def test_a_flood_leaves_another_tenants_first_token_within_the_bound(case: str) -> None:
    report, _, bound = flooded(case, "fair")
    assert p99(report.tenants["guest"]) <= bound
    assert report.outcomes == {"finished": 160}
    assert report.preemptions_per_request < 1 and report.most_preemptions <= 4


@pytest.mark.parametrize("case", FLOODED)
def test_without_fairness_the_flood_breaks_it(case: str) -> None:
    report, _, bound = flooded(case, "fcfs")
    assert p99(report.tenants["guest"]) > 4 * bound


def test_waiting_order_alone_is_not_enough_where_all_slots_are_taken() -> None:
    report, _, bound = flooded("few slots, small steps", FairPolicy(preempt=False))
    assert p99(report.tenants["guest"]) > bound
    assert report.num_preemptions["fairness"] == 0


def test_fairness_costs_the_machine_next_to_nothing() -> None:
    fair, _, _ = flooded("slots are short", "fair")
    fcfs, _, _ = flooded("slots are short", "fcfs")
    assert fair.throughput > 0.98 * fcfs.throughput


def test_tenants_that_all_flood_share_evenly_and_do_not_take_turns_in_vain() -> None:
    trace = merged(*(load("poisson", rate=4.0, n=400, prompt=64, output=64, tenant=name) for name in "abcd"))
    report = Simulator(CPU).run(trace, until=60.0)
    assert report.num_unfinished > 500  # all of them had work left to the end
    assert report.jain_tokens > 0.98
    assert report.num_preemptions["fairness"] < 0.1 * report.outcomes["finished"]


def test_a_tenant_with_long_requests_gets_no_more_tokens() -> None:
    short = load("poisson", rate=10.0, n=600, prompt=64, output=32, tenant="short")
    long = load("poisson", rate=10.0, n=600, prompt=64, output=256, tenant="long")
    fair, fcfs = (Simulator(CPU, policy=policy).run(merged(short, long), until=60.0) for policy in ("fair", "fcfs"))
    assert fair.jain_tokens > 0.98 > fcfs.jain_tokens


# overload


def chats(rate: float, seconds: float) -> list[TraceRequest]:
    """Short prompts and long answers: sequences outgrow the memory they were admitted with."""
    return load("poisson", rate=rate, n=round(rate * seconds), prompt=100, output=300, tenants=4)


def overloaded(machine: Machine, policy: str = "fair", seconds: float = 300.0) -> tuple[Report, Report, Report]:
    """Reports of three times what the machine can serve: on it; on one with a pool that never runs out; and on one
    that besides runs as many sequences at once as the first did on average."""

    def serve(where: Machine, trace: list[TraceRequest]) -> Report:
        return Simulator(where, policy=policy, max_queue=10**9).run(trace, until=seconds)

    every = load("burst", n=machine.max_num_seqs * 60, prompt=100, output=300, tenants=4)
    capacity = serve(machine, every).outcomes["finished"] / seconds
    trace = chats(3 * capacity, seconds)
    small = serve(machine, trace)
    large = dataclasses.replace(machine, num_gpu_blocks=machine.max_num_seqs * 4096 // machine.block_size * 2)
    batch = round(small.num_output_tokens / small.num_steps)
    return small, serve(large, trace), serve(dataclasses.replace(large, max_num_seqs=batch), trace)


def check_overload(machine: Machine, policy: str, share_of_large: float) -> None:
    small, large, same_batch = overloaded(machine, policy)
    assert small.num_unfinished > small.outcomes["finished"]  # it was an overload
    assert small.num_preemptions["memory"] > 10 and not large.num_preemptions["memory"]
    assert small.throughput >= share_of_large * large.throughput
    assert small.throughput >= 0.95 * same_batch.throughput
    assert small.preemptions_per_request <= 0.5
    total = small.num_preemptions["memory"] + small.num_preemptions["fairness"]
    assert total <= 2 * small.num_preempted_sequences  # of those preempted at all


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_an_overload_loses_little_to_preemption(policy: str) -> None:
    check_overload(dataclasses.replace(CPU, num_gpu_blocks=1700), policy, 0.95)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_an_overload_of_a_pool_of_half_the_need_does_not_thrash(policy: str) -> None:
    check_overload(dataclasses.replace(CPU, num_gpu_blocks=900), policy, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize(("num_blocks", "share"), [(1700, 0.95), (1200, 0.9), (900, 0.8), (600, 0.7)])
def test_an_overload_costs_no_more_than_the_smaller_batch_whatever_pool_and_policy(
    policy: str, num_blocks: int, share: float
) -> None:
    check_overload(dataclasses.replace(CPU, num_gpu_blocks=num_blocks), policy, share)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_blocks", "share"), [(8300, 0.95), (5000, 0.0)])
def test_an_overload_of_a_large_machine_loses_little_to_preemption(num_blocks: int, share: float) -> None:
    check_overload(dataclasses.replace(H200, num_gpu_blocks=num_blocks), "fair", share)


# no starvation


class Watched(Simulator):
    """Counts steps from arrival to first token, and sees that the first in rank of those that run moves on."""

    def __init__(self, machine: Machine, **options: object) -> None:
        super().__init__(machine, **options)  # type: ignore[arg-type]
        self.added: dict[Request, int] = {}
        self.waits: dict[Request, int] = {}
        self.ends = 0
        add, commit = self.scheduler.add, self.scheduler.commit

        def count_add(request: Request) -> None:
            self.added[request] = self.report.num_steps
            add(request)

        def count_commit(*args: object) -> object:
            events = commit(*args)  # type: ignore[arg-type]
            for event in events:
                request = event.sequence.request
                self.waits.setdefault(request, self.report.num_steps - self.added[request])
                self.ends += event.finish_reason is not None
            return events

        self.scheduler.add = count_add  # type: ignore[method-assign]
        self.scheduler.commit = count_commit  # type: ignore[method-assign,assignment]

    def steps(self, trace: list[TraceRequest], until: float = float("inf")) -> Iterator[None]:
        self._arrivals.extend(trace)
        while self.now < until and self.step():
            yield


def running(simulator: Watched) -> list[Request]:
    return [
        request for request in simulator.added if any(sequence.phase is Phase.RUNNING for sequence in request.sequences)
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("num_blocks", [3640, 120])
def test_under_a_load_it_can_serve_every_wait_is_bounded_in_steps(policy: str, num_blocks: int) -> None:
    machine = dataclasses.replace(CPU, num_gpu_blocks=num_blocks, num_cpu_blocks=100, max_num_seqs=16)
    tenants = (
        load("poisson", rate=1.7, n=510, prompt=48, output=24, tenant="steady", longest=400),
        load("poisson", rate=1.0, n=300, prompt=48, output=24, tenant="low", priority=2, longest=400),
        load("burst", n=80, start=20.0, prompt=64, output=48, tenant="bursts", longest=400),
        load("steady", rate=0.3, n=90, prompt=32, output=16, tenant="wide", choices=4, longest=400),
    )
    simulator = Watched(machine, policy=policy)
    trace = merged(*tenants)
    for _ in simulator.steps(trace):
        pass
    assert len(simulator.waits) == len(trace)
    assert simulator.ends == sum(request.n for request in trace)  # each sequence once
    assert max(simulator.waits.values()) <= 1000  # of 5,700; the burst alone is worth 350
    assert simulator.report.outcomes == {"finished": len(trace)}


def test_the_oldest_of_the_highest_priority_always_progresses() -> None:
    machine = dataclasses.replace(CPU, num_gpu_blocks=120, num_cpu_blocks=40, max_num_seqs=16, depth=2)
    simulator = Watched(machine)
    trace = merged(
        load("poisson", rate=3.0, n=200, prompt=48, output=120, tenants=3, longest=300),
        load("poisson", rate=1.0, n=60, prompt=64, output=48, tenant="low", priority=1, choices=2, longest=300),
    )
    first: Request | None = None
    still = done = 0
    for _ in simulator.steps(trace):
        ranked = min(running(simulator), key=rank_of, default=None)
        progress = 0 if ranked is None else sum(each.num_computed for each in ranked.sequences)
        still = still + 1 if ranked is first and ranked is not None and progress <= done else 0
        if first is not None and first is not ranked:  # it ended, or one of a better rank came in; it was not preempted
            assert first.finished or (ranked is not None and rank_of(ranked) < rank_of(first))
        assert still <= machine.depth
        first, done = ranked, progress
    assert simulator.scheduler.stats().num_preemptions > 50
    assert simulator.report.outcomes == {"finished": len(trace)}


def test_a_low_priority_waits_a_bounded_time_however_much_comes_before_it() -> None:
    low = [TraceRequest(5.0, 32, 8, "low", priority=9)]
    high = load("poisson", rate=20.0, n=2000, prompt=32, output=32, tenant="high")  # several times what it can serve
    simulator = Watched(dataclasses.replace(CPU, max_num_seqs=8), policy=FairPolicy(patience=10.0), max_queue=10**9)
    for _ in simulator.steps(merged(low, high), until=90.0):
        pass
    (request,) = [request for request in simulator.added if request.tenant == "low"]
    assert request.first_token is not None and request.first_token - request.arrival > 10.0
    assert simulator.waits[request] < 1000
    never = Watched(dataclasses.replace(CPU, max_num_seqs=8), policy=FairPolicy(patience=1e9), max_queue=10**9)
    for _ in never.steps(merged(low, high), until=90.0):
        pass
    assert all(request.tenant != "low" for request in never.waits)  # patience it was
