"""Times each CUDA kernel against its floor and writes the table as JSON. Correctness is tests/gpu's.

usage: python docs/benchmarks/cuda_kernels.py [--json-out FILE] [--only WORD]
The floor is the larger of bytes moved / copy bandwidth and operations / matrix rate, both measured first. Every case is
captured in a CUDA graph that runs it on several input sets in turn, larger together than the L2 cache; medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import aserve_kernels
from aserve_kernels import AttentionMeta, Kernels, SamplingRows

DEVICE = "cuda"
BF16 = torch.bfloat16
L2_BYTES = 60 << 20
Case = tuple[str, Callable[[int], Callable[[], object]], float, float]  # name, make(input set), bytes, flops


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device=DEVICE)


def median_us(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds per call of the calls in turn, replayed from one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[repeats // 2] * 1e3 / len(calls)


def make_meta(query_lens: list[int], seq_lens: list[int], block_size: int, num_blocks: int) -> AttentionMeta:
    rows = len(seq_lens)
    max_blocks = -(-max(seq_lens) // block_size)
    table = torch.randint(0, num_blocks, (rows, max_blocks), dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens).cumsum(0)
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    return AttentionMeta(
        num_decodes=sum(q == 1 for q in query_lens),
        positions=positions.to(DEVICE),
        slot_mapping=torch.arange(sum(query_lens), device=DEVICE) % (num_blocks * block_size),
        query_starts=starts.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        block_tables=table,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def attention_case(
    name: str, kernels: Kernels, query_lens: list[int], seq_lens: list[int], heads: int = 32, kv_heads: int = 8
) -> Case:
    dim, block_size, num_blocks = 128, 16, 40_000 // kv_heads * 8

    def make(_: int) -> Callable[[], object]:
        key, value = (randn(num_blocks, block_size, kv_heads, dim) for _ in range(2))
        query = randn(sum(query_lens), heads, dim)
        meta = make_meta(query_lens, seq_lens, block_size, num_blocks)
        return lambda: kernels.paged_attention(query, key, value, meta, dim**-0.5)

    kv_bytes = sum(seq_lens) * kv_heads * dim * 2 * 2
    seen = sum(q * (s - q) + q * (q + 1) / 2 for q, s in zip(query_lens, seq_lens, strict=True))
    return name, make, kv_bytes + sum(query_lens) * heads * dim * 4, 4 * seen * heads * dim


def elementwise_cases(kernels: Kernels) -> list[Case]:
    cases: list[Case] = []
    for t in (1, 64, 256, 8192):

        def norm(_: int, t: int = t) -> Callable[[], object]:
            x, residual, weight = randn(t, 4096), randn(t, 4096), randn(4096)
            return lambda: kernels.add_rms_norm_(x, residual, weight, 1e-5)

        def gated(_: int, t: int = t) -> Callable[[], object]:
            x = randn(t, 2 * 14336)
            return lambda: kernels.gated_mlp(x, "silu")

        def rotary(_: int, t: int = t) -> Callable[[], object]:
            qkv, cos_sin = randn(t, 48 * 128), torch.randn(8192, 128, device=DEVICE)
            key, value = randn(8192 // 16, 16, 8, 128), randn(8192 // 16, 16, 8, 128)
            at = torch.arange(t, device=DEVICE)
            weight = randn(128)
            return lambda: kernels.rotary_kv_write_(qkv, at, at, cos_sin, key, value, 32, 8, 128, weight, weight, 1e-6)

        def layer_norm(_: int, t: int = t) -> Callable[[], object]:
            x, residual, weight = randn(t, 5120), randn(t, 5120), randn(5120)
            return lambda: kernels.add_layer_norm_(x, residual, weight, weight, 1e-5)

        cases.append((f"add_layer_norm {t}x5120", layer_norm, t * 5120 * 2 * 4, 0))
        cases.append((f"add_rms_norm {t}x4096", norm, t * 4096 * 2 * 4, 0))
        cases.append((f"gated_mlp {t}x14336", gated, t * 14336 * 2 * 3, 0))
        cases.append((f"rotary_kv_write {t}x(32+8+8)x128", rotary, t * 48 * 128 * 2 * 2, 0))
    return cases


def sample_cases(kernels: Kernels) -> list[Case]:
    cases: list[Case] = []
    vocab = 128256
    for count in (1, 64, 256):
        for kind in ("greedy", "gumbel", "top-k top-p"):

            def make(_: int, count: int = count, kind: str = kind) -> Callable[[], object]:
                logits = randn(count, vocab)
                ones = torch.ones(count, dtype=torch.int64, device=DEVICE)
                limited = kind == "top-k top-p"
                rows = SamplingRows(
                    temperature=torch.full((count,), 0.7, device=DEVICE),
                    seeds=torch.randint(0, 1 << 60, (count,), device=DEVICE),
                    choices=ones,
                    output_index=ones,
                    top_k=ones * 50 if limited else None,
                    top_p=torch.full((count,), 0.9, device=DEVICE) if limited else None,
                    all_greedy=kind == "greedy",
                )
                return lambda: kernels.sample(logits, rows)

            cases.append((f"sample {kind} {count}x{vocab}", make, count * vocab * 2, 0))
    return cases


def linear_cases() -> list[Case]:
    from aserve_kernels.triton.linear import gated_linear, linear
    from aserve_kernels.triton.norm import gated_mlp

    shapes = {
        "qwen3-0.6b qkv": (4096, 1024),
        "qwen3-0.6b o": (1024, 2048),
        "qwen3-0.6b gate_up": (6144, 1024),
        "qwen3-0.6b down": (1024, 3072),
        "qwen3-0.6b head": (151936, 1024),
        "llama-3.1-8b qkv": (6144, 4096),
        "llama-3.1-8b o": (4096, 4096),
        "llama-3.1-8b gate_up": (28672, 4096),
        "llama-3.1-8b down": (4096, 14336),
        "llama-3.1-8b head": (128256, 4096),
        "opt-13b output": (5120, 5120),
        "opt-13b up": (20480, 5120),
        "opt-13b down": (5120, 20480),
    }
    cases: list[Case] = []
    for name, (n, k) in shapes.items():
        for t in (1, 2, 8, 16):
            for kind, call in (("aserve", linear), ("cublas", functional.linear)):

                def make(_: int, n: int = n, k: int = k, t: int = t, call: Any = call) -> Callable[[], object]:
                    weight, x = randn(n, k), randn(t, k)
                    return lambda: call(x, weight)

                cases.append((f"linear {kind} {name} {t}", make, n * k * 2.0, 2.0 * n * k * t))
    for t in (104, 128, 256):
        for kind, product in (("aserve", gated_linear), ("cublas", None)):

            def gated(_: int, t: int = t, product: Any = product) -> Callable[[], object]:
                weight, x = randn(28672, 4096), randn(t, 4096)
                if product is not None:
                    return lambda: product(x, weight, None, "silu")
                return lambda: gated_mlp(functional.linear(x, weight), "silu")

            cases.append((f"gated linear {kind} llama-3.1-8b {t}", gated, 28672 * 4096 * 2.0, 2.0 * 28672 * 4096 * t))
    for name in ("qwen3-0.6b o", "qwen3-0.6b down"):
        for t in (128, 256):
            for kind, call in (("aserve", linear), ("cublas", functional.linear)):
                n, k = shapes[name]

                def small(_: int, n: int = n, k: int = k, t: int = t, call: Any = call) -> Callable[[], object]:
                    weight, x = randn(n, k), randn(t, k)
                    return lambda: call(x, weight)

                cases.append((f"linear {kind} {name} {t}", small, n * k * 2.0, 2.0 * n * k * t))
    return cases


def attention_cases(triton: Kernels, flash: Kernels | None) -> list[Case]:
    cases: list[Case] = []
    for batch, length in (
        (1, 160),
        (1, 4096),
        (8, 160),
        (8, 4096),
        (64, 160),
        (64, 512),
        (64, 4096),
        (256, 160),
        (256, 512),
    ):
        cases.append(attention_case(f"decode triton {batch}x{length}", triton, [1] * batch, [length] * batch))
    cases.append(attention_case("decode triton 64x512 40/40 heads", triton, [1] * 64, [512] * 64, 40, 40))
    for name, kernels in (("triton", triton), ("flash", flash)):
        if kernels is not None:
            cases.append(attention_case(f"chunk {name} 1x8192", kernels, [8192], [8192]))
            cases.append(attention_case(f"chunk {name} 32x256", kernels, [256] * 32, [256] * 32))
            mixed = ([1] * 60 + [512], [512] * 60 + [512])
            cases.append(attention_case(f"mixed {name} 60x512 + 512", kernels, *mixed))
            few = ([1] * 4 + [512], [8192] * 4 + [512])
            cases.append(attention_case(f"mixed {name} 4x8192 + 512", kernels, *few))
    return cases


def measure_ceilings() -> tuple[float, float]:
    """Bytes per second read and written by a negation, and operations per second of a bf16 product. A copy would do,
    but as a node of a graph it runs on the copy engine, at two thirds of the speed."""
    x = torch.zeros(1 << 30, dtype=BF16, device=DEVICE)
    y = torch.empty_like(x)
    bandwidth = 4 * x.numel() / (median_us([lambda: torch.neg(x, out=y)] * 8) * 1e-6)
    a, b = randn(8192, 8192), randn(8192, 8192)
    rate = 2 * 8192**3 / (median_us([lambda: a @ b] * 4) * 1e-6)
    return bandwidth, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json-out")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    triton_kernels = aserve_kernels.load("triton")
    try:
        flash_kernels = aserve_kernels.load("flash")
    except ImportError:
        flash_kernels = None
    bandwidth, rate = measure_ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    cases = elementwise_cases(triton_kernels) + sample_cases(triton_kernels) + linear_cases()
    cases += attention_cases(triton_kernels, flash_kernels)
    results = []
    for name, make, num_bytes, flops in cases:
        if args.only not in name:
            continue
        sets = max(4, min(24, int(2 * L2_BYTES // max(num_bytes, 1)) + 1))
        try:
            measured = median_us([make(i) for i in range(sets)])
        except Exception as error:  # a case that cannot run is a result too
            print(f"{name:45s} failed: {error!r:.200}")
            results.append(dict(name=name, error=repr(error)[:300]))
            continue
        floor = max(num_bytes / bandwidth, flops / rate) * 1e6
        results.append(dict(name=name, us=round(measured, 2), floor_us=round(floor, 2)))
        print(f"{name:45s} {measured:9.2f} us  floor {floor:9.2f}  x{measured / max(floor, 1e-3):.2f}", flush=True)
        torch.cuda.empty_cache()
    report = dict(
        date=datetime.date.today().isoformat(),
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        copy_tb_s=round(bandwidth / 1e12, 3),
        bf16_tflop_s=round(rate / 1e12, 1),
        results=results,
    )
    if args.json_out:
        with open(args.json_out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
