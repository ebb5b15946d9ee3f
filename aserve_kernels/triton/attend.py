"""What both attention kernels share: the online softmax over a row's KV pages, and the constants it is compiled with.

split_kv.py and attention.py build on it. Query heads that share a KV head are packed into one tile, so each key and
value is read once. The softmax is FlashAttention-2's (Dao, 2023).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.launch import overlapped

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,
    position,
    low,
    high,
    kv_head,
    key_ptr,
    value_ptr,
    table_ptr,
    scale,
    window,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax of q [BLOCK_M, BLOCK_D] at `position` [BLOCK_M] over context [low, high).

    Returns the unnormalized output, the sum of weights, and the maximum score in base 2.
    """
    d = tl.arange(0, BLOCK_D)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < high
        page = tl.load(table_ptr + n // PAGE, mask=inside, other=0).to(tl.int64)
        offset = ((page * PAGE + n % PAGE) * NUM_KV_HEADS + kv_head) * D
        mask = inside[:, None] & (d < D)[None, :]
        # unread rows are zero, never what the pool holds: a weight of 0 times NaN is NaN
        k = tl.load(key_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        visible = inside[None, :] & (n[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        score = tl.where(visible, score * LOG2E, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, axis=1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen nothing yet
        weight = tl.exp2(score - base[:, None])
        rescale = tl.exp2(maximum - base)
        total = total * rescale + tl.sum(weight, axis=1)
        v = tl.load(value_ptr + offset[:, None] + d[None, :], mask=mask, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
    return acc, total, maximum


@triton.jit
def with_sink(acc, total, maximum, sink):
    """What `attend` returns, with one more position of score `sink` [BLOCK_M] whose value is zero."""
    sink = sink.to(tl.float32) * LOG2E
    new_maximum = tl.maximum(maximum, sink)
    rescale = tl.exp2(maximum - new_maximum)
    return acc * rescale[:, None], total * rescale + tl.exp2(sink - new_maximum), new_maximum


def attention_constants(
    query: Tensor, key_cache: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> tuple[int, dict[str, Any], tuple[int, float]]:
    """Group size, compile-time constants and the two scalars that both kernels take."""
    num_kv_heads, head_dim = key_cache.shape[2], key_cache.shape[3]
    constants = dict(
        GROUP=query.shape[1] // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PAGE=key_cache.shape[1],
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        PRECISION="ieee",
        **overlapped(query.device),
    )
    return constants["GROUP"], constants, (window or 0, softcap or 1.0)
