"""`aserve simulate`: replays a trace under each policy asked for and prints the reports side by side, or as JSON.

cli.py registers it. Importing it loads nothing heavy.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import sys
import time
import typing
from collections.abc import Sequence
from typing import Any

from aserve.config import Preemption, flag
from aserve.errors import ConfigError
from aserve.simulation.machine import PRESETS, Machine
from aserve.simulation.report import QUANTILES, Report, quantile
from aserve.simulation.simulator import Simulator
from aserve.simulation.trace import TraceRequest, generate, parse_load, read_trace, write_trace

MAX_TENANTS = 10  # rows of the table by tenant

_MACHINE_HELP = {
    "fixed": "seconds of every step: weights are read, kernels launched",
    "per_token": "seconds per token computed",
    "per_context": "seconds per position of KV read",
    "per_pair": "seconds per token and position before it, within chunks",
    "copy_rate": "bytes a second between the pools",
    "block_bytes": "bytes of a KV block, all layers",
    "block_size": "token slots per block",
    "num_gpu_blocks": "blocks of the device pool",
    "num_cpu_blocks": "blocks of the host pool",
    "max_model_len": "context in tokens",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "tokens one step computes at most",
    "depth": "steps in flight",
}


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser of `aserve simulate`."""
    text = "Replay arrivals through the real scheduler against a cost model, on a virtual clock."
    parser = commands.add_parser(
        "simulate", help="plan capacity and compare policies without a model", description=text
    )
    parser.add_argument("--trace", metavar="FILE", help="JSON lines, - is standard input; see docs/simulator.md")
    parser.add_argument(
        "--generate",
        action="append",
        default=[],
        metavar="KIND:NAME=VALUE,...",
        help="made-up arrivals, repeatable: poisson, steady or burst, such as poisson:rate=20,n=5000,tenants=4",
    )
    parser.add_argument("--write-trace", metavar="FILE", help="write the arrivals as a trace and replay nothing")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="fcfs, priority, fair, or pkg.module:Class; repeatable (default: fair)",
    )
    parser.add_argument("--preemption", choices=typing.get_args(Preemption), default="auto")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="S", help="stop at that time")
    parser.add_argument("--max-queue", type=int, default=10_000, metavar="N", help="waiting requests; more are refused")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--preset", choices=sorted(PRESETS), default="h200-llama-8b", help="its values hold for what is not given"
    )
    for field in dataclasses.fields(Machine):
        kind: type[int] | type[float] = int if field.type == "int" else float
        metavar = "N" if kind is int else "X"
        group.add_argument(
            flag(field.name), dest=field.name, type=kind, metavar=metavar, help=_MACHINE_HELP[field.name]
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the parsed command."""
    trace = _trace(args)
    if args.write_trace:
        with open(args.write_trace, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in write_trace(trace))
        return 0
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Machine)}
    machine = dataclasses.replace(
        PRESETS[args.preset], **{name: value for name, value in given.items() if value is not None}
    )
    reports = []
    for policy in args.policy or ["fair"]:
        simulator = Simulator(
            machine,
            policy=policy,
            preemption=args.preemption,
            prefix_caching=args.enable_prefix_caching,
            max_queue=args.max_queue,
        )
        reports.append(_timed(simulator, trace, args.until))
    if args.json:
        print(json.dumps([report.summary() for report in reports], indent=2))
    else:
        print_reports(reports)
    return 0


def _timed(simulator: Simulator, trace: Sequence[TraceRequest], until: float) -> Report:
    start = time.perf_counter()
    report = simulator.run(trace, until)
    seconds = time.perf_counter() - start
    print(
        f"{report.policy}: {len(trace)} requests and {report.num_steps} steps, {report.seconds:.0f} s of the machine, "
        f"in {seconds:.1f} s ({len(trace) / seconds:.0f} requests/s)",
        file=sys.stderr,
    )
    return report


def _trace(args: argparse.Namespace) -> list[TraceRequest]:
    trace: list[TraceRequest] = []
    if args.trace == "-":
        trace = read_trace(sys.stdin, "standard input")
    elif args.trace:
        try:
            with open(args.trace, encoding="utf-8") as file:
                trace = read_trace(file, args.trace)
        except OSError as error:
            raise ConfigError(f"--trace {args.trace}: {error.strerror}", param="trace") from error
    loads = [sorted(generate(*parse_load(text)), key=_arrival) for text in args.generate]
    trace = list(heapq.merge(trace, *loads, key=_arrival))
    if not trace:
        raise ConfigError("simulate needs --trace FILE or --generate KIND:...", param="trace")
    return trace


def _arrival(request: TraceRequest) -> float:
    return request.arrival


def print_reports(reports: Sequence[Report]) -> None:
    """A table with a column per policy, then one of tenants per policy."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", *(report.policy for report in reports))
    for row in zip(*(_rows(report) for report in reports), strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)
    for report in reports:
        if len(report.tenants) > 1:
            console.print(_tenant_table(report, Table))


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = [(f"{name}", str(report.outcomes[name])) for name in ("finished", "deadline")]
    rows += [("refused", str(sum(report.refused.values()))), ("unfinished", str(report.num_unfinished))]
    for title, name in (("TTFT", "first_token"), ("TPOT", "per_token"), ("total", "total")):
        values = report.values(name)
        rows += [(f"{title} p{round(share * 100)}", _time(quantile(values, share))) for share in QUANTILES]
    kinds = report.num_preemptions
    return [
        *rows,
        ("output tokens/s", f"{report.throughput:,.0f}"),
        ("steps", f"{report.num_steps:,}"),
        ("blocks in use, most", f"{report.most_blocks:,}"),
        ("preemptions: swap / recompute", f"{kinds['swap']} / {kinds['recompute']}"),
        ("preemptions: memory / fairness", f"{kinds['memory']} / {kinds['fairness']}"),
        ("preemptions per request, most", f"{report.preemptions_per_request:.2f}, {report.most_preemptions}"),
        ("prompt tokens cached", f"{report.prefix_hits:.1%}"),
        ("Jain index: tokens, TTFT", f"{report.jain_tokens:.3f}, {report.jain_latency:.3f}"),
    ]


def _tenant_table(report: Report, table_class: Any) -> Any:
    table = table_class(
        "tenant", "requests", "prompt tokens", "output tokens", "TTFT p50", "TTFT p99", "total p99", title=report.policy
    )
    ordered = sorted(report.tenants.items(), key=lambda item: -item[1].service)
    for name, tenant in ordered[:MAX_TENANTS]:
        first, total = sorted(tenant.first_token), sorted(tenant.total)
        counts = (tenant.num_requests, tenant.num_prompt_tokens, tenant.num_output_tokens)
        times = (quantile(first, 0.5), quantile(first, 0.99), quantile(total, 0.99))
        table.add_row(name or "(none)", *(f"{count:,}" for count in counts), *map(_time, times))
    if len(ordered) > MAX_TENANTS:
        table.add_row(f"({len(ordered) - MAX_TENANTS} more)", *[""] * 6)
    return table


def _time(seconds: float) -> str:
    if seconds != seconds:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
