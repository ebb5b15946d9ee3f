"""The CUDA backend with flash-attn-4's Hopper kernels for chunks; everything else is triton_ops'.

flash-attn-4 has no split-KV on Hopper, so rows of one token go to the Triton kernel unless chunks share their step: then
one call for all rows is the quickest, except where the decodes are too few to fill the card with contexts too long for
one program each.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from aserve_kernels import triton_ops
from aserve_kernels.ops import AttentionMeta
from aserve_kernels.triton.attention import decode_attention
from aserve_kernels.triton_ops import (
    add_rms_norm_,
    copy_blocks_,
    gated_mlp,
    gather_blocks,
    rms_norm,
    rotary_kv_write_,
    sample,
    scatter_blocks_,
)

# a variant takes seconds to compile and the library keeps none on disk unless told to before its import
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
from flash_attn.cute import flash_attn_varlen_func  # noqa: E402

__all__ = [
    "add_rms_norm_",
    "copy_blocks_",
    "gated_mlp",
    "gather_blocks",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write_",
    "sample",
    "scatter_blocks_",
]

_FEW_DECODES = 128  # (row, KV head) pairs: about one per multiprocessor
_LONG_CONTEXT = 1024  # tokens: from here on one program per pair is slower than a second launch


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See ops.Kernels."""
    num_rows, num_decodes = meta.seq_lens.shape[0], meta.num_decodes
    if query.dtype == torch.float32 or num_decodes == num_rows or key_cache.shape[3] % 8:
        return triton_ops.paged_attention(query, key_cache, value_cache, meta, scale, window, softcap)
    few = num_decodes * key_cache.shape[2] <= _FEW_DECODES
    apart = num_decodes if few and meta.max_seq_len >= _LONG_CONTEXT else 0
    chunks = flash_attn_varlen_func(
        query[apart:],
        key_cache,
        value_cache,
        cu_seqlens_q=_starts_after(meta, apart),
        max_seqlen_q=meta.max_query_len,
        seqused_k=meta.seq_lens[apart:],
        max_seqlen_k=meta.max_seq_len,
        page_table=meta.block_tables[apart:],
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    if isinstance(chunks, tuple):
        chunks = chunks[0]
    if apart == 0:
        return chunks.reshape(query.shape[0], -1)
    out = torch.empty_like(query)
    decode_attention(out, query, key_cache, value_cache, meta, scale, window, softcap)
    out[apart:] = chunks
    return out.view(query.shape[0], -1)


def _starts_after(meta: AttentionMeta, apart: int) -> Tensor:
    """query_starts of rows [apart, R), from 0; made once a step."""
    if apart == 0:
        return meta.query_starts
    starts = meta.memo.get("flash_starts")
    if starts is None:
        starts = meta.memo["flash_starts"] = meta.query_starts[apart:] - apart
    return starts  # type: ignore[no-any-return]
