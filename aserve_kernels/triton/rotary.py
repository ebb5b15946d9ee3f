"""What lies between the QKV product and attention, in one pass: per-head norms, rotary embedding, KV write.

A program owns a token and a few heads. It reads each element and its rotary partner (the second read hits the
cache), so that any head size and any partial rotary size take one code path.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.launch import begin, overlapped


@triton.jit
def _rotary_kv_write_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    qkv_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    groups: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    exists = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (d < D)[None, :]

    half: tl.constexpr = ROTARY // 2
    position = tl.load(positions_ptr + token)  # positions, slots and tables are older than the kernel before
    angle = cos_sin_ptr + position * ROTARY + d % half
    cos = tl.load(angle, mask=d < ROTARY, other=1.0)
    sin = tl.load(angle + half, mask=d < ROTARY, other=0.0)
    sin = tl.where(d < half, -sin, sin)
    slot = tl.load(slot_mapping_ptr + token) * NUM_KV_HEADS
    begin(PDL)
    partner_d = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    row_ptr = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * D
    x = tl.load(row_ptr + d[None, :], mask=exists, other=0.0).to(tl.float32)
    partner = tl.load(row_ptr + partner_d[None, :], mask=exists, other=0.0).to(tl.float32)

    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
        q_weight = tl.load(q_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])
        q_weight = tl.load(q_weight_ptr + partner_d, mask=d < D, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + partner_d, mask=d < D, other=0.0).to(tl.float32)
        partner_weight = tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])
        is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        x = tl.where(is_value, x, x * scale[:, None] * weight)
        partner = tl.where(is_value, partner, partner * scale[:, None] * partner_weight)

    rotated = x * cos[None, :] + partner * sin[None, :]

    tl.store(
        query_ptr + (token * NUM_HEADS + head[:, None]) * D + d[None, :],
        rotated,
        mask=exists & is_query[:, None],
    )
    key_head = head - NUM_HEADS
    tl.store(key_cache_ptr + (slot + key_head[:, None]) * D + d[None, :], rotated, mask=exists & is_key[:, None])
    value_head = key_head - NUM_KV_HEADS
    tl.store(
        value_cache_ptr + (slot + value_head[:, None]) * D + d[None, :],
        x,
        mask=exists & (value_head >= 0)[:, None],
    )


def rotary_kv_write_(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """See ops.Kernels. The caches must be contiguous."""
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight come together")
    assert key_cache.is_contiguous() and value_cache.is_contiguous() and cos_sin.is_contiguous()
    qkv = qkv.contiguous()
    num_tokens, total_heads = qkv.shape[0], num_heads + 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return query
    heads = 2 if num_tokens * total_heads <= 4096 else 8
    block_d = triton.next_power_of_2(head_dim)
    _rotary_kv_write_kernel[(num_tokens * triton.cdiv(total_heads, heads),)](  # a grid's other axes end at 65,535
        query,
        key_cache,
        value_cache,
        qkv,
        positions,
        slot_mapping,
        cos_sin,
        q_weight,
        k_weight,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        BLOCK_D=block_d,
        ROTARY=cos_sin.shape[1],
        HEADS=heads,
        NORM=q_weight is not None,
        num_warps=1 if heads * block_d <= 512 else 4,
        **overlapped(query.device),
    )
    return query
