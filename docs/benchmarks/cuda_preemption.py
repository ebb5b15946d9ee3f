"""Swap against recompute in measured time, and how often the cost model chooses the faster one.

    python docs/benchmarks/cuda_preemption.py [MODEL] [--device cuda|cpu] [--json-out FILE]

Random weights in Llama 3.1 8B's shape on CUDA, the demo model on a CPU, where no MODEL is named. Everything runs
through the runner, in steps that decode `--batch` other sequences besides, and counts as what it adds to such steps:
for each context, share of it that the prefix cache still has, and link, copying its blocks out and in again, against
computing the rest of its tokens. A link that is k times slower takes k times the measured time of the real one. The
cost model sees what the scheduler would show it: the copy rate measured at start (over k), and some chunks and decodes.
Prints a row per point of the grid (columns as in the JSON), then the figures. Exit code 1 where fewer than 90% of the
choices are right.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import load_rate

from aserve.config import EngineConfig
from aserve.executors import Runner
from aserve.loading import _make_runner, find
from aserve.plan import BlockCopy, BlockDelta, Chunk, SlotUpdate, StepPlan, StepResult, WorkerInfo
from aserve.preemption import CostModel
from aserve.request import SamplingParams

SHAPE = load_rate.SHAPE | {"num_hidden_layers": 32}
RIGHT_SHARE = 0.9
BACKGROUND = 256  # context of the sequences that decode besides
ROUNDS = 15  # of copies out and in again
STEPS = 128  # they may take between two fresh starts
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
GRIDS: dict[str, dict[str, list[Any]]] = {
    "cuda": {"contexts": [1024, 4096, 16384, 32768], "slowdowns": [1, 2, 4, 8, 16, 32]},
    "cpu": {"contexts": [128, 512], "slowdowns": [1, 16, 64, 256, 1024]},
}


class Bench:
    """A runner with `batch` decoding sequences, and slot 0 for the victim."""

    def __init__(self, runner: Runner, info: WorkerInfo, batch: int, longest: int) -> None:
        self.runner = runner
        self.info = info
        self.slots = tuple(range(1, batch + 1))
        self.victim = tuple(range(longest // info.block_size + 1))
        self.budget = info.max_num_batched_tokens - batch
        self.number = 0
        each = (BACKGROUND + STEPS) // info.block_size
        first = len(self.victim)
        self.tables = [tuple(range(first + i * each, first + (i + 1) * each)) for i in range(batch)]

    def run(self, **parts: Any) -> tuple[float, StepResult]:
        """Seconds of one step, and its result."""
        self.number += 1
        start = time.perf_counter()
        result = self.runner.wait(self.runner.launch(StepPlan(self.number, **parts)))
        return time.perf_counter() - start, result

    def restart(self) -> None:
        """The others begin again at their context."""
        position = BACKGROUND - 1
        self.run(
            slots=tuple(SlotUpdate(slot, PARAMS, 0, 0, BACKGROUND) for slot in self.slots),
            blocks=tuple(BlockDelta(slot, 0, table) for slot, table in zip(self.slots, self.tables, strict=True)),
            chunks=tuple(Chunk(slot, position, (100,), (slot,)) for slot in self.slots),
        )

    def decode(self, costs: CostModel | None = None) -> float:
        """Seconds of a step of the others alone."""
        times = []
        for _ in range(8):
            seconds, result = self.run(decodes=self.slots)
            times.append(seconds)
            if costs is not None:
                costs.observe_decode(result.timings.compute)
        return statistics.median(times)

    def recompute(self, start: int, end: int, costs: CostModel | None = None) -> float:
        """Seconds that the positions from start to end add to the others' steps."""
        self.restart()
        base = self.decode()
        added, at = 0.0, start
        slots: tuple[SlotUpdate, ...] = (SlotUpdate(0, PARAMS, 0, 0, end),)
        blocks: tuple[BlockDelta, ...] = (BlockDelta(0, 0, self.victim),)
        while at < end:
            count = min(self.budget, end - at)
            chunk = Chunk(0, at, tuple(range(100, 100 + count)), (0,) if at + count == end else ())
            seconds, result = self.run(decodes=self.slots, slots=slots, blocks=blocks, chunks=(chunk,))
            if costs is not None:
                costs.observe_chunks(count, count * (at + count / 2), result.timings.compute)
            slots, blocks, at, added = (), (), at + count, added + seconds - base
        return added

    def swap(self, context: int) -> float:
        """Seconds that copying the context's blocks out and in again adds to the others' steps."""
        self.restart()
        copies = tuple(BlockCopy(block, block) for block in range(-(-context // self.info.block_size)))
        times = []
        for _ in range(ROUNDS):
            base, _ = self.run(decodes=self.slots)
            out, _ = self.run(decodes=self.slots, swap_out=copies)
            back, _ = self.run(decodes=self.slots, swap_in=copies)
            times.append(out + back - 2 * base)
        return statistics.median(times)


def learn(bench: Bench, costs: CostModel, longest: int) -> None:
    """Warms every kind of step up, then lets the cost model watch."""
    budget = min(bench.budget, longest)
    points = [(0, budget // 8), (0, budget // 2), (0, budget), (longest // 2, budget // 2), (longest - budget, budget)]
    for watching in (None, costs):
        bench.restart()
        bench.decode(watching)
        for start, count in points * 2:
            start = max(0, min(start, longest - count))
            bench.recompute(start, start + count, watching)


def measure(bench: Bench, costs: CostModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per point of the grid."""
    rows = []
    size, copy_rate = bench.info.block_size, costs.copy_rate
    for context in args.contexts:
        bench.swap(context)  # buffers for copies of this size are made at their first use
        seconds = bench.swap(context)
        swaps = {slowdown: slowdown * seconds for slowdown in args.slowdowns}
        for share in args.shares:
            start = int(context * share) // size * size
            recompute = statistics.median(bench.recompute(start, context) for _ in range(args.repeats))
            for slowdown, swap in swaps.items():
                costs.copy_rate = copy_rate / slowdown
                num_blocks = context // size
                choice = costs.choose(num_blocks, num_blocks, context - start, context)
                row = dict(
                    context=context,
                    cached_share=share,
                    slowdown=slowdown,
                    swap_ms=round(1e3 * swap, 2),
                    recompute_ms=round(1e3 * recompute, 2),
                    swap_estimate_ms=round(1e3 * choice.swap_seconds, 2),
                    recompute_estimate_ms=round(1e3 * choice.recompute_seconds, 2),
                    choice=choice.kind,
                    right=choice.kind == ("swap" if swap < recompute else "recompute"),
                )
                rows.append(row)
                print(*row.values(), sep="\t", flush=True)
    costs.copy_rate = copy_rate
    return rows


def summary(rows: list[dict[str, Any]], costs: CostModel, info: WorkerInfo) -> dict[str, Any]:
    """The figures over the whole grid."""
    swaps = [row for row in rows if row["choice"] == "swap"]
    taken = sum(row[f"{row['choice']}_ms"] for row in rows)
    best = sum(min(row["swap_ms"], row["recompute_ms"]) for row in rows)
    return dict(
        device=info.device,
        block_bytes=info.block_bytes,
        copy_rate_gb_s=round(costs.copy_rate / 1e9, 2),
        per_token_us=round(1e6 * costs.per_token, 2),
        per_pair_ns=round(1e9 * costs.per_pair, 3),
        points=len(rows),
        right_share=round(sum(row["right"] for row in rows) / len(rows), 4),
        time_over_best=round(taken / best, 4),
        swap_chosen=len(swaps),
        swap_chosen_and_faster=sum(row["right"] for row in swaps),
        recompute_over_swap_where_chosen=round(
            statistics.median(row["recompute_ms"] / row["swap_ms"] for row in swaps), 2
        )
        if swaps
        else None,
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory; its weights are not read on CUDA")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=None, help="sequences that decode besides (default: 32, CPU 4)")
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 0.75, 0.9])
    parser.add_argument("--slowdowns", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--num-threads", type=int, help="of a CPU")
    parser.add_argument("--json-out")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.batch = args.batch or (32 if cuda else 4)
    for name, values in GRIDS[args.device].items():
        setattr(args, name, getattr(args, name) or values)
    longest = max(args.contexts)
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None and cuda:
            Path(directory, "config.json").write_text(json.dumps(SHAPE))
        config = EngineConfig(
            model=args.model or (directory if cuda else None),
            device=args.device,
            load_format="dummy" if cuda else "auto",
            skip_tokenizer_init=True,
            max_model_len=max(longest + 16, BACKGROUND + STEPS),
            max_num_seqs=args.batch + 1,
            max_num_batched_tokens=args.max_num_batched_tokens,
            num_threads=args.num_threads,
            num_gpu_blocks_override=longest // 16 + 1 + args.batch * ((BACKGROUND + STEPS) // 16),
            swap_space=4.0 if cuda else 0.5,
        )
        runner = _make_runner(find(config), config)
        info = runner.load()
    print(info, flush=True)
    if longest > info.num_cpu_blocks * info.block_size:
        parser.error(f"the host pool holds {info.num_cpu_blocks * info.block_size} tokens")
    costs = CostModel(block_size=info.block_size, block_bytes=info.block_bytes, copy_rate=info.copy_rate)
    bench = Bench(runner, info, args.batch, longest)
    learn(bench, costs, longest)
    report = summary(measure(bench, costs, args), costs, info)
    runner.close()
    text = json.dumps(report, indent=1)
    out = args.json_out or (os.environ.get("OUT") and str(Path(os.environ["OUT"], "cuda_preemption.json")))
    if out:
        Path(out).write_text(text)
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    sys.exit(report["right_share"] < RIGHT_SHARE)


if __name__ == "__main__":
    main()
