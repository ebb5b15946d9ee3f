"""What a step costs on this machine: fits the coefficients that `aserve simulate` takes.

    python docs/benchmarks/step_cost.py [MODEL] [--dtype bfloat16]

Runs real steps of decodes and prompt chunks over a grid of batch sizes and contexts, and solves for seconds =
fixed + per_token * tokens + per_context * context + per_pair * pairs by least squares of the relative error.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from aserve.config import EngineConfig
from aserve.executors import Runner
from aserve.loading import _make_runner, find
from aserve.plan import BlockDelta, Chunk, SlotUpdate, StepPlan, WorkerInfo
from aserve.request import SamplingParams

REPEATS = 5
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class Meter:
    """Plans steps by hand: every slot has its own blocks, written before they are read."""

    def __init__(self, runner: Runner, info: WorkerInfo) -> None:
        self.runner = runner
        self.info = info
        self.number = 0

    def run(self, **parts: tuple[object, ...]) -> float:
        """Seconds of one step."""
        self.number += 1
        plan = StepPlan(self.number, **parts)  # type: ignore[arg-type]
        start = time.perf_counter()
        self.runner.wait(self.runner.launch(plan))
        return time.perf_counter() - start

    def fill(self, slot: int, length: int) -> list[tuple[int, int, float]]:
        """Computes a prompt in chunks. Returns (start, tokens, seconds) of each."""
        size = self.info.block_size
        per_slot = self.info.num_gpu_blocks // self.info.max_num_seqs
        num_blocks = min(-(-(length + 64) // size), self.info.num_gpu_blocks)
        first = slot * per_slot if num_blocks <= per_slot else 0
        blocks = tuple(range(first, first + num_blocks))
        times = []
        for start in range(0, length, self.info.max_num_batched_tokens):
            count = min(self.info.max_num_batched_tokens, length - start)
            last = start + count == length
            chunk = Chunk(slot, start, tuple(range(100, 100 + count)), (slot,) if last else ())
            hand_over = (
                {}
                if start
                else {
                    "slots": (SlotUpdate(slot, PARAMS, 0, 0, length),),
                    "blocks": (BlockDelta(slot, 0, blocks),),
                }
            )
            times.append((start, count, self.run(chunks=(chunk,), **hand_over)))
        return times


def main() -> None:
    """Measures, fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, dtype=args.dtype)
    runner = _make_runner(find(config), config)
    info = runner.load()
    print(info)
    meter = Meter(runner, info)
    meter.fill(0, info.max_num_batched_tokens)  # warm
    rows: list[tuple[float, float, float, float]] = []
    for length in (16, 64, 256, info.max_num_batched_tokens, 4 * info.max_num_batched_tokens):
        for start, count, seconds in meter.fill(0, length) + meter.fill(0, length):
            rows.append((count, start + count, count * (start + count / 2), seconds))
    for context in (32, 256, 768):
        for batch in (1, 4, 16, info.max_num_seqs):
            if batch * (context + 64) > info.num_gpu_blocks * info.block_size:
                continue
            for slot in range(batch):
                meter.fill(slot, context)
            decodes = tuple(range(batch))
            times = [meter.run(decodes=decodes) for _ in range(REPEATS)]
            rows.append((batch, batch * context, 0.0, statistics.median(times)))
    table = np.array(rows)
    columns = np.column_stack([np.ones(len(rows)), table[:, :3]])
    seconds = table[:, 3]
    fitted = np.linalg.lstsq(columns / seconds[:, None], np.ones(len(rows)), rcond=None)[0]
    for row, model in zip(rows, columns @ fitted, strict=True):
        print(f"{row[0]:6.0f} tokens {row[1]:7.0f} context: {row[3] * 1e3:8.2f} ms, fitted {model * 1e3:8.2f} ms")
    for name, value in zip(("fixed", "per_token", "per_context", "per_pair"), fitted, strict=True):
        print(f"--{name.replace('_', '-')} {value:.3g}")


if __name__ == "__main__":
    main()
