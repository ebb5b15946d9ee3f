from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from aserve.cli import main
from aserve.errors import ConfigError
from aserve.plan import BlockCopy, Chunk, SlotUpdate, StepPlan
from aserve.request import Request, SamplingParams
from aserve.simulation.machine import PRESETS, Machine
from aserve.simulation.report import jain, quantile
from aserve.simulation.simulator import END, TOKEN, SimulatedModel, Simulator
from aserve.simulation.trace import Load, TraceRequest, generate, parse_load, read_trace, write_trace

UNIT = Machine(  # one millisecond a step and one a token: times can be computed by hand
    fixed=1e-3, per_token=1e-3, num_gpu_blocks=64, num_cpu_blocks=64, max_num_seqs=4, max_num_batched_tokens=64
)


def near(value: float, expected: float) -> bool:
    return abs(value - expected) < 1e-9


# traces


def test_a_trace_is_read_in_order_of_arrival() -> None:
    lines = [
        '{"arrival": 2, "prompt": 5, "output": 1}',
        "",
        '{"arrival": 0.5, "prompt": 3, "output": 2, "tenant": "a"}',
    ]
    assert read_trace(lines) == [TraceRequest(0.5, 3, 2, "a"), TraceRequest(2, 5, 1)]


def test_a_written_trace_reads_back_the_same() -> None:
    load = Load(n=20, tenants=2, prefixes=3, prefix_tokens=32, choices=2, deadline=9.0, max_tokens=50)
    trace = list(generate("poisson", load))
    assert read_trace(write_trace(trace)) == trace


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[]", "a JSON object"),
        ("{", "line 1"),
        ('{"arrival": 0, "prompt": 5}', "output missing"),
        ('{"arrival": -1, "prompt": 5, "output": 1}', "arrival"),
        ('{"arrival": 0, "prompt": 0, "output": 1}', "prompt must be at least 1"),
        ('{"arrival": 0, "prompt": 5.5, "output": 1}', "prompt is 5.5"),
        ('{"arrival": 0, "prompt": true, "output": 1}', "prompt is True"),
        ('{"arrival": 0, "prompt": 5, "output": 1, "user": "a"}', "no field 'user'"),
        ('{"arrival": 0, "prompt": 5, "output": 1, "prefix_tokens": 3}', "need a prefix"),
        ('{"arrival": 0, "prompt": 5, "output": 1, "prefix": "p", "prefix_tokens": 6}', "first of the prompt's"),
        ('{"arrival": NaN, "prompt": 5, "output": 1}', "arrival"),
    ],
)
def test_a_mistake_in_a_trace_is_named_with_its_line(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="trace, line 1") as caught:
        read_trace([line])
    assert complaint in caught.value.message


def test_a_generator_gives_the_same_arrivals_each_time_and_others_for_another_seed() -> None:
    first = list(generate("poisson", Load(rate=10.0, n=500)))
    assert first == list(generate("poisson", Load(rate=10.0, n=500)))
    assert first != list(generate("poisson", Load(rate=10.0, n=500, seed=1)))
    assert 40 < first[-1].arrival < 60
    assert first == sorted(first, key=lambda request: request.arrival)


def test_lengths_are_spread_around_their_medians() -> None:
    trace = list(generate("steady", Load(n=2001, prompt=256, output=100, sigma=0.8, longest=1000)))
    prompts = sorted(request.prompt for request in trace)
    assert 220 < prompts[1000] < 300 and prompts[0] < 60 and prompts[-1] == 1000
    assert 85 < sorted(request.output for request in trace)[1000] < 115


def test_steady_and_burst_arrive_as_they_say() -> None:
    load = Load(rate=2.0, n=3, start=1.0, prompt=7, sigma=0.0)
    assert [request.arrival for request in generate("steady", load)] == [1.0, 1.5, 2.0]
    assert [(request.arrival, request.prompt) for request in generate("burst", load)] == [(1.0, 7)] * 3


def test_a_specification_is_parsed() -> None:
    kind, load = parse_load("poisson:rate=2.5,n=10,tenant=a,max_tokens=5,deadline=3")
    assert kind == "poisson" and load == Load(rate=2.5, n=10, tenant="a", max_tokens=5, deadline=3.0)


@pytest.mark.parametrize(
    "text", ["wave:n=1", "poisson:m=1", "poisson:n=many", "poisson:n", "burst:n=0", "steady:rate=0"]
)
def test_a_wrong_specification_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="--generate"):
        parse_load(text)


# the model and its costs


def test_a_step_costs_its_tokens_context_pairs_and_copies() -> None:
    machine = Machine(
        fixed=1.0, per_token=0.1, per_context=0.01, per_pair=0.001, copy_rate=100.0, block_bytes=50, depth=1
    )
    model = SimulatedModel(machine)
    model.lengths[7] = 10
    update = SlotUpdate(0, SamplingParams(), 7, 0, 20)
    result = model.launch(StepPlan(1, chunks=(Chunk(0, 10, (5,) * 10, (0,)),), slots=(update,)))
    # 10 tokens after 10: 20 positions are read, and 10 x 15 pairs
    assert near(result.timings.compute, 1.0 + 10 * 0.1 + 20 * 0.01 + 150 * 0.001)
    copies = (BlockCopy(0, 1), BlockCopy(1, 2))
    result = model.launch(StepPlan(2, decodes=(0,), swap_out=copies, swap_in=copies[:1]))
    assert near(result.timings.compute, 1.0 + 0.1 + 21 * 0.01 + 3 * 0.5)
    result = model.launch(StepPlan(3, decodes=(0,)))
    assert near(result.timings.compute, 1.0 + 0.1 + 22 * 0.01)


def test_a_sequence_draws_its_end_at_its_length_wherever_it_is_resumed() -> None:
    model = SimulatedModel(UNIT)
    model.lengths[3] = 4
    first = (SlotUpdate(1, SamplingParams(), 3, 0, 2),)
    drawn = model.launch(StepPlan(1, chunks=(Chunk(1, 0, (5, 5), (1,)),), slots=first)).tokens
    drawn += model.launch(StepPlan(2, decodes=(1,))).tokens
    again = (SlotUpdate(0, SamplingParams(), 3, 0, 2),)  # preempted, and computed again in another slot
    drawn += model.launch(StepPlan(3, chunks=(Chunk(0, 0, (5, 5, 1, 1), (0,)),), slots=again)).tokens
    drawn += model.launch(StepPlan(4, decodes=(0,))).tokens
    assert drawn == [TOKEN, TOKEN, TOKEN, END]


# the clock


def test_a_request_alone_takes_the_time_that_its_steps_take() -> None:
    report = Simulator(UNIT).run([TraceRequest(5.0, 10, 3)])
    tenant = report.tenants[""]
    assert near(tenant.first_token[0], 11e-3)  # one step of ten tokens
    assert near(tenant.total[0], 11e-3 + 2 * 2e-3)
    assert near(tenant.per_token[0], 2e-3)
    assert near(report.seconds, 5.0 + 15e-3) and report.num_steps == 3
    assert report.outcomes == {"finished": 1} and report.num_output_tokens == 3


def test_an_arrival_during_a_step_waits_for_its_end() -> None:
    report = Simulator(UNIT).run([TraceRequest(0.0, 49, 1, "a"), TraceRequest(0.01, 9, 1, "b")])
    assert near(report.tenants["b"].first_token[0], 0.05 + 0.01 - 0.01)


def test_two_steps_in_flight_overlap_nothing_on_the_device() -> None:
    one = Simulator(UNIT).run([TraceRequest(0.0, 9, 6)])
    two = Simulator(dataclasses.replace(UNIT, depth=2)).run([TraceRequest(0.0, 9, 6)])
    assert near(one.tenants[""].total[0], 0.01 + 5 * 0.002)
    assert near(two.tenants[""].total[0], one.tenants[""].total[0])
    assert two.num_steps == one.num_steps + 1  # its end is known one step late: that step is dropped


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [
        TraceRequest(0.0, 40, 1, prefix="p", prefix_tokens=32),
        TraceRequest(1.0, 40, 1, prefix="p", prefix_tokens=32),
    ]
    report = Simulator(UNIT).run(trace)
    first, second = report.tenants[""].first_token
    assert near(first, 0.041) and near(second, 0.009)
    assert report.prefix_hits == 0.4
    assert Simulator(UNIT, prefix_caching=False).run(trace).prefix_hits == 0.0


def test_choices_share_their_prompt() -> None:
    report = Simulator(UNIT).run([TraceRequest(0.0, 10, 3, n=4)])
    assert near(report.seconds, 0.011 + 2 * 0.005) and report.num_output_tokens == 12
    assert report.outcomes == {"finished": 1}


def test_a_limit_of_tokens_cuts_the_output() -> None:
    report = Simulator(UNIT).run([TraceRequest(0.0, 10, 30, max_tokens=3)])
    assert report.num_output_tokens == 3 and report.outcomes == {"finished": 1}


def test_what_never_fits_is_refused_by_the_real_admission() -> None:
    report = Simulator(UNIT, max_queue=1).run(
        [TraceRequest(0.0, 64 * 16 + 1, 1, "large"), *[TraceRequest(0.0, 10, 1, "many")] * 3]
    )
    assert report.refused == {"ContextLengthError": 1, "OverloadedError": 2}
    assert report.outcomes == {"finished": 1}


def test_a_deadline_ends_what_has_not_begun() -> None:
    blocker = TraceRequest(0.0, 10, 500, n=4)
    late = TraceRequest(0.1, 10, 5, "late", first_token_deadline=0.5)
    cut = TraceRequest(0.0, 10, 500, "cut", deadline=0.2)
    report = Simulator(UNIT, policy="fcfs").run([blocker, late])
    assert report.outcomes == {"finished": 1, "deadline": 1} and not report.tenants["late"].first_token
    report = Simulator(UNIT).run([cut])
    assert report.outcomes == {"deadline": 1} and 50 < report.tenants["cut"].num_output_tokens < 100


def test_the_run_stops_at_the_time_given() -> None:
    report = Simulator(UNIT).run([TraceRequest(0.0, 10, 900)], until=0.5)
    assert 0.5 <= report.seconds < 0.51 and report.num_unfinished == 1
    assert report.num_output_tokens == report.tenants[""].num_output_tokens > 200


def test_the_model_never_decides_what_the_scheduler_would() -> None:
    """Every sequence has its length, whatever pool, policy and preemption did to it."""
    trace = list(generate("poisson", Load(rate=40.0, n=120, prompt=60, output=60, tenants=3, longest=300)))
    seen: dict[int, Request] = {}
    for preemption in ("swap", "recompute", "auto"):
        machine = dataclasses.replace(UNIT, num_gpu_blocks=50, max_num_seqs=16, depth=2, block_bytes=10_000)
        simulator = Simulator(machine, preemption=preemption)  # type: ignore[arg-type]
        add = simulator.scheduler.add

        def record(request: Request, add: Any = add) -> None:
            seen[request.id] = request
            add(request)

        simulator.scheduler.add = record  # type: ignore[method-assign]
        report = simulator.run(trace)
        assert report.num_preemptions["memory"] > 10
        assert (report.num_preemptions["swap"] > 0) == (preemption != "recompute")
        assert report.outcomes == {"finished": 120}
        for request in seen.values():
            assert len(request.sequences[0].output) == trace[request.id].output
        simulator.scheduler.check_invariants()


# the report


def test_quantiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert quantile([3.0], 0.99) == 3.0


def test_jains_index_is_one_for_equals_and_a_share_for_one_who_has_all() -> None:
    assert jain([2.0, 2.0, 2.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([]) == 1.0


# the command


def test_the_command_compares_policies(capsys: pytest.CaptureFixture[str]) -> None:
    load = "burst:n=40,tenant=flood,prompt=32,output=16"
    arguments = ["simulate", "--preset", "cpu-gemma-270m", "--generate", load, "--generate", "steady:n=3,tenant=guest"]
    assert main([*arguments, "--policy", "fcfs", "--policy", "fair"]) == 0
    shown = capsys.readouterr().out
    assert "fcfs" in shown and "fair" in shown and "flood" in shown and "TTFT p99" in shown
    assert main([*arguments, "--policy", "fcfs", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["outcomes"] == {"finished": 43} and set(report["tenants"]) == {"flood", "guest"}
    assert report["tenants"]["flood"]["ttft"]["p50"] > 0


def test_the_command_writes_and_reads_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "trace.jsonl")
    assert main(["simulate", "--generate", "poisson:n=25", "--write-trace", path]) == 0
    assert main(["simulate", "--trace", path, "--json", "--num-gpu-blocks", "600", "--preemption", "swap"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["outcomes"] == {"finished": 25}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--trace", "no/such/file"],
        ["--generate", "poisson:n=1", "--policy", "lifo"],
        ["--generate", "poisson:n=1", "--depth", "0"],
        ["--generate", "poisson:n=1", "--copy-rate", "0"],
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert capsys.readouterr().err.startswith("aserve: error: ")


def test_every_preset_serves() -> None:
    for machine in PRESETS.values():
        report = Simulator(machine).run(generate("poisson", Load(rate=1.0, n=20)))
        assert report.outcomes == {"finished": 20}
