"""The draw: thresholds of top-k, top-p and min-p found by bisection, then Gumbel-max over what they keep.

The kept set of each option is "logits of at least t", so no sort is needed: t is found bit by bit, exactly, from counts
and masses above a pivot, over a few hundred candidates where those hold the kept set. Other draws split the vocabulary
over programs; the last of a row to finish takes the best of them all. Random numbers are those of ops.philox_uniform:
equal logits draw equal tokens on every backend.
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
_CANDIDATES = 2048  # words near a row's best that are kept at hand
_GATHERED = 512  # as many as that are asked for: ties and neighbours of one group may add some
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
        x = _load(logits_ptr, _at(ids_ptr, start, column, size, few, V), V)
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
        x = _load(logits_ptr, _at(ids_ptr, start, column, size, few, V), V)
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
def _gumbel(word):
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    return -tl.log(-_log(u))


@triton.jit
def _best_of(score, token):
    """Largest score and its token, the lowest of equals."""
    value = tl.max(score, axis=0)
    return value, tl.min(tl.where(score == value, token, 2147483647), axis=0)


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
        maxima = tl.maximum(maxima, _load(logits_ptr, start + column, V))
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
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            at = start + column
            x = _load(logits_ptr, at, V)
            near = (x >= reach) & (at < V)
            slot = tl.atomic_add(count_ptr + row + at * 0, 1, mask=near, sem="relaxed", scope="cta")
            tl.store(ids_ptr + slot, at, mask=near & (slot < CANDIDATES))
            if TOP_P:
                mass += tl.exp((x - best) / temperature)
        tl.debug_barrier()  # every thread's candidates are written
        count = tl.load(count_ptr + row, cache_modifier=".cg")
        total = tl.sum(mass, axis=0)
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
        score = tl.full([BLOCK], float("-inf"), tl.float32)
        token = tl.full([BLOCK], V, tl.int32)
        start = 0
        while start < size:
            at = _at(ids_ptr, start, column, size, few, V)
            x = _load(logits_ptr, at, V)
            found = tl.where(x >= threshold, x / temperature + _gumbel(_words(at, seed, index, choice)), float("-inf"))
            better = (found > score) | ((found == score) & (at < token))
            token = tl.where(better, at, token)
            score = tl.where(better, found, score)
            start += BLOCK
        _, chosen = _best_of(score, token)
        tl.store(out_ptr + row, tl.minimum(chosen, V - 1).to(tl.int64))
        threshold = float("inf")
    tl.store(threshold_ptr + row, threshold)


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
        if tl.load(threshold_ptr + row) == float("inf"):  # drawn by _limit_kernel
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


def _limited(out: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
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


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See ops.Kernels."""
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    limited = not rows.all_greedy and not (rows.top_k is None and rows.top_p is None and rows.min_p is None)
    threshold = _limited(out, logits, rows) if limited else rows.temperature
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
