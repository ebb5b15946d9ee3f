"""Paged attention: tiles of packed query heads for chunks, split_kv.py for single-token rows.

triton_ops.py takes `paged_attention` from here. A program has one tile of a row's queries and walks the pages that they
see; which row it is of is found on the device, so that the grid depends on the number of tokens alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.ops import AttentionMeta
from aserve_kernels.triton.attend import attend, attention_constants, with_sink
from aserve_kernels.triton.launch import begin
from aserve_kernels.triton.split_kv import decode_attention


@triton.jit
def _chunk_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    sinks_ptr,
    table_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    num_rows,
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
    PDL: tl.constexpr,
):
    begin(PDL)
    # Row r's tiles begin at floor(its first packed query / BLOCK_M) + r: enough for each row, and found by bisection
    tile = tl.program_id(1)
    kv_head = tl.program_id(0)
    first = tl.load(query_starts_ptr)
    low = 0
    high = num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(query_starts_ptr + middle) - first) * GROUP // BLOCK_M + middle
        if begins <= tile:
            low = middle
        else:
            high = middle - 1
    row = low
    query_start = tl.load(query_starts_ptr + row)
    query_len = tl.load(query_starts_ptr + row + 1) - query_start
    tile -= (query_start - first) * GROUP // BLOCK_M + row
    if tile * BLOCK_M >= query_len * GROUP:
        return

    seq_len = tl.load(seq_lens_ptr + row)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // GROUP
    mask = (token < query_len)[:, None] & (d < D)[None, :]
    head = (query_start + token).to(tl.int64) * NUM_KV_HEADS * GROUP + kv_head * GROUP + m % GROUP
    offset = head[:, None] * D + d[None, :]
    q = tl.load(query_ptr + offset, mask=mask, other=0.0)
    before = seq_len - query_len
    position = before + token
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
    start = 0
    if WINDOW:
        start = tl.maximum(before + tile * BLOCK_M // GROUP - window + 1, 0) // BLOCK_N * BLOCK_N
    acc, total, maximum = attend(
        q,
        position,
        start,
        before + last + 1,
        kv_head,
        key_ptr,
        value_ptr,
        table_ptr + row.to(tl.int64) * table_stride,
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
    if SINKS:
        sink = tl.load(sinks_ptr + kv_head * GROUP + m % GROUP)
        acc, total, maximum = with_sink(acc, total, maximum, sink)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _chunk_tile(dtype: torch.dtype, block_d: int) -> dict[str, int]:
    if dtype == torch.float32:
        return dict(BLOCK_M=32, BLOCK_N=16, num_warps=8, num_stages=1)
    if block_d > 128:
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    return dict(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=3)


def chunk_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    first_row: int,
) -> None:
    """Rows [first_row, R), any number of query tokens each; query and out hold all T tokens."""
    num_rows = meta.seq_lens.shape[0] - first_row
    group, constants, scalars = attention_constants(query, key_cache, window, softcap, sinks)
    tile = _chunk_tile(query.dtype, constants["BLOCK_D"])
    block_m = tile["BLOCK_M"]
    tiles = query.shape[0] * group // block_m + num_rows  # rows before first_row may be missing
    _chunk_kernel[(constants["NUM_KV_HEADS"], tiles)](
        out,
        query,
        key_cache,
        value_cache,
        out if sinks is None else sinks.contiguous(),
        meta.block_tables[first_row:],
        meta.seq_lens[first_row:],
        meta.query_starts[first_row:],
        num_rows,
        meta.block_tables.stride(0),
        scale,
        *scalars,
        **constants,
        **tile,
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See ops.Kernels."""
    assert key_cache.is_contiguous() and value_cache.is_contiguous()
    query = query.contiguous()
    out = torch.empty_like(query)
    if meta.num_decodes:
        decode_attention(out, query, key_cache, value_cache, meta, scale, window, softcap, sinks)
    if meta.seq_lens.shape[0] > meta.num_decodes:
        chunk_attention(
            out, query, key_cache, value_cache, meta, scale, window, softcap, sinks, first_row=meta.num_decodes
        )
    return out.view(query.shape[0], -1)
