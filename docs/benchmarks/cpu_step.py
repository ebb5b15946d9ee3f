"""Time of one step on CPU, by batch size, and what it is made of. No server: plans go straight to the runner.

    python docs/benchmarks/cpu_step.py [MODEL] [--dtype bfloat16] [--context 128] [--batch 1 2 4 8 16 32]

Prints milliseconds (median, best, CPU time) of decode steps, greedy and sampled (top-k 64, top-p 0.95), of prefill
steps by chunk size, and with --profile the operators that a step spends its time in.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from aserve.config import EngineConfig
from aserve.models import files as model_files
from aserve.plan import BlockDelta, Chunk, SlotUpdate, StepPlan, StepResult
from aserve.request import SamplingParams
from aserve.worker.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_k=64, top_p=0.95)


class Times(NamedTuple):
    """Milliseconds of a step. `best` and `cpu` hold on a machine that others use too."""

    median: float
    best: float
    cpu: float


class Steps:
    """Plans of `batch` equal sequences, and how long the runner takes for them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.block_size = runner.config.block_size
        self.number = 0

    def run(self, **fields: Any) -> StepResult:
        """One step."""
        self.number += 1
        return self.runner.wait(self.runner.launch(StepPlan(self.number, **fields)))

    def start(self, batch: int, context: int, params: SamplingParams, room: int = 64) -> tuple[int, ...]:
        """Prefills `batch` sequences of `context` tokens, with blocks for `room` more."""
        pages = -(-(context + room) // self.block_size)
        for slot in range(batch):
            self.run(
                chunks=(Chunk(slot, 0, tuple(range(5 + slot, 5 + slot + context)), (slot,)),),
                slots=(SlotUpdate(slot, params, seed=slot, choice=0, num_prompt_tokens=context),),
                blocks=(BlockDelta(slot, 0, tuple(range(slot * pages, (slot + 1) * pages))),),
            )
        return tuple(range(batch))

    def decode_ms(self, batch: int, context: int, params: SamplingParams, steps: int = 20) -> Times:
        """Of decode steps."""
        slots = self.start(batch, context, params)
        return time_ms(lambda: self.run(decodes=slots), steps)

    def prefill_ms(self, sizes: tuple[int, ...], steps: int = 5) -> Times:
        """Of steps that compute whole prompts of these sizes."""
        pages = -(-max(sizes) // self.block_size)
        slots, blocks, chunks = [], [], []
        for slot, size in enumerate(sizes):
            slots.append(SlotUpdate(slot, GREEDY, seed=slot, choice=0, num_prompt_tokens=size))
            blocks.append(BlockDelta(slot, 0, tuple(range(slot * pages, (slot + 1) * pages))))
            chunks.append(Chunk(slot, 0, tuple(range(9, 9 + size)), (slot,)))
        return time_ms(lambda: self.run(chunks=tuple(chunks), slots=tuple(slots), blocks=tuple(blocks)), steps)


def time_ms(call: Callable[[], object], count: int) -> Times:
    """Milliseconds of `count` calls after two unmeasured ones."""
    walls, cpus = [], []
    for _ in range(count + 2):
        began, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append((time.perf_counter() - began) * 1000)
        cpus.append((time.process_time() - cpu) * 1000)
    return Times(statistics.median(walls[2:]), min(walls[2:]), statistics.median(cpus[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--profile", type=int, help="batch size whose decode steps are profiled")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, device="cpu", dtype=args.dtype, num_threads=args.threads)
    runner = ModelRunner(model_files.resolve(args.model), config)
    info = runner.load()
    print(f"{info.dtype}, {torch.get_num_threads()} threads, loaded in {info.startup_seconds:.1f} s")
    steps = Steps(runner)
    if args.profile:
        slots = steps.start(args.profile, args.context, GREEDY)
        with torch.profiler.profile() as profile:
            for _ in range(10):
                steps.run(decodes=slots)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))
        return
    print(f"decode, context {args.context}")
    print("batch  greedy ms    best     cpu   tok/s  sampled ms    best     cpu")
    for batch in args.batch:
        greedy = steps.decode_ms(batch, args.context, GREEDY)
        sampled = steps.decode_ms(batch, args.context, SAMPLED)
        rate = batch / greedy.median * 1000
        print(f"{batch:5d}  {greedy.median:9.2f} {greedy.best:7.2f} {greedy.cpu:7.2f} {rate:7.1f}", end="  ")
        print(f"{sampled.median:10.2f} {sampled.best:7.2f} {sampled.cpu:7.2f}", flush=True)
    print("prefill\nprompts      ms    best     cpu   tok/s")
    for sizes in ((64,), (64, 64), (64,) * 4, (64,) * 8, (512,)):
        taken = steps.prefill_ms(sizes)
        print(f"{len(sizes):2d} x {sizes[0]:3d} {taken.median:7.1f} {taken.best:7.1f} {taken.cpu:7.1f}", end="")
        print(f" {sum(sizes) / taken.median * 1000:7.0f}", flush=True)


if __name__ == "__main__":
    main()
