"""The twins against naive float32 references."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from aserve_kernels import AttentionMeta, load, torch_ops


def test_the_module_has_every_kernel() -> None:
    kernels = load("torch")
    for name in torch_ops.__all__:
        assert callable(getattr(kernels, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_takes_its_statistics_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 64).mul_(30).to(dtype), torch.randn(64)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    got = torch_ops.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want.to(dtype).double(), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 8e-3
    )


def test_add_layer_norm_keeps_the_sum_in_the_residual() -> None:
    x, residual, weight, bias = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16), torch.randn(16)
    total = x + residual
    got = torch_ops.add_layer_norm_(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(residual, total)
    centred = total - total.mean(dim=1, keepdim=True)
    want = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(got, want)


def test_add_rms_norm_keeps_the_sum_in_the_residual() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    total = x + residual
    got = torch_ops.add_rms_norm_(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(got, torch_ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp_activates_the_first_half(activation: str) -> None:
    x = torch.randn(3, 20)
    gate, up = x[:, :10].double(), x[:, 10:].double()
    if activation == "silu":
        act = gate / (1 + (-gate).exp())
    elif activation == "gelu":
        act = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    else:
        act = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(torch_ops.gated_mlp(x, activation).double(), act * up, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="relu"):
        torch_ops.gated_mlp(x, "relu")


@pytest.mark.parametrize(("rotary_dim", "norm"), [(16, True), (16, False), (8, False)])
def test_rotary_rotates_q_and_k_and_writes_k_and_v_to_their_slots(rotary_dim: int, norm: bool) -> None:
    torch.manual_seed(1)
    num_heads, num_kv_heads, head_dim, tokens, block_size = 4, 2, 16, 7, 4
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.randint(0, 50, (tokens,))
    slots = torch.randperm(12 * block_size)[:tokens]
    angles = torch.arange(64).unsqueeze(1) * 10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = (torch.randn(head_dim), torch.randn(head_dim)) if norm else (None, None)
    key_cache = torch.zeros(13, block_size, num_kv_heads, head_dim)
    value_cache = torch.zeros_like(key_cache)
    q = torch_ops.rotary_kv_write_(
        qkv, positions, slots, cos_sin, key_cache, value_cache, num_heads, num_kv_heads, head_dim, *weights, 1e-6
    )

    def rotate(x: Tensor, token: int, weight: Tensor | None) -> Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.square().mean() + 1e-6).sqrt() * weight.double()
        out = x.clone()
        half = rotary_dim // 2
        for i in range(half):
            angle = int(positions[token]) * 10000 ** (-2 * i / rotary_dim)
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out.float()

    heads = qkv.view(tokens, -1, head_dim)
    for token in range(tokens):
        block, offset = divmod(int(slots[token]), block_size)
        for head in range(num_heads):
            torch.testing.assert_close(q[token, head], rotate(heads[token, head], token, weights[0]), atol=2e-5, rtol=0)
        for head in range(num_kv_heads):
            want = rotate(heads[token, num_heads + head], token, weights[1])
            torch.testing.assert_close(key_cache[block, offset, head], want, atol=2e-5, rtol=0)
            torch.testing.assert_close(value_cache[block, offset, head], heads[token, num_heads + num_kv_heads + head])
    written = torch.zeros(13 * block_size, dtype=torch.bool)
    written[slots] = True
    assert not key_cache.view(-1, num_kv_heads, head_dim)[~written].any()


def layout(
    rng: random.Random, contexts: list[int], counts: list[int], num_decodes: int, block_size: int
) -> tuple[AttentionMeta, int]:
    """Meta of rows whose last counts[r] of contexts[r] tokens are computed now, over shuffled blocks."""
    max_blocks = max((c + block_size - 1) // block_size for c in contexts) + 1
    num_blocks = max_blocks * len(contexts)
    free = list(range(num_blocks))
    rng.shuffle(free)
    tables = torch.tensor([[free.pop() for _ in range(max_blocks)] for _ in contexts], dtype=torch.int32)
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(contexts, counts, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(contexts)), torch.tensor(counts))
    slot_mapping = tables[rows, positions // block_size].long() * block_size + positions % block_size
    meta = AttentionMeta(
        num_decodes=num_decodes,
        positions=positions,
        slot_mapping=slot_mapping,
        query_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(counts),
        max_seq_len=max(contexts),
    )
    return meta, num_blocks


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_attention_equals_dense_attention_over_random_layouts(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_kv_heads, group, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([8, 32])
    block_size = rng.choice([1, 4, 16])
    window = rng.choice([None, 1, 5, 16, 40])
    softcap = rng.choice([None, None, 5.0])
    sinks = torch.randn(num_kv_heads * group).to(dtype) if seed % 3 == 0 else None
    num_decodes = rng.choice([0, 1, 5])
    chunks = rng.choice([0, 1, 3]) or (not num_decodes)
    counts = [1] * num_decodes + [rng.randint(1, 40) for _ in range(chunks)]
    contexts = [n + rng.choice([0, rng.randint(0, 60)]) for n in counts]
    meta, num_blocks = layout(rng, contexts, counts, num_decodes, block_size)
    shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
    key_cache, value_cache = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    query = torch.randn(sum(counts), num_kv_heads * group, head_dim).to(dtype)
    got = torch_ops.paged_attention(query, key_cache, value_cache, meta, 0.3, window, softcap, sinks)
    token = 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        flat = meta.block_tables[row].long()
        key = key_cache[flat].view(-1, num_kv_heads, head_dim).double()
        value = value_cache[flat].view(-1, num_kv_heads, head_dim).double()
        for position in range(context - count, context):
            low = max(0, position + 1 - window) if window else 0
            for head in range(num_kv_heads * group):
                scores = key[low : position + 1, head // group] @ query[token, head].double() * 0.3
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                weights = scores.softmax(0)
                if sinks is not None:
                    weights = torch.cat((scores, sinks[head : head + 1].double())).softmax(0)[:-1]
                want = weights @ value[low : position + 1, head // group]
                part = got[token, head * head_dim : (head + 1) * head_dim].double()
                torch.testing.assert_close(part, want, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=0)
            token += 1


def test_long_chunks_are_tiled_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    meta, num_blocks = layout(rng, [90, 33], [70, 33], 0, 16)
    caches = [torch.randn(num_blocks + 1, 16, 1, 16) for _ in range(2)]
    query = torch.randn(103, 2, 16)
    for window in (None, 20):
        whole = torch_ops.paged_attention(query, *caches, meta, 0.25, window)
        with monkeypatch.context() as patch:
            patch.setattr(torch_ops, "_QUERY_TILE", 16)
            tiled = torch_ops.paged_attention(query, *caches, meta, 0.25, window)
        torch.testing.assert_close(tiled, whole, atol=1e-6, rtol=0)


def test_block_copies_are_taken_before_any_is_written() -> None:
    caches = [torch.arange(6.0).view(6, 1, 1, 1).clone() for _ in range(2)]
    torch_ops.copy_blocks_(caches, torch.tensor([[0, 3], [3, 4]]))
    for cache in caches:
        assert cache.flatten().tolist() == [0, 1, 2, 0, 3, 5]


def test_gather_then_scatter_restores_blocks() -> None:
    caches = [torch.randn(6, 4, 2, 8) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    blocks = torch.tensor([4, 1])
    staged = torch_ops.gather_blocks(caches, blocks)
    assert staged.shape == (3, 2, 4, 2, 8)
    for cache in caches:
        cache[blocks] = 0
    torch_ops.scatter_blocks_(caches, blocks, staged)
    for cache, want in zip(caches, before, strict=True):
        assert torch.equal(cache, want)
