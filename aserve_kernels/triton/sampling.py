"""The draw: Gumbel-max over the words that top-k, top-p and min-p keep.

limits.py finds what is kept, and draws where that is few words. Other draws split the vocabulary over programs; the
last of a row to finish takes the best of them all. Equal logits draw equal tokens on every backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.ops import SamplingRows
from aserve_kernels.triton.gumbel import best_of, gumbel, load_logits
from aserve_kernels.triton.launch import begin, overlapped
from aserve_kernels.triton.limits import limited


@triton.jit
def _draw_kernel(
    out_ptr,
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    choices_ptr,
    output_index_ptr,
    threshold_ptr,
    value_ptr,
    token_ptr,
    arrivals_ptr,
    stride,
    V: tl.constexpr,
    GREEDY: tl.constexpr,
    THRESHOLD: tl.constexpr,
    QUADS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if THRESHOLD:  # noqa: SIM102
        if tl.load(threshold_ptr + row) == float("inf"):  # drawn by limits.py
            return
    logits_ptr += row * stride
    quad = part * QUADS + tl.arange(0, QUADS)  # one Philox counter serves four neighbouring tokens
    best = float("-inf")
    best_token = V
    temperature = 0.0
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        seed = tl.load(seeds_ptr + row)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        zero = tl.zeros([QUADS], tl.uint32)
        index = zero + tl.load(output_index_ptr + row).to(tl.uint32)
        choice = zero + tl.load(choices_ptr + row).to(tl.uint32)
        words = tl.random.philox_impl(quad.to(tl.uint32), index, choice, zero, low, high)
        for lane in tl.static_range(4):
            token = quad * 4 + lane
            x = load_logits(logits_ptr, token, V)
            if THRESHOLD:
                x = tl.where(x >= tl.load(threshold_ptr + row), x, float("-inf"))
            value, chosen = best_of(x / temperature + gumbel(words[lane]), token)
            better = (value > best) | ((value == best) & (chosen < best_token))
            best_token = tl.where(better, chosen, best_token)
            best = tl.where(better, value, best)
    else:
        for lane in tl.static_range(4):
            token = part * QUADS * 4 + lane * QUADS + tl.arange(0, QUADS)
            value, chosen = best_of(load_logits(logits_ptr, token, V), token)
            better = (value > best) | ((value == best) & (chosen < best_token))
            best_token = tl.where(better, chosen, best_token)
            best = tl.where(better, value, best)

    tl.store(value_ptr + row * PARTS + part, best)
    tl.store(token_ptr + row * PARTS + part, best_token)
    tl.debug_barrier()  # the stores come before the arrival that publishes them
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel", scope="gpu") != PARTS - 1:
        return
    parts = tl.arange(0, PARTS_BLOCK)
    mask = parts < PARTS
    value = tl.load(value_ptr + row * PARTS + parts, mask=mask, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(token_ptr + row * PARTS + parts, mask=mask, other=V, cache_modifier=".cg")
    _, chosen = best_of(value, token)
    tl.store(out_ptr + row, tl.minimum(chosen, V - 1).to(tl.int64))  # logits that are not finite still give an id


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See ops.Kernels."""
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    limits = not rows.all_greedy and not (rows.top_k is None and rows.top_p is None and rows.min_p is None)
    threshold = limited(out, logits, rows) if limits else rows.temperature
    quads = min(512 if num_rows <= 32 else 1024, triton.next_power_of_2(triton.cdiv(vocab_size, 4)))
    parts = triton.cdiv(vocab_size, quads * 4)
    _draw_kernel[(parts, num_rows)](
        out,
        logits,
        rows.temperature,
        rows.seeds,
        rows.choices,
        rows.output_index,
        threshold,
        torch.empty(num_rows, parts, dtype=torch.float32, device=device),
        torch.empty(num_rows, parts, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        logits.stride(0),
        V=vocab_size,
        GREEDY=rows.all_greedy,
        THRESHOLD=limits,
        QUADS=quads,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        num_warps=4,
        **overlapped(device),
    )
    return out
