"""Thresholds of top-k, top-p and min-p by bisection, and the draw where few words are in question.

sampling.py calls `limited` before its own draw. The kept set of each option is "logits of at least t", so no sort is
needed: t is found bit by bit, exactly, from counts and masses above a pivot, over a few hundred candidates where those
hold the kept set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.ops import SamplingRows
from aserve_kernels.triton.gumbel import best_of, gumbel, load_logits
from aserve_kernels.triton.launch import begin, overlapped

INT_MIN = tl.constexpr(-(2**31))
LOWEST = tl.constexpr(-2139095040)  # the key of -inf
_CANDIDATES = 2048  # words near a row's best that are kept at hand
_GATHERED = 512  # as many as that are asked for: ties and neighbours of one group may add some


@triton.jit
def _ordered(x):
    """float32 as int32 in the same order, so that bisection ends on one exact value."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, INT_MIN - bits)


@triton.jit
def _from_ordered(key):
    return tl.where(key >= 0, key, INT_MIN - key).to(tl.float32, bitcast=True)


@triton.jit
def _at(ids_ptr, start, column, size, few, V: tl.constexpr):
    """Words [start, start + BLOCK) of the `few` candidates or of the whole vocabulary; V past their end."""
    at = start + column
    if few:
        at = tl.load(ids_ptr + at, mask=at < size, other=V)
    return at


@triton.jit
def _count_at_least(logits_ptr, ids_ptr, size, few, pivot, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many words are at or above each of three pivots."""
    column = tl.arange(0, BLOCK)
    one = tl.zeros([BLOCK], tl.int32)
    two = tl.zeros([BLOCK], tl.int32)
    three = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < size:
        x = load_logits(logits_ptr, _at(ids_ptr, start, column, size, few, V), V)
        one += (x >= pivot[0]).to(tl.int32)
        two += (x >= pivot[1]).to(tl.int32)
        three += (x >= pivot[2]).to(tl.int32)
        start += BLOCK
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)


@triton.jit
def _mass(x, best, temperature):
    """exp((x - best) / temperature) in units of 2^-40: a sum of them does not depend on its order."""
    return (tl.exp((x - best) / temperature) * 1099511627776.0).to(tl.int64)


@triton.jit
def _mass_above(logits_ptr, ids_ptr, size, few, pivot, best, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of words above each of three pivots."""
    column = tl.arange(0, BLOCK)
    one = tl.zeros([BLOCK], tl.int64)
    two = tl.zeros([BLOCK], tl.int64)
    three = tl.zeros([BLOCK], tl.int64)
    start = 0
    while start < size:
        x = load_logits(logits_ptr, _at(ids_ptr, start, column, size, few, V), V)
        mass = _mass(x, best, temperature)
        one += tl.where(x > pivot[0], mass, 0)
        two += tl.where(x > pivot[1], mass, 0)
        three += tl.where(x > pivot[2], mass, 0)
        start += BLOCK
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    return _from_ordered((key << SHIFT).to(tl.int32))


@triton.jit
def _kth_largest_key(logits_ptr, ids_ptr, size, few, k, low, high, SHIFT, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in [low, high] with at least k words at or above it, which `low` has."""
    while low < high:
        step = (high - low + 3) // 4
        one = low + step
        two = tl.minimum(low + 2 * step, high)
        three = tl.minimum(low + 3 * step, high)
        pivot = (_value(one, SHIFT), _value(two, SHIFT), _value(three, SHIFT))
        first, second, third = _count_at_least(logits_ptr, ids_ptr, size, few, pivot, V, BLOCK)
        if first < k:
            high = one - 1
        elif second < k:
            low = one
            high = two - 1
        elif third < k:
            low = two
            high = three - 1
        else:
            low = three
    return low


@triton.jit
def _nucleus_key(
    logits_ptr, ids_ptr, size, few, limit, low, high, best, temperature, SHIFT, V: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest key in [low, high] with less than `limit` mass above it: a word is kept if those before it do not
    reach the limit."""
    while low < high:
        step = (high - low + 3) // 4
        one = high - step
        two = tl.maximum(high - 2 * step, low)
        three = tl.maximum(high - 3 * step, low)
        pivot = (_value(one, SHIFT), _value(two, SHIFT), _value(three, SHIFT))
        first, second, third = _mass_above(logits_ptr, ids_ptr, size, few, pivot, best, temperature, V, BLOCK)
        if first >= limit:
            low = one + 1
        elif second >= limit:
            high = one
            low = two + 1
        elif third >= limit:
            high = two
            low = three + 1
        else:
            high = three
    return low


@triton.jit
def _kth_largest(x, k, low, high, SHIFT):
    """The same of a block of values."""
    while low < high:
        middle = (low + high + 1) // 2
        if tl.sum((x >= _value(middle, SHIFT)).to(tl.int32), axis=0) < k:
            high = middle - 1
        else:
            low = middle
    return low


@triton.jit
def _words(token, seed, index, choice):
    """The Philox word of each token, whose counter it shares with three neighbours."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (token * 0).to(tl.uint32)
    quad = (token // 4).to(tl.uint32)
    one, two, three, four = tl.random.philox_impl(
        quad, zero + index.to(tl.uint32), zero + choice.to(tl.uint32), zero, low, high
    )
    lane = token % 4
    return tl.where(lane < 2, tl.where(lane == 0, one, two), tl.where(lane == 2, three, four))


@triton.jit
def _gather(
    ids_ptr,
    count_ptr,
    logits_ptr,
    reach,
    best,
    temperature,
    V: tl.constexpr,
    MASS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes words at or above `reach` to ids_ptr, in any order. Their count, and with MASS the mass of the row."""
    column = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + column
        x = load_logits(logits_ptr, at, V)
        near = (x >= reach) & (at < V)
        slot = tl.atomic_add(count_ptr + at * 0, 1, mask=near, sem="relaxed", scope="cta")
        tl.store(ids_ptr + slot, at, mask=near & (slot < CANDIDATES))
        if MASS:
            mass += tl.exp((x - best) / temperature)
    tl.debug_barrier()  # every thread's candidates are written
    return tl.load(count_ptr, cache_modifier=".cg"), tl.sum(mass, axis=0)


@triton.jit
def _draw(ids_ptr, size, logits_ptr, threshold, temperature, seed, index, choice, V: tl.constexpr, BLOCK: tl.constexpr):
    """The candidate at or above the threshold with the largest score."""
    column = tl.arange(0, BLOCK)
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], V, tl.int32)
    start = 0
    while start < size:
        at = _at(ids_ptr, start, column, size, True, V)
        x = load_logits(logits_ptr, at, V)
        found = tl.where(x >= threshold, x / temperature + gumbel(_words(at, seed, index, choice)), float("-inf"))
        better = (found > score) | ((found == score) & (at < token))
        token = tl.where(better, at, token)
        score = tl.where(better, found, score)
        start += BLOCK
    _, chosen = best_of(score, token)
    return chosen


@triton.jit
def _limit_kernel(
    out_ptr,
    threshold_ptr,
    ids_ptr,
    count_ptr,
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    choices_ptr,
    output_index_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stride,
    V: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    SHIFT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's smallest kept logit, and its draw where the kept words are among few candidates (threshold inf: done).

    The k-th largest of BLOCK group maxima has at least k words at or above it, and seldom many more: those are the
    candidates. Where they may not hold every kept word, the bisections run over the whole row, and _draw_kernel draws.
    Bounds are keys >> SHIFT, since a narrow type's low bits are zero.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    ids_ptr += row * CANDIDATES
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        tl.store(threshold_ptr + row, float("-inf"))
        return
    column = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        maxima = tl.maximum(maxima, load_logits(logits_ptr, start + column, V))
    best = tl.max(maxima, axis=0)
    top = (_ordered(best) >> SHIFT).to(tl.int64)
    floor = (LOWEST >> SHIFT) + 0 * top
    k = V
    if TOP_K:
        k = tl.minimum(tl.load(top_k_ptr + row), V).to(tl.int32)
    p = 1.0
    if TOP_P:
        p = tl.load(top_p_ptr + row)

    few = False
    size = V
    total = 0.0
    if (k < V) | (p < 1.0):
        wanted = tl.minimum(k, GATHERED)
        reach = _value(_kth_largest(maxima, wanted, floor, top, SHIFT), SHIFT)
        count, total = _gather(
            ids_ptr, count_ptr + row, logits_ptr, reach, best, temperature, V, TOP_P, CANDIDATES, BLOCK
        )
        few = count <= CANDIDATES
        if k < V:
            few = few & (k <= GATHERED)
        elif few:
            below = reach * 0.0 + float("-inf")
            inside, _, _ = _mass_above(
                logits_ptr, ids_ptr, count, few, (below, below, below), best, temperature, V, BLOCK
            )
            few = inside >= (p * total * 1099511627776.0).to(tl.int64)
        if few:
            size = count
            floor = (_ordered(reach) >> SHIFT).to(tl.int64)

    if TOP_K:  # noqa: SIM102  (decided while compiling)
        if k < V:
            floor = _kth_largest_key(logits_ptr, ids_ptr, size, few, k, floor, top, SHIFT, V, BLOCK)
    if TOP_P:  # noqa: SIM102
        if p < 1.0:
            limit = (p * total * 1099511627776.0).to(tl.int64)
            if k < V:
                under = _value(floor - 1, SHIFT)  # strictly above it is at or above the k-th largest
                inside, _, _ = _mass_above(
                    logits_ptr, ids_ptr, size, few, (under, under, under), best, temperature, V, BLOCK
                )
                limit = (p * inside.to(tl.float64)).to(tl.int64)
            floor = _nucleus_key(logits_ptr, ids_ptr, size, few, limit, floor, top, best, temperature, SHIFT, V, BLOCK)
    threshold = _value(floor, SHIFT)
    if MIN_P:
        m = tl.load(min_p_ptr + row)
        if m > 0.0:
            threshold = tl.maximum(threshold, best + temperature * tl.log(m))
    if few:
        seed = tl.load(seeds_ptr + row)
        index = tl.load(output_index_ptr + row)
        choice = tl.load(choices_ptr + row)
        chosen = _draw(ids_ptr, size, logits_ptr, threshold, temperature, seed, index, choice, V, BLOCK)
        tl.store(out_ptr + row, tl.minimum(chosen, V - 1).to(tl.int64))
        threshold = float("inf")
    else:  # of logits that are not finite, too: inf says that there is a draw
        threshold = tl.minimum(threshold, 3.4028234663852886e38)
    tl.store(threshold_ptr + row, threshold)


def limited(out: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [S]: the smallest logit that top-k, top-p and min-p keep, or inf where the token in `out` is drawn."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    threshold = torch.empty(num_rows, dtype=torch.float32, device=device)
    _limit_kernel[(num_rows,)](
        out,
        threshold,
        torch.empty(num_rows, _CANDIDATES, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        logits,
        rows.temperature,
        rows.seeds,
        rows.choices,
        rows.output_index,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        logits.stride(0),
        V=vocab_size,
        TOP_K=rows.top_k is not None,
        TOP_P=rows.top_p is not None,
        MIN_P=rows.min_p is not None,
        SHIFT={torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
        CANDIDATES=_CANDIDATES,
        GATHERED=_GATHERED,
        BLOCK=min(4096, triton.next_power_of_2(vocab_size)),
        num_warps=16 if vocab_size > 4096 else 4,
        **overlapped(device),
    )
    return threshold
