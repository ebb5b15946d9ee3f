"""What a machine could do at best, and how near the scheduler comes to it where memory is short."""

from __future__ import annotations

import dataclasses

import pytest

from aserve.errors import ConfigError
from aserve.simulation.bound import Oracle, Served, least_seconds
from aserve.simulation.machine import PRESETS
from aserve.simulation.simulator import Simulator
from aserve.simulation.trace import Load, TraceRequest, generate

CPU = PRESETS["cpu-gemma-270m"]


def test_one_request_alone_takes_its_steps() -> None:
    oracle = Oracle(CPU)
    throughput = oracle.run([TraceRequest(0.0, 40, 3)])
    steps = [CPU.step_seconds(40, 40, 40 * 20, 0), *(CPU.step_seconds(1, at, 0, 0) for at in (41, 42))]
    assert oracle.num_steps == 3
    assert oracle.now == pytest.approx(sum(steps))
    assert throughput == pytest.approx(3 / oracle.now)
    assert least_seconds(CPU, [Served(40, 3)]) <= oracle.now


def test_the_oracle_waits_for_memory_and_preempts_nobody() -> None:
    pool = dataclasses.replace(CPU, num_gpu_blocks=4)
    trace = [TraceRequest(0.0, 32, 17)] * 2  # three blocks each at their ends
    one, two = Oracle(CPU), Oracle(pool)
    one.run(trace)
    two.run(trace)
    assert one.num_steps == 17
    assert 17 < two.num_steps <= 34
    with pytest.raises(ConfigError, match="does not fit"):
        Oracle(pool).run([TraceRequest(0.0, 64, 17)])


@pytest.mark.parametrize(("num_blocks", "of_bound"), [(150, 0.85), (400, 0.95), (700, 0.95)])
def test_an_overload_comes_near_an_oracle_that_knows_every_length(num_blocks: int, of_bound: float) -> None:
    pool = dataclasses.replace(CPU, num_gpu_blocks=num_blocks)
    trace = list(generate("poisson", Load(rate=4.0, n=240, prompt=100, output=200, tenants=4)))
    report = Simulator(pool, max_queue=10**9).run(trace, until=60.0)
    assert report.num_preemptions["memory"] > 0
    assert report.throughput >= 0.95 * Oracle(pool).run(trace, until=60.0)
    least = least_seconds(pool, report.served)
    assert of_bound * report.seconds <= least <= report.seconds
