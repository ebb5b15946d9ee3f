"""Paged attention of single-token rows, a long context split over several programs (Flash-Decoding, 2023).

attention.py and flash_ops.py call it. The grid is fixed by the batch size, the split sizes by the lengths on the
device, so that one captured graph serves any lengths; programs without work leave at once, and the last of a row to
finish combines the others' partial results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from aserve_kernels.ops import AttentionMeta
from aserve_kernels.triton.attend import attend, attention_constants, with_sink
from aserve_kernels.triton.launch import begin, prefetch

_arrivals = WeakTensorKeyDictionary()  # key cache -> int32 counters of finished splits; zero between launches


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    unit,
    active,
    d,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The splits' results weighted by their share of the softmax, read past the L1 cache; in order, so that equal
    inputs give equal bits."""
    m = tl.arange(0, BLOCK_M)
    split = tl.arange(0, SPLITS)
    first = unit * SPLITS * GROUP
    mask = (split < active)[:, None] & (m < GROUP)[None, :]
    lses = tl.load(
        lse_ptr + first + split[:, None] * GROUP + m[None, :], mask=mask, other=float("-inf"), cache_modifier=".cg"
    )
    maximum = tl.max(lses, axis=0)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp2(lses - maximum[None, :]), axis=0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for other in tl.range(0, active, loop_unroll_factor=4):
        slot = first + other * GROUP + m
        lse = tl.load(lse_ptr + slot, mask=m < GROUP, other=float("-inf"), cache_modifier=".cg")
        part_ptr = partial_ptr + slot[:, None] * D + d[None, :]
        part = tl.load(part_ptr, mask=(m < GROUP)[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
        acc += tl.exp2(lse - maximum)[:, None] * part
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _decode_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    sinks_ptr,
    table_ptr,
    seq_lens_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    table_stride,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    # lengths, page tables and all but the newest token's keys and values are older than the kernel before this one
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    low = 0
    if WINDOW:
        low = tl.maximum(seq_len - window, 0) // BLOCK_N * BLOCK_N
    size = tl.maximum(tl.cdiv(tl.cdiv(seq_len - low, SPLITS), BLOCK_N) * BLOCK_N, MIN_SPLIT)
    active = tl.cdiv(seq_len - low, size)
    if split >= active:  # all of them where the row is missing: it has no context
        begin(PDL)  # a program that ends without waiting would let the next kernel overtake the one before
        return

    table_ptr += row.to(tl.int64) * table_stride
    start = low + split * size
    if PDL:
        n = start + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + n // PAGE, mask=n < seq_len, other=0).to(tl.int64)
        at = ((page * PAGE + n % PAGE) * NUM_KV_HEADS + kv_head) * D
        line = tl.minimum(tl.arange(0, BLOCK_D // 64 if BLOCK_D > 64 else 1) * 64, D - 1)  # 128 bytes of half types
        prefetch(key_ptr + at[:, None] + line[None, :])
        prefetch(value_ptr + at[:, None] + line[None, :])
    begin(PDL)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m < GROUP)[:, None] & (d < D)[None, :]
    head = row.to(tl.int64) * NUM_KV_HEADS * GROUP + kv_head * GROUP + m
    offset = head[:, None] * D + d[None, :]
    q = tl.load(query_ptr + offset, mask=mask, other=0.0)
    acc, total, maximum = attend(
        q,
        tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1),
        start,
        tl.minimum(start + size, seq_len),
        kv_head,
        key_ptr,
        value_ptr,
        table_ptr,
        scale,
        window,
        softcap,
        NUM_KV_HEADS,
        D,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
        PAGE,
        WINDOW,
        SOFTCAP,
        PRECISION,
    )
    if SINKS and split == 0:  # one of the splits counts it for all
        sink = tl.load(sinks_ptr + kv_head * GROUP + m, mask=m < GROUP, other=0.0)
        acc, total, maximum = with_sink(acc, total, maximum, sink)
    normal = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS == 1:  # noqa: SIM114  (decided while compiling)
        tl.store(out_ptr + offset, normal.to(out_ptr.dtype.element_ty), mask=mask)
    elif active <= 1:
        tl.store(out_ptr + offset, normal.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        # one partial result per split: [row, kv head, split, group, D], with the log of its weight beside it
        unit = row.to(tl.int64) * NUM_KV_HEADS + kv_head
        slot = (unit * SPLITS + split) * GROUP + m
        lse = tl.where(total > 0.0, maximum + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_ptr + slot[:, None] * D + d[None, :], normal, mask=mask)
        tl.store(lse_ptr + slot, lse, mask=m < GROUP)
        tl.debug_barrier()  # every thread's stores come before the arrival that publishes them
        if tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel", scope="gpu") == active - 1:
            tl.store(arrivals_ptr + unit, 0)
            acc = _combine(partial_ptr, lse_ptr, unit, active, d, D, BLOCK_D, GROUP, BLOCK_M, SPLITS)
            tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


def num_splits(num_rows: int, num_kv_heads: int, max_seq_len: int, min_split: int) -> int:
    """Programs per row and KV head: enough to fill the card with few rows, 16 at most from 8 rows up, and never
    more than the longest context has pieces of `min_split` tokens. With many rows, two, for the sake of long ones:
    each that has no work costs a little."""
    wanted = 2048 // (num_rows * num_kv_heads)
    least = 4 if num_rows * num_kv_heads < 512 else 2
    cap = 64 if num_rows < 8 else 16
    pieces = triton.cdiv(max_seq_len, min_split)
    return int(min(triton.next_power_of_2(max(wanted, least)), cap, triton.next_power_of_2(pieces)))


def _arrival_counters(key_cache: Tensor, count: int) -> Tensor:
    """Zeroed counters that outlive the launch (the kernel resets them). Made before a capture where possible: the
    runner warms every bucket up, largest first."""
    counters: Tensor | None = _arrivals.get(key_cache)
    if counters is None or counters.numel() < count:
        counters = torch.zeros(max(count, 4096), dtype=torch.int32, device=key_cache.device)
        if not (key_cache.is_cuda and torch.cuda.is_current_stream_capturing()):
            _arrivals[key_cache] = counters
    return counters


def _min_split(num_units: int) -> int:
    """Tokens below which a split is not worth its program, for this many (row, KV head) pairs."""
    return 256 if num_units <= 64 else 512


def _decode_tile(dtype: torch.dtype, block_d: int, num_units: int) -> dict[str, int]:
    """Tile and pipeline of the decode kernel, by what was fastest on an H200: fewer and larger steps where few
    programs run, more programs per multiprocessor where there are many."""
    if dtype == torch.float32:  # no matrix units: small tiles, or the registers spill
        return dict(BLOCK_N=16, num_warps=8, num_stages=3)
    if block_d > 128:
        return dict(BLOCK_N=32, num_warps=4, num_stages=3)
    return dict(BLOCK_N=128 if num_units <= 64 else 64, num_warps=4, num_stages=3)


def decode_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Rows [0, meta.num_decodes): one query token each, written to out[:num_decodes]."""
    rows = meta.num_decodes
    group, constants, scalars = attention_constants(query, key_cache, window, softcap, sinks)
    num_kv_heads, head_dim = constants["NUM_KV_HEADS"], constants["D"]
    min_split = _min_split(rows * num_kv_heads)
    span = meta.max_seq_len if window is None else min(meta.max_seq_len, window)
    splits = num_splits(rows, num_kv_heads, span, min_split)
    partial = lse = arrivals = out
    if splits > 1:
        partial = torch.empty(rows * num_kv_heads * splits * group * head_dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(rows * num_kv_heads * splits * group, dtype=torch.float32, device=out.device)
        arrivals = _arrival_counters(key_cache, rows * num_kv_heads)
    _decode_kernel[(num_kv_heads, splits, rows)](
        out,
        query,
        key_cache,
        value_cache,
        out if sinks is None else sinks.contiguous(),
        meta.block_tables,
        meta.seq_lens,
        partial,
        lse,
        arrivals,
        meta.block_tables.stride(0),
        scale,
        *scalars,
        **constants,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        SPLITS=splits,
        MIN_SPLIT=min_split,
        **_decode_tile(query.dtype, constants["BLOCK_D"], rows * num_kv_heads),
    )
