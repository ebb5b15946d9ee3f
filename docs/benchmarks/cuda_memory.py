"""Memory on a CUDA card against what was planned, and a run at full load that must not run out of it.

    python docs/benchmarks/cuda_memory.py [--models llama-8b qwen3-moe] [--layers N] [--minutes 1] [--utilization 0.95]
                                          [--preempt]

For each model, in a process of its own and with random weights: `weights` is what its tensors' shapes add up to against
what the allocator holds after loading; `total` is utilization x card, the plan, against the most that was in use on the
card while as many requests as may run at once came and went, prompts of up to a whole step among them. With --preempt
outputs are so long that they outgrow the pool, and every ten seconds preemption turns from swapping to recomputing or
back. `minutes` has the most memory in use in each minute, which must not grow. Prints JSON, and writes cuda_memory.json
into $OUT where that is set. Exit code 1: an estimate was off by over 3%, memory grew, an output failed or has a wrong
length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve import Engine, SamplingParams

LARGEST_ERROR = 0.03
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0}
_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
_GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 1024, "head_dim": 256}
_OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 16384, "word_embed_proj_dim": 4096}
SHAPES: dict[str, dict[str, Any]] = {  # the widths of Llama 3 8B, Qwen 3 30B-A3B, Gemma 3 4B and OPT 6.7B
    "llama-8b": _LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    | dict(num_hidden_layers=32, vocab_size=128256, max_position_embeddings=8192),
    "qwen3-moe": _MOE
    | dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    | dict(num_hidden_layers=24, vocab_size=151936, max_position_embeddings=8192),
    "gemma3-4b": _GEMMA
    | dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=4)
    | dict(num_hidden_layers=34, vocab_size=262208, max_position_embeddings=8192),
    "opt-6.7b": _OPT
    | dict(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, vocab_size=50272)
    | dict(max_position_embeddings=2048),
}


def weight_bytes(config: dict[str, Any], max_positions: int) -> int:
    """What a model's tensors add up to, without making them."""
    import torch

    import aserve_kernels
    from aserve.models.decoder import Decoder
    from aserve.models.families import FAMILIES, architecture
    from aserve.models.gpt import GPT
    from aserve.models.gpt_families import GPT_FAMILIES
    from aserve.models.rope import cos_sin_table
    from aserve.models.weights import DummyWeights

    total = 0

    class Shapes(DummyWeights):
        def __init__(self) -> None:
            self.device, self.dtype = torch.device("meta"), torch.bfloat16

        def norm(self, name: str, size: int, offset: float = 0.0) -> torch.Tensor:
            nonlocal total
            total += 4 * size
            return super().norm(name, size, offset)

        def _normal(self, *shape: int) -> torch.Tensor:
            nonlocal total
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
            total += out.nbytes
            return out

    name, kernels = architecture(config), aserve_kernels.load("torch")
    if name in FAMILIES:
        decoder = FAMILIES[name](config)
        Decoder(decoder, Shapes(), kernels, max_positions=max_positions)
        ropes = {layer.rope for layer in decoder.layers}
        total += sum(cos_sin_table(rope, max_positions, torch.device("meta")).nbytes for rope in ropes)
    else:
        GPT(GPT_FAMILIES[name](config), Shapes(), kernels, max_positions=max_positions)
    return total


@dataclass
class Clients:
    """Requests without a pause, and what came of them."""

    engine: Engine
    preempt: bool
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    num_done: int = 0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    async def keep_full(self, seconds: float) -> None:
        """A quarter more clients than may run at once, for so long and until their last requests have ended."""
        end = time.monotonic() + seconds
        changing = asyncio.create_task(self._change_preemption()) if self.preempt else None
        await asyncio.gather(*(self._client(end) for _ in range(self.engine.info.max_num_seqs * 5 // 4)))
        if changing is not None:
            changing.cancel()

    async def _client(self, end: float) -> None:
        from aserve import AserveError

        while time.monotonic() < end:
            prompt, params = self._request()
            try:
                async with self.engine.generate(prompt, params) as stream:
                    (completion,) = await stream.completions()
                if len(completion.token_ids) != params.max_tokens:
                    self.errors["wrong length"] += 1
                self.num_done += 1
                self.num_tokens += len(completion.token_ids)
            except AserveError as error:
                self.errors[f"{type(error).__name__}: {error}"[:200]] += 1

    def _request(self) -> tuple[list[int], SamplingParams]:
        from aserve import SamplingParams

        draw, info = self.draw, self.engine.info
        longest = min(info.max_num_batched_tokens, info.max_model_len - 300)
        length = longest if draw.random() < 0.05 else draw.randint(16, 1024)
        prompt = [draw.randrange(10, info.vocab_size) for _ in range(length)]
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            max_tokens=draw.randint(256, 1024) if self.preempt else 256,
            ignore_eos=True,
        )
        return prompt, params

    async def _change_preemption(self) -> None:
        while True:
            for mode in ("swap", "recompute"):
                self.engine._scheduler.costs.mode = mode  # type: ignore[assignment]
                await asyncio.sleep(10)


@contextmanager
def most_in_use() -> Iterator[list[int]]:
    """Bytes in use on the card, the most of each minute, as they come."""
    import torch

    minutes: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        began = time.monotonic()
        while not stop.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            minute = int(time.monotonic() - began) // 60
            minutes.extend([0] * (minute + 1 - len(minutes)))
            minutes[minute] = max(minutes[minute], total - free)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield minutes
    finally:
        stop.set()
        watcher.join()


def note_weights() -> dict[str, int]:
    """Has the next runner note under "weights" what the allocator holds for its model."""
    import torch

    from aserve.models import Model
    from aserve.worker.runner import ModelRunner

    held: dict[str, int] = {}
    make_model = ModelRunner._make_model

    def measured(runner: ModelRunner) -> Model:
        before = torch.cuda.memory_allocated()
        model = make_model(runner)
        held["weights"] = torch.cuda.memory_allocated() - before
        return model

    ModelRunner._make_model = measured  # type: ignore[method-assign]
    return held


async def run(directory: str, config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Loads the model and keeps it full for the asked minutes."""
    import torch

    from aserve import Engine

    held = note_weights()
    _, card = torch.cuda.mem_get_info()
    engine = Engine(
        model=directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        gpu_memory_utilization=args.utilization,
    )
    async with engine:
        after_start = card - torch.cuda.mem_get_info()[0]
        clients = Clients(engine, args.preempt)
        with most_in_use() as minutes:
            await clients.keep_full(60 * args.minutes)
        preemptions = {" ".join(kind): count for kind, count in engine.stats().preemptions.items()}
        info = engine.info
    planned, weights = int(card * args.utilization), weight_bytes(config, config["max_position_embeddings"])
    return {
        "weights": _compared(weights, held["weights"]),
        "total": _compared(planned, max(minutes)),
        "minutes_bytes": minutes,
        "card_bytes": card,
        "after_start_bytes": after_start,
        "num_gpu_blocks": info.num_gpu_blocks,
        "num_cpu_blocks": info.num_cpu_blocks,
        "max_model_len": info.max_model_len,
        "startup_seconds": round(info.startup_seconds, 1),
        "requests": clients.num_done,
        "output_tokens": clients.num_tokens,
        "preemptions": preemptions,
        "failed": clients.errors,
    }


def _compared(estimate: int, used: int) -> dict[str, float]:
    return {"estimate_bytes": estimate, "used_bytes": used, "error": round(estimate / used - 1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["llama-8b", "qwen3-moe"])
    parser.add_argument("--layers", type=int, help="in place of each model's own")
    parser.add_argument("--minutes", type=float, default=1.0, help="of full load for each model")
    parser.add_argument("--preempt", action="store_true", help="outgrow the pool, swapping and recomputing in turn")
    parser.add_argument("--utilization", type=float, default=0.95)
    parser.add_argument("--once", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        config = json.loads(Path(args.once, "config.json").read_text())
        print(json.dumps(asyncio.run(run(args.once, config, args))))
        return
    results: dict[str, Any] = {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            shape = SHAPES[name] | ({"num_hidden_layers": args.layers} if args.layers else {})
            Path(directory, "config.json").write_text(json.dumps(shape | {"dtype": "bfloat16"}))
            command = [sys.executable, __file__, "--once", directory]
            command += ["--minutes", str(args.minutes), "--utilization", str(args.utilization)]
            command += ["--preempt"] if args.preempt else []
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = child.stdout.splitlines()
        results[name] = json.loads(lines[-1]) if child.returncode == 0 and lines else {"exit_code": child.returncode}
        report = json.dumps(results, indent=1)
        if out := os.environ.get("OUT"):
            Path(out, "cuda_memory.json").write_text(report)
    print(report)
    sys.exit(not all(_passes(result) for result in results.values()))


def _passes(result: dict[str, Any]) -> bool:
    if "exit_code" in result or result["failed"] or not result["requests"]:
        return False
    minutes = result["minutes_bytes"]
    grew = len(minutes) > 2 and max(minutes[2:]) > 1.002 * max(minutes[:2])  # graphs are made at first
    return not grew and all(abs(result[part]["error"]) <= LARGEST_ERROR for part in ("weights", "total"))


if __name__ == "__main__":
    main()
