"""Latency at several batch sizes and the chat workload's throughput of one engine per model, on a CUDA card.

usage: python docs/benchmarks/cuda_engine.py MODEL_DIR ... [--batches 1 8 64 256] [--throughput N] [--json-out FILE]
Random weights (--load-format dummy), 32 tokens in, 128 out, greedy, token ids alone; medians of 5 after a warm-up. The
same as `aserve bench latency` and `aserve bench throughput`, with one load of the model for all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import uvloop

from aserve import Engine, SamplingParams, profiled
from aserve.bench import offline, workload

INPUT_LEN, OUTPUT_LEN = 32, 128


async def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    engine = Engine(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=0.88,
        attention_backend=args.attention_backend,
        enforce_eager=args.enforce_eager,
    )
    async with engine:
        result: dict[str, Any] = {"model": engine.name, "ready_s": round(time.perf_counter() - began, 2)}
        result["max_num_seqs"] = engine.info.max_num_seqs
        result["max_num_batched_tokens"] = engine.info.max_num_batched_tokens
        for batch in args.batches:
            params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
            requests = [([workload.FIRST_ID + i] * INPUT_LEN, params) for i in range(batch)]
            seconds = await rounds(engine, requests, args.iters)
            result[f"latency_b{batch}_s"] = round(statistics.median(seconds), 4)
            result[f"latency_b{batch}_all_s"] = [round(value, 4) for value in seconds]
            print(engine.name, batch, result[f"latency_b{batch}_all_s"], flush=True)
        if args.throughput:
            items = workload.chat(args.throughput, engine.info.vocab_size)
            requests = [
                (prompt, SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True))
                for prompt, length in items
            ]
            seconds = await rounds(engine, requests, args.throughput_iters)
            best = statistics.median(seconds)
            result["throughput_all_s"] = [round(value, 3) for value in seconds]
            result["throughput_req_s"] = round(len(items) / best, 2)
            result["throughput_tok_s"] = round(sum(length for _, length in items) / best, 1)
            print(engine.name, "throughput", result["throughput_req_s"], result["throughput_tok_s"], flush=True)
        if args.profile:
            await profile(engine, args)
        return result


async def rounds(engine: Engine, requests: offline.Batch, count: int) -> list[float]:
    seconds = []
    for _ in range(count + 1):
        start = time.perf_counter()
        await offline.run_batch(engine, requests)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


async def profile(engine: Engine, args: argparse.Namespace) -> None:
    """Device time by kernel over one short batch of each size."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for batch in args.batches:
        requests = [([workload.FIRST_ID + i] * INPUT_LEN, params) for i in range(batch)]
        async with profiled(engine, Path(f"{args.profile}_b{batch}")):
            await offline.run_batch(engine, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--iters", type=int, default=5)
    parser.add_argument("--throughput", type=int, default=0, metavar="N", help="requests; 0 is off")
    parser.add_argument("--throughput-iters", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--profile", metavar="DIR")
    parser.add_argument("--json-out")
    args = parser.parse_args()
    sys.setswitchinterval(1e-4)
    results = []
    for model in args.models:
        results.append(uvloop.run(measure(model, args)))
        print(json.dumps(results[-1]), flush=True)
        torch.cuda.empty_cache()
    report = dict(
        date=datetime.date.today().isoformat(),
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        input_len=INPUT_LEN,
        output_len=OUTPUT_LEN,
        detokenize=False,
        results=results,
    )
    if args.json_out:
        with open(args.json_out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
