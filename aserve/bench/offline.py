"""Latency and throughput of an Engine in this process: what a library user gets, with no HTTP in between.

Called by `aserve bench`. Outputs have fixed lengths (end tokens are ignored), and prefix caching is off unless asked
for, so that every iteration does the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aserve.bench import percentiles, workload
from aserve.config import EngineConfig
from aserve.profiling import profiled
from aserve.request import SamplingParams

if TYPE_CHECKING:
    from aserve import Engine

T = TypeVar("T")
Batch = list[tuple[list[int], SamplingParams]]
Requests = Callable[["Engine"], Batch]
_SWITCH_INTERVAL = 1e-4  # seconds a thread may hold the interpreter, as `aserve serve` sets it


def latency(config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds for one batch of equally long prompts, again and again."""
    params = SamplingParams(
        n=args.n, temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True, seed=None
    )
    prompts = [[workload.FIRST_ID + i] * args.input_len for i in range(args.batch_size)]

    def requests(_: Engine) -> Batch:
        return [(prompt, params) for prompt in prompts]

    print(f"{args.batch_size} x {args.input_len} tokens in, {args.output_len} out, n={args.n}; {params}")
    seconds, tokens, facts = _measure(config, args, requests)
    return {
        "benchmark": "latency",
        **facts,
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "n": args.n,
        "seconds": [round(value, 4) for value in seconds],
        "median_s": round(statistics.median(seconds), 4),
        "mean_s": round(statistics.fmean(seconds), 4),
        "percentiles_s": percentiles(seconds, digits=4),
        "output_tokens_per_s": round(tokens / statistics.median(seconds), 1),
    }


def throughput(config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Requests per second when the whole chat workload is submitted at once."""

    def requests(engine: Engine) -> Batch:
        return [
            (item.prompt, SamplingParams(temperature=args.temperature, max_tokens=item.output_len, ignore_eos=True))
            for item in workload.chat(args.num_prompts, engine.info.vocab_size)
        ]

    seconds, tokens, facts = _measure(config, args, requests)
    middle = statistics.median(seconds)
    return {
        "benchmark": "throughput",
        **facts,
        "num_prompts": args.num_prompts,
        "seconds": [round(value, 3) for value in seconds],
        "median_s": round(middle, 3),
        "requests_per_s": round(args.num_prompts / middle, 2),
        "output_tokens_per_s": round(tokens / middle, 1),
    }


def _measure(
    config: EngineConfig, args: argparse.Namespace, requests: Requests
) -> tuple[list[float], int, dict[str, Any]]:
    """Seconds of each iteration, output tokens of one, and facts about the engine."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)  # the model thread must not wait for the event loop's
    try:
        with _progress(args.num_iters_warmup + args.num_iters) as advance:
            return _run(_measure_async(config, args, requests, advance))
    finally:
        sys.setswitchinterval(before)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def _measure_async(
    config: EngineConfig, args: argparse.Namespace, requests: Requests, advance: Callable[[], object]
) -> tuple[list[float], int, dict[str, Any]]:
    from aserve import Engine

    began = time.perf_counter()
    async with Engine(config) as engine:
        startup = time.perf_counter() - began
        info = engine.info
        print(f"# GPU blocks: {info.num_gpu_blocks}, # CPU blocks: {info.num_cpu_blocks}; ready in {startup:.1f} s")
        batch = requests(engine)
        seconds: list[float] = []
        tokens = 0
        for index in range(args.num_iters_warmup + args.num_iters):
            start = time.perf_counter()
            tokens = await run_batch(engine, batch)
            if index >= args.num_iters_warmup:
                seconds.append(time.perf_counter() - start)
            advance()
        if args.profile:
            async with profiled(engine, Path(args.profile)):
                await run_batch(engine, batch)
        facts = {
            "model": engine.name,
            "device": info.device,
            "dtype": info.dtype,
            "load_format": config.load_format,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "prefix_caching": config.enable_prefix_caching,
            "detokenize": args.detokenize,
            "startup_s": round(startup, 2),
        }
    return seconds, tokens, facts


async def run_batch(engine: Engine, batch: Batch) -> int:
    """Runs every request to its end. Raises RuntimeError where one has a wrong length."""

    async def one(prompt: list[int], params: SamplingParams) -> int:
        async with engine.generate(prompt, params) as stream:
            counts = [len(completion.token_ids) for completion in await stream.completions()]
        if any(count != params.max_tokens for count in counts):
            raise RuntimeError(f"an output has {counts} tokens, {params.max_tokens} were asked for")
        return sum(counts)

    return sum(await asyncio.gather(*(one(prompt, params) for prompt, params in batch)))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("iterations", total=total)
        yield lambda: bar.advance(task)
