"""The draw: thresholds of top-k, top-p and min-p found by bisection, then Gumbel-max over the vocabulary.

The kept set of each option is "logits of at least t", so no sort is needed: t is found bit by bit, exactly, from counts
and masses above a pivot. The draw splits the vocabulary over programs; the last of a row to finish takes the best of
them all. Random numbers are those of ops.philox_uniform: equal logits draw equal tokens on every backend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

from aserve_kernels.ops import SamplingRows
from aserve_kernels.triton.launch import begin, overlapped

INT_MIN = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-2139095040)  # the key of -inf
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _log(x):
    """libdevice's, because the hardware's log2 is off by 2e-7 near 1, where the largest Gumbel variates come from."""
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def _ordered(x):
    """float32 as int32 in the same order, so that bisection ends on one exact value."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, INT_MIN - bits)


@triton.jit
def _from_ordered(key):
    return tl.where(key >= 0, key, INT_MIN - key).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits_ptr, at, V: tl.constexpr):
    return tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _threshold_kernel(
    threshold_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stride,
    V: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bounds are keys >> SHIFT, since a narrow type's low bits are zero; each pass over the row tries three pivots."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        tl.store(threshold_ptr + row, float("-inf"))
        return
    column = tl.arange(0, BLOCK)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        best = tl.maximum(best, _load(logits_ptr, start + column, V))
    best = tl.max(best, axis=0)
    top = (_ordered(best) >> SHIFT).to(tl.int64)
    floor = (LOWEST >> SHIFT) + 0 * top

    if TOP_K:
        k = tl.load(top_k_ptr + row)
        if k < V:
            # the largest key with at least k logits at or above it: the k-th largest logit, its ties kept
            low = floor
            high = top
            while low < high:
                step = (high - low + 3) // 4
                one = low + step
                two = tl.minimum(low + 2 * step, high)
                three = tl.minimum(low + 3 * step, high)
                first = _from_ordered((one << SHIFT).to(tl.int32))
                second = _from_ordered((two << SHIFT).to(tl.int32))
                third = _from_ordered((three << SHIFT).to(tl.int32))
                counts = tl.zeros([BLOCK], tl.int32)
                counts_two = tl.zeros([BLOCK], tl.int32)
                counts_three = tl.zeros([BLOCK], tl.int32)
                for start in range(0, V, BLOCK):
                    x = _load(logits_ptr, start + column, V)
                    counts += (x >= first).to(tl.int32)
                    counts_two += (x >= second).to(tl.int32)
                    counts_three += (x >= third).to(tl.int32)
                if tl.sum(counts, axis=0) < k:
                    high = one - 1
                elif tl.sum(counts_two, axis=0) < k:
                    low = one
                    high = two - 1
                elif tl.sum(counts_three, axis=0) < k:
                    low = two
                    high = three - 1
                else:
                    low = three
            floor = low

    if TOP_P:
        p = tl.load(top_p_ptr + row)
        if p < 1.0:
            # the smallest key with less than p of the mass above it: a token is kept if those before it do not reach p
            kept = _from_ordered((floor << SHIFT).to(tl.int32))
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                x = _load(logits_ptr, start + column, V)
                mass += tl.where(x >= kept, tl.exp((x - best) / temperature), 0.0)
            limit = p * tl.sum(mass, axis=0)
            low = floor
            high = top
            while low < high:
                step = (high - low + 3) // 4
                one = high - step
                two = tl.maximum(high - 2 * step, low)
                three = tl.maximum(high - 3 * step, low)
                first = _from_ordered((one << SHIFT).to(tl.int32))
                second = _from_ordered((two << SHIFT).to(tl.int32))
                third = _from_ordered((three << SHIFT).to(tl.int32))
                mass = tl.zeros([BLOCK], tl.float32)
                mass_two = tl.zeros([BLOCK], tl.float32)
                mass_three = tl.zeros([BLOCK], tl.float32)
                for start in range(0, V, BLOCK):
                    x = _load(logits_ptr, start + column, V)
                    weight = tl.exp((x - best) / temperature)
                    mass += tl.where(x > first, weight, 0.0)
                    mass_two += tl.where(x > second, weight, 0.0)
                    mass_three += tl.where(x > third, weight, 0.0)
                if tl.sum(mass, axis=0) >= limit:
                    low = one + 1
                elif tl.sum(mass_two, axis=0) >= limit:
                    high = one
                    low = two + 1
                elif tl.sum(mass_three, axis=0) >= limit:
                    high = two
                    low = three + 1
                else:
                    high = three
            floor = low

    threshold = _from_ordered((floor << SHIFT).to(tl.int32))
    if MIN_P:
        m = tl.load(min_p_ptr + row)
        if m > 0.0:
            threshold = tl.maximum(threshold, best + temperature * tl.log(m))
    tl.store(threshold_ptr + row, threshold)


@triton.jit
def _gumbel(word):
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    return -tl.log(-_log(u))


@triton.jit
def _best_of(score, token):
    """Largest score and its token, the lowest of equals."""
    value = tl.max(score, axis=0)
    return value, tl.min(tl.where(score == value, token, 2147483647), axis=0)


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
            x = _load(logits_ptr, token, V)
            if THRESHOLD:
                x = tl.where(x >= tl.load(threshold_ptr + row), x, float("-inf"))
            value, chosen = _best_of(x / temperature + _gumbel(words[lane]), token)
            better = (value > best) | ((value == best) & (chosen < best_token))
            best_token = tl.where(better, chosen, best_token)
            best = tl.where(better, value, best)
    else:
        for lane in tl.static_range(4):
            token = part * QUADS * 4 + lane * QUADS + tl.arange(0, QUADS)
            value, chosen = _best_of(_load(logits_ptr, token, V), token)
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
    _, chosen = _best_of(value, token)
    tl.store(out_ptr + row, tl.minimum(chosen, V - 1).to(tl.int64))  # logits that are not finite still give an id


def _thresholds(logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [S]: the smallest logit that top-k, top-p and min-p keep."""
    threshold = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _threshold_kernel[(logits.shape[0],)](
        threshold,
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        logits.stride(0),
        V=logits.shape[1],
        TOP_K=rows.top_k is not None,
        TOP_P=rows.top_p is not None,
        MIN_P=rows.min_p is not None,
        SHIFT={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
        BLOCK=min(8192, triton.next_power_of_2(logits.shape[1])),
        num_warps=32 if logits.shape[1] > 4096 else 8,
        **overlapped(logits.device),
    )
    return threshold


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See ops.Kernels."""
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    limited = not rows.all_greedy and not (rows.top_k is None and rows.top_p is None and rows.min_p is None)
    threshold = _thresholds(logits, rows) if limited else rows.temperature
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
        THRESHOLD=limited,
        QUADS=quads,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        num_warps=4,
        **overlapped(device),
    )
    return out
