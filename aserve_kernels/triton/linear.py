"""Linear layers of a few tokens, where reading the weight is all the time there is.

A program owns a few output features and streams their weight rows once. With programmatic dependent launch the first
rows are on their way before the kernel that makes the input has ended, which a library's GEMM cannot do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from aserve_kernels.triton.launch import begin, overlapped

MAX_TOKENS = 16


@triton.jit
def _prefetch(pointers):
    """Starts moving the lines at `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _vector_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_outputs,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One or two tokens: multiply and add in float32, no matrix units."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + n[:, None] * K + k[None, :]
    exists = (n < num_outputs)[:, None]
    w = tl.load(rows, mask=exists & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    begin(PDL)
    first = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    acc = w.to(tl.float32) * first[None, :]
    if TOKENS == 2:
        second = tl.load(x_ptr + K + k, mask=k < K, other=0.0).to(tl.float32)
        acc_second = w.to(tl.float32) * second[None, :]
    for start in tl.range(BLOCK_K, K, BLOCK_K):
        inside = start + k < K
        w = tl.load(rows + start, mask=exists & inside[None, :], other=0.0, eviction_policy="evict_first")
        first = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * first[None, :]
        if TOKENS == 2:
            second = tl.load(x_ptr + K + start + k, mask=inside, other=0.0).to(tl.float32)
            acc_second += w.to(tl.float32) * second[None, :]
    mask = n < num_outputs
    bias = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, tl.sum(acc, axis=1) + bias, mask=mask)
    if TOKENS == 2:
        tl.store(out_ptr + num_outputs + n, tl.sum(acc_second, axis=1) + bias, mask=mask)


@triton.jit
def _few_tokens_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_tokens,
    num_outputs,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to MAX_TOKENS tokens: the weight tile is the left operand, the tokens are its few columns."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + n[:, None] * K
    exists = (n < num_outputs)[:, None]
    if PDL:
        line = tl.arange(0, BLOCK_K * 2 // 64) * 64  # the first two tiles, a pointer for each 128 bytes
        _prefetch(rows + tl.minimum(line, K - 1)[None, :])
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inside = start + k < K
        w = tl.load(rows + (start + k)[None, :], mask=exists & inside[None, :], other=0.0)
        x = tl.load(
            x_ptr + t[None, :] * K + (start + k)[:, None],
            mask=(t < num_tokens)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(w, x, acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + t[None, :] * num_outputs + n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(t < num_tokens)[None, :] & exists,
    )


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, **tuning: int) -> Tensor:
    """x [T, K] times weight [N, K] transposed, for T <= MAX_TOKENS in bfloat16 or float16."""
    num_tokens, size = x.shape
    num_outputs = weight.shape[0]
    x = x.contiguous()
    out = x.new_empty(num_tokens, num_outputs)
    common = dict(K=size, BIAS=bias is not None, **overlapped(x.device))
    if num_tokens <= 2 and not tuning.pop("dot", 0):
        block_k = min(triton.next_power_of_2(size), tuning.get("BLOCK_K", 1024))
        block_n = tuning.get("BLOCK_N", 4 if num_outputs <= 2048 else 16)
        _vector_kernel[(triton.cdiv(num_outputs, block_n),)](
            out,
            x,
            weight,
            bias,
            num_outputs,
            TOKENS=num_tokens,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=tuning.get("num_warps", 4),
            num_stages=tuning.get("num_stages", 3),
            **common,
        )
        return out
    block_n = tuning.get("BLOCK_N", 16 if num_outputs <= 4096 else 64)
    _few_tokens_kernel[(triton.cdiv(num_outputs, block_n),)](
        out,
        x,
        weight,
        bias,
        num_tokens,
        num_outputs,
        BLOCK_T=8 if num_tokens <= 8 else 16,
        BLOCK_N=block_n,
        BLOCK_K=tuning.get("BLOCK_K", 128),
        num_warps=tuning.get("num_warps", 4),
        num_stages=tuning.get("num_stages", 5),
        **common,
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] -> [..., N]: small_linear for a few tokens, the library's GEMM otherwise."""
    if x.dim() != 2 or x.shape[0] > MAX_TOKENS or x.dtype == torch.float32 or not weight.is_contiguous():
        return functional.linear(x, weight, bias)
    return small_linear(x, weight, bias)
