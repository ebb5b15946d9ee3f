"""The CUDA backend with flash-attn-4's Hopper kernels for chunks; everything else is triton_ops'.

flash-attn-4 has no split-KV on Hopper, so rows of one token go to the Triton kernel, whatever else is in their step.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from aserve_kernels import triton_ops
from aserve_kernels.ops import AttentionMeta
from aserve_kernels.triton.split_kv import decode_attention
from aserve_kernels.triton_ops import (
    add_layer_norm_,
    add_rms_norm_,
    copy_blocks_,
    gated_mlp,
    gather_blocks,
    layer_norm,
    rms_norm,
    rotary_kv_write_,
    sample,
    scatter_blocks_,
)

# a variant takes seconds to compile and the library keeps none on disk unless told to before its import
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
from flash_attn.cute.interface import _flash_attn_fwd  # writes into a given tensor; no autograd

__all__ = [
    "add_layer_norm_",
    "add_rms_norm_",
    "copy_blocks_",
    "gated_mlp",
    "gather_blocks",
    "layer_norm",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write_",
    "sample",
    "scatter_blocks_",
]


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
    num_rows, num_decodes = meta.seq_lens.shape[0], meta.num_decodes
    if query.dtype == torch.float32 or num_decodes == num_rows or key_cache.shape[3] % 8 or sinks is not None:
        return triton_ops.paged_attention(query, key_cache, value_cache, meta, scale, window, softcap, sinks)
    query = query.contiguous()
    out = torch.empty_like(query)
    if num_decodes:
        decode_attention(out, query, key_cache, value_cache, meta, scale, window, softcap, None)
    _flash_attn_fwd(
        query,
        key_cache,
        value_cache,
        cu_seqlens_q=meta.query_starts[num_decodes:],  # they need not begin with token `num_decodes`
        max_seqlen_q=meta.max_query_len,
        seqused_k=meta.seq_lens[num_decodes:],
        max_seqlen_k=meta.max_seq_len,
        page_table=meta.block_tables[num_decodes:],
        softmax_scale=scale,
        causal=True,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        softcap=softcap or 0.0,
        out=out,
    )
    return out.view(query.shape[0], -1)
