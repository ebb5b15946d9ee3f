"""How fast a checkpoint loads, against the rate at which its bytes can be copied, and what memory it takes meanwhile.

    python docs/benchmarks/load_rate.py [MODEL_DIR] [--layers 8] [--dtype bfloat16] [--device cpu] [--rounds 3]

Without MODEL_DIR it writes a random bfloat16 checkpoint of Llama 3 8B's widths and `--layers` of its 32 layers (32 is
16 GB) into a temporary directory. Every rate is over the bytes that are copied: all but the embedding where that stays
mapped. The peers: `read` into a warm buffer and into fresh memory, by one thread and by as many as there are cores.
Each load is a process of its own. `cpu` rates are over the CPU time of the reading or loading thread alone: they hold
on a machine that others use too. Prints JSON; $OUT names a directory for load_rate.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
_SHARD_BYTES = 5 << 30
_CHUNK = 16 << 20


def write_checkpoint(directory: Path, num_layers: int) -> None:
    """A sharded checkpoint of SHAPE; the tensors' bits repeat one random tile."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_key_value_heads"] * 128
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SHAPE["vocab_size"], hidden)}
    for index in range(num_layers):
        prefix = f"model.layers.{index}"
        attention = {
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
        }
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{prefix}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (SHAPE["vocab_size"], hidden)}
    tile = torch.randn(32 << 20, dtype=torch.bfloat16) * 0.02
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        if size + num_bytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name, shape in shard.items():
            count = torch.Size(shape).numel()
            tensors[name] = tile.repeat(-(-count // tile.numel()))[:count].view(shape)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": num_layers}))


def copy_rate(paths: list[Path], *, num_threads: int, fresh: bool) -> tuple[float, float]:
    """Bytes per second, and per second of CPU time, of reading the files by `num_threads` at once; `fresh`: each part
    into new memory.
    """
    import mmap

    local = threading.local()

    def read(job: tuple[Path, int, int]) -> int:
        path, offset, length = job
        if fresh:
            memory = mmap.mmap(-1, length)  # kept until the end, as weights are
            kept.append(memory)
        else:
            if not hasattr(local, "memory"):
                local.memory = mmap.mmap(-1, _CHUNK)
            memory = local.memory
        with path.open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [memoryview(memory)[:length]], offset)

    kept: list[mmap.mmap] = []
    sizes = {path: path.stat().st_size for path in paths}
    jobs = [(p, at, min(_CHUNK, size - at)) for p, size in sizes.items() for at in range(0, size, _CHUNK)]
    began, cpu_began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(num_threads) as pool:
        done = sum(pool.map(read, jobs))
    return done / (time.perf_counter() - began), done / (time.process_time() - cpu_began)


def load(model: str, dtype: str, device: str) -> dict[str, Any]:
    """One load in this process: seconds, anonymous memory before, at its peak and after."""
    import torch

    import aserve_kernels
    from aserve.models.files import resolve
    from aserve.models.loader import load_model

    kernels = aserve_kernels.load("torch" if device == "cpu" else "triton")
    torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()  # oneDNN and the allocator are up
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if device == "cuda":
        torch.zeros(1, device=device)
    began, cpu_began = time.perf_counter(), time.thread_time()
    files = resolve(model, need_tokenizer=False)
    before, peak = _anonymous(), 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = load_model(files, dtype=getattr(torch, dtype), device=device, kernels=kernels, max_positions=8192)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - began, time.thread_time() - cpu_began
    stop.set()
    watcher.join()
    after = _anonymous()
    sizes = [path.stat().st_size for path in files.weights]
    mapped = 0
    embedding = loaded._embedding  # type: ignore[attr-defined]
    if device == "cpu" and embedding.dtype == torch.bfloat16:
        mapped = embedding.nbytes
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "copied_bytes": sum(sizes) - mapped,
        "anonymous_before": before,
        "anonymous_peak": peak - before,
        "anonymous_after": after - before,
    }


def _anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("no RssAnon in /proc/self/status")


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    paths = sorted(model.glob("*.safetensors"))
    cores = len(os.sched_getaffinity(0))
    rates: dict[str, list[float]] = {}
    loads = []
    for _ in range(args.rounds):
        for fresh in (False, True):
            for threads in sorted({1, cores}):
                name = f"read_{'fresh' if fresh else 'warm'}_{threads}"
                wall, cpu = copy_rate(paths, num_threads=threads, fresh=fresh)
                rates.setdefault(name, []).append(wall)
                if threads == 1:
                    rates.setdefault(f"{name}_cpu", []).append(cpu)
        command = [sys.executable, __file__, str(model), "--once", "--dtype", args.dtype, "--device", args.device]
        loads.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(loads[-1], file=sys.stderr, flush=True)
    size = loads[0]["copied_bytes"]
    return {
        "model": model.name,
        "dtype": args.dtype,
        "device": args.device,
        "cores": cores,
        "read_GB_s": {name: round(max(each) / 1e9, 2) for name, each in rates.items()},
        "load_GB_s": round(size / min(each["seconds"] for each in loads) / 1e9, 2),
        "load_cpu_GB_s": round(size / min(each["cpu_seconds"] for each in loads) / 1e9, 2),
        "loads": loads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(load(str(args.model), args.dtype, args.device)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        model = args.model
        if model is None:
            model = Path(temporary)
            write_checkpoint(model, args.layers)
        report = json.dumps(measure(model, args), indent=1)
    print(report)
    if out := os.environ.get("OUT"):
        Path(out, "load_rate.json").write_text(report)


if __name__ == "__main__":
    main()
