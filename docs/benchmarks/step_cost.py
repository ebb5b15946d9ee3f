"""What a step costs on this machine: fits the coefficients that `aserve simulate` takes.

    python docs/benchmarks/step_cost.py [MODEL] [--dtype bfloat16]

Runs real steps over a grid of chunks, batch sizes and contexts, and solves for seconds = fixed + per_token * tokens +
per_context * context + per_pair * pairs by least squares of the relative error. Every slot reads and writes the same
blocks: only the time matters here.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from aserve.config import EngineConfig
from aserve.executors import Runner
from aserve.loading import _make_runner, find
from aserve.plan import BlockDelta, Chunk, SlotUpdate, StepPlan, WorkerInfo
from aserve.request import SamplingParams

REPEATS = 5
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


class Meter:
    """Plans steps by hand and times them."""

    def __init__(self, runner: Runner, info: WorkerInfo, longest: int) -> None:
        self.runner = runner
        self.info = info
        self.blocks = tuple(range((longest + REPEATS + 1) // info.block_size + 1))
        self.number = 0

    def run(self, **parts: Any) -> float:
        """Seconds of one step."""
        self.number += 1
        start = time.perf_counter()
        self.runner.wait(self.runner.launch(StepPlan(self.number, **parts)))
        return time.perf_counter() - start

    def chunk(self, start: int, count: int) -> float:
        """Seconds of a prompt's chunk that begins at `start`."""
        return self.seat((0,), start, count)

    def seat(self, slots: tuple[int, ...], start: int, count: int = 1) -> float:
        """Hands out the slots with `start` positions filled, and computes `count` more."""
        tokens = tuple(range(100, 100 + count))
        return self.run(
            slots=tuple(SlotUpdate(slot, PARAMS, 0, 0, start + count) for slot in slots),
            blocks=tuple(BlockDelta(slot, 0, self.blocks) for slot in slots),
            chunks=tuple(Chunk(slot, start, tokens, (slot,)) for slot in slots),
        )

    def decode(self, batch: int, context: int) -> float:
        """Seconds of a step of that many decodes; the least, since others only add to it."""
        slots = tuple(range(batch))
        self.seat(slots, context - 1)
        return min(self.run(decodes=slots) for _ in range(REPEATS))


def measure(meter: Meter, longest: int) -> list[tuple[float, float, float, float]]:
    """(tokens, context, pairs, seconds) of each point of the grid."""
    most = meter.info.max_num_batched_tokens
    rows = []
    for start in (0, longest // 4, longest - most):
        for count in (16, 64, most // 2, most):
            seconds = min(meter.chunk(start, count) for _ in range(3))
            rows.append((float(count), float(start + count), count * (start + count / 2), seconds))
    for context in (32, 256, 1024):
        for batch in (1, 4, 16, meter.info.max_num_seqs):
            rows.append((batch, batch * context, 0.0, meter.decode(batch, context)))
    return rows


def main() -> None:
    """Measures, fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, dtype=args.dtype)
    runner = _make_runner(find(config), config)
    info = runner.load()
    print(info, flush=True)
    longest = max(2048, 2 * info.max_num_batched_tokens)
    meter = Meter(runner, info, longest)
    meter.chunk(0, info.max_num_batched_tokens)  # warm
    rows = measure(meter, longest)
    table = np.array(rows)
    columns = np.column_stack([np.ones(len(rows)), table[:, :3]])
    fitted = np.linalg.lstsq(columns / table[:, 3:], np.ones(len(rows)), rcond=None)[0]
    for (tokens, context, _, seconds), guess in zip(rows, columns @ fitted, strict=True):
        print(f"{tokens:6.0f} tokens, {context:7.0f} context: {seconds * 1e3:8.2f} ms, fitted {guess * 1e3:8.2f} ms")
    for name, value in zip(("fixed", "per_token", "per_context", "per_pair"), fitted, strict=True):
        print(f"--{name.replace('_', '-')} {value:.3g}")


if __name__ == "__main__":
    main()
