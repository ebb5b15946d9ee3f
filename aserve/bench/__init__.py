"""`aserve bench latency | throughput | serve`: parsers, and what the three report. Standard library at import.

offline.py measures an engine in this process, client.py a server over HTTP, both on workload.py's requests. cli.py
lists `add` among its subcommands.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from collections.abc import Callable
from typing import Any

from aserve.config import EngineConfig

AddFlags = Callable[[argparse.ArgumentParser], None]
MakeConfig = Callable[[argparse.Namespace], EngineConfig]


def add(commands: Any, add_engine_flags: AddFlags, engine_config: MakeConfig) -> None:
    """Adds the `bench` command; the engine's flags and their reading are the CLI's."""
    bench = commands.add_parser("bench", help="measure latency, throughput or a server", description=__doc__)
    kinds = bench.add_subparsers(metavar="KIND", required=True)

    latency = kinds.add_parser("latency", help="seconds for one batch, an engine in this process")
    latency.add_argument("--batch-size", type=positive, default=8, metavar="N", help="(default: %(default)s)")
    latency.add_argument("--input-len", type=positive, default=32, metavar="N", help="(default: %(default)s)")
    latency.add_argument("--output-len", type=positive, default=128, metavar="N", help="(default: %(default)s)")
    latency.add_argument(
        "--n", type=positive, default=1, metavar="N", help="choices of each prompt (default: %(default)s)"
    )
    latency.add_argument("--num-iters", type=positive, default=5, metavar="N", help="(default: %(default)s)")
    latency.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="(default: %(default)s)")
    latency.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: %(default)s)")

    throughput = kinds.add_parser("throughput", help="requests per second of the chat workload, all at once")
    throughput.add_argument("--num-prompts", type=positive, default=1000, metavar="N", help="(default: %(default)s)")
    throughput.add_argument("--num-iters", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    throughput.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="(default: %(default)s)")
    throughput.add_argument("--temperature", type=float, default=1.0, metavar="X", help="(default: %(default)s)")

    for parser, run in ((latency, _latency), (throughput, _throughput)):
        parser.add_argument("--model", help="a directory, a .gguf file or a hub id (default: the demo model)")
        parser.add_argument("--detokenize", action="store_true", help="make text too, as a server does")
        parser.add_argument(
            "--profile", metavar="DIR", help="also write a trace of one iteration, and a breakdown of its steps"
        )
        parser.add_argument("--json-out", metavar="FILE")
        add_engine_flags(parser)
        parser.set_defaults(run=run, enable_prefix_caching=False, make_config=engine_config)

    serve = kinds.add_parser("serve", help="stream the chat workload from a running server")
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    serve.add_argument("--model", required=True, help="the served model's name")
    serve.add_argument(
        "--vocab-size", type=positive, required=True, metavar="N", help="prompts are random ids below it"
    )
    load = serve.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=positive, default=64, metavar="N", help="open at once (default: %(default)s)"
    )
    load.add_argument("--rate", type=float, metavar="X", help="Poisson arrivals per second, in place of --concurrency")
    serve.add_argument("--num-prompts", type=positive, default=500, metavar="N", help="(default: %(default)s)")
    serve.add_argument(
        "--num-processes", type=positive, default=4, metavar="N", help="of clients (default: %(default)s)"
    )
    serve.add_argument("--api-key", metavar="KEY")
    serve.add_argument("--json-out", metavar="FILE")
    serve.set_defaults(run=_serve)


def positive(text: str) -> int:
    """An argument that counts at least one of something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _latency(args: argparse.Namespace) -> int:
    from aserve.bench import offline

    return _report(args, offline.latency(_config(args), args))


def _throughput(args: argparse.Namespace) -> int:
    from aserve.bench import offline

    return _report(args, offline.throughput(_config(args), args))


def _serve(args: argparse.Namespace) -> int:
    from aserve.bench import client

    return _report(args, client.run(args))


def _config(args: argparse.Namespace) -> EngineConfig:
    config: EngineConfig = args.make_config(args)
    return config if args.detokenize else dataclasses.replace(config, skip_tokenizer_init=True)


def _report(args: argparse.Namespace, result: dict[str, Any]) -> int:
    result = {"date": datetime.date.today().isoformat(), "python": platform.python_version(), **result}
    print(json.dumps(result))
    if args.json_out:
        with open(args.json_out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 1 if result.get("errors") or result.get("wrong_length") else 0


def percentiles(values: list[float], scale: float = 1.0, digits: int = 3) -> dict[str, float]:
    """p50, p90, p99, mean and largest of the values times scale; empty for none."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * scale, digits)

    mean = round(sum(ordered) / len(ordered) * scale, digits)
    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "mean": mean, "max": round(ordered[-1] * scale, digits)}
