"""The pure-torch backend of ops.Kernels: the oracle of the CUDA kernels, and the CPU path.

Runs on any device. On CPU it reads tensor values to do less work (contexts as long as they are, only the words that
can win a draw); elsewhere it keeps to the host-side bounds of AttentionMeta, so that decode steps can be captured.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from aserve_kernels.ops import AttentionMeta
from aserve_kernels.torch_sample import sample

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

_QUERY_TILE = 512  # chunk tokens per attention call: bounds the mask and the scores


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * weight).div_(_root_mean_square(wide, eps)).to(x.dtype)


def _root_mean_square(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x^2) + eps) over the last dimension, kept: torch's own rms_norm takes ten times as long on CPU."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(x.shape[-1] ** -0.5).hypot_(_constant(math.sqrt(eps), x.device))


@functools.cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm_(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    residual += x
    return layer_norm(residual, weight, bias, eps)


def gated_mlp(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation not in ("gelu", "gelu_tanh"):
        raise ValueError(f"unknown activation {activation!r}")
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)


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
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    num_rotated = num_heads + num_kv_heads
    x = heads[:, :num_rotated].float()
    if q_weight is not None and k_weight is not None:
        x = x / _root_mean_square(x, eps)
        x[:, :num_heads] *= q_weight
        x[:, num_heads:] *= k_weight
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.index_select(0, positions).view(-1, 1, 2, half).chunk(2, dim=2)
    pairs = x[..., : 2 * half].view(*x.shape[:-1], 2, half)
    turned = pairs * cos
    turned[:, :, :1].addcmul_(pairs[:, :, 1:], sin, value=-1)
    turned[:, :, 1:].addcmul_(pairs[:, :, :1], sin)
    rotated = turned.flatten(-2) if 2 * half == head_dim else torch.cat((turned.flatten(-2), x[..., 2 * half :]), -1)
    rotated = rotated.to(qkv.dtype)
    key_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, rotated[:, num_heads:])
    value_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, heads[:, num_rotated:])
    return rotated[:, :num_heads]


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
    num_decodes = _num_decodes(meta)
    if num_decodes == query.shape[0]:
        return _decode_attention(query, key_cache, value_cache, meta, scale, window, softcap, sinks)
    out = torch.zeros(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
    if num_decodes:
        part = _decode_attention(query[:num_decodes], key_cache, value_cache, meta, scale, window, softcap, sinks)
        out[:num_decodes] = part
    for row, begin, end, context in _chunk_spans(meta):
        for low in range(begin, end, _QUERY_TILE):
            high = min(low + _QUERY_TILE, end)
            table = meta.block_tables[row]
            limit = context - (end - high)  # positions the tile's last token sees
            out[low:high] = _chunk_attention(
                query[low:high], key_cache, value_cache, table, limit, scale, window, softcap, sinks
            )
    return out


def _num_decodes(meta: AttentionMeta) -> int:
    """Rows of one token that are not missing."""
    found = meta.memo.get("num_decodes")
    if found is None:
        lens = meta.seq_lens[: meta.num_decodes]
        found = meta.memo["num_decodes"] = int(lens.count_nonzero()) if lens.device.type == "cpu" else len(lens)
    return int(found)


def _chunk_spans(meta: AttentionMeta) -> list[tuple[int, int, int, int]]:
    """(row, first token, end token, context length) of each chunk; read once per step."""
    spans = meta.memo.get("chunk_spans")
    if spans is None:
        starts, lens = meta.query_starts.tolist(), meta.seq_lens.tolist()
        rows = range(meta.num_decodes, len(lens))
        spans = [(row, starts[row], starts[row + 1], lens[row]) for row in rows if starts[row + 1] > starts[row]]
        meta.memo["chunk_spans"] = spans
    return spans


def _chunk_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    limit: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [n, Hq, D] at positions limit - n .. limit - 1 of one sequence -> [n, Hq * D]."""
    n, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    start = limit - n
    page = max(0, start + 1 - window) // block_size if window is not None else 0
    base = page * block_size
    pages = table[page : (limit + block_size - 1) // block_size]
    key = key_cache.index_select(0, pages).view(-1, num_kv_heads, head_dim)[: limit - base]
    value = value_cache.index_select(0, pages).view(-1, num_kv_heads, head_dim)[: limit - base]
    mask = None
    if start > base or (window is not None and limit - base > window):
        at = torch.arange(start, limit, device=query.device).unsqueeze(1)
        position = torch.arange(base, limit, device=query.device)
        mask = position <= at
        if window is not None:
            mask &= position > at - window
    # [Hk, G, n, D]: a KV head and the query heads it serves; keys broadcast over the group without a copy.
    group = num_heads // num_kv_heads
    q = query.view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k = key.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    v = value.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    if softcap is None and sinks is None and q.device.type == "cpu":
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    else:
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool, device=query.device).tril_()
        sinks = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
        out = _dense_attention(q, k, v, mask, scale, softcap, sinks)
    return out.permute(2, 0, 1, 3).reshape(n, num_heads * head_dim)


def _decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [B, Hq, D], one token per sequence -> [B, Hq * D]."""
    batch, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    pages, mask = _decode_pages(meta, key_cache.shape[1], window)
    key = key_cache.index_select(0, pages).view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
    value = value_cache.index_select(0, pages).view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
    q = query.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)  # the group's heads as query rows
    if softcap is None and sinks is None and q.device.type == "cpu":
        out = functional.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
    else:
        sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        out = _dense_attention(q, key, value, mask, scale, softcap, sinks)
    return out.reshape(batch, num_heads * head_dim)


def _decode_pages(meta: AttentionMeta, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Flat page ids of the decodes' visible contexts, and which of their positions each sees, [B, 1, 1, L].

    The same for every layer of a kind, so they are made once per step.
    """
    found = meta.memo.get(("decode_pages", window))
    if found is not None:
        return found  # type: ignore[no-any-return]
    num_decodes = _num_decodes(meta)
    seq_lens = meta.seq_lens[:num_decodes].long().unsqueeze(1)
    device = seq_lens.device
    longest = int(seq_lens.max()) if device.type == "cpu" else meta.max_seq_len
    num_pages = min((longest + block_size - 1) // block_size, meta.block_tables.shape[1])
    tables = meta.block_tables[:num_decodes]
    if window is not None and (window + block_size - 2) // block_size + 1 < num_pages:
        num_pages = (window + block_size - 2) // block_size + 1  # the most pages that `window` positions touch
        first = (seq_lens - window).clamp_(min=0) // block_size
        index = (first + torch.arange(num_pages, device=device)).clamp_(max=tables.shape[1] - 1)
        pages = tables.gather(1, index)
        position = first * block_size + torch.arange(num_pages * block_size, device=device)
    else:
        pages = tables[:, :num_pages]
        position = torch.arange(num_pages * block_size, device=device).unsqueeze(0)
    mask = position < seq_lens
    if window is not None:
        mask &= position >= seq_lens - window
    result = (pages.reshape(-1).long(), mask[:, None, None, :])
    meta.memo[("decode_pages", window)] = result
    return result


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """softmax(cap(query key^T scale)) value in float32; masks and sinks broadcast. [..., n, D] -> [..., n, D]."""
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = torch.tanh_(scores / softcap).mul_(softcap)
    scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return torch.matmul(weights, value.float()).to(query.dtype)


def copy_blocks_(caches: list[Tensor], pairs: Tensor) -> None:
    source, target = pairs.unbind(1)
    for cache in caches:
        cache[target] = cache[source]


def gather_blocks(caches: list[Tensor], blocks: Tensor) -> Tensor:
    return torch.stack([cache.index_select(0, blocks) for cache in caches])


def scatter_blocks_(caches: list[Tensor], blocks: Tensor, staged: Tensor) -> None:
    for cache, part in zip(caches, staged, strict=True):
        cache.index_copy_(0, blocks, part)
