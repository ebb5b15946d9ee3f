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

from aserve_kernels.triton import wide
from aserve_kernels.triton.launch import begin, overlapped, prefetch
from aserve_kernels.triton.norm import activate, activated_, gated_mlp

MAX_TOKENS = 64  # the library's GEMM is as quick from here on


@triton.jit
def _vector_kernel(
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
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiplies and adds in float32, no matrix units: fastest where arithmetic hides behind the weight's bytes.

    An ACTIVATION is applied before the store; GATED, the weight is [gate | up] and gate's is multiplied by up.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    rows = weight_ptr + n[:, None] * K + k[None, :]
    up_rows = rows + num_outputs.to(tl.int64) * K
    tokens = x_ptr + t[:, None] * K + k[None, :]
    exists = (n < num_outputs)[:, None]
    present = (t < num_tokens)[:, None]
    w = tl.load(rows, mask=exists & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if GATED:
        up_w = tl.load(up_rows, mask=exists & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    begin(PDL)
    x = tl.load(tokens, mask=present & (k < K)[None, :], other=0.0).to(tl.float32)
    acc = w.to(tl.float32)[None, :, :] * x[:, None, :]
    if GATED:
        up_acc = up_w.to(tl.float32)[None, :, :] * x[:, None, :]
    for start in tl.range(BLOCK_K, K, BLOCK_K):
        inside = (start + k < K)[None, :]
        w = tl.load(rows + start, mask=exists & inside, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_w = tl.load(up_rows + start, mask=exists & inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(tokens + start, mask=present & inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32)[None, :, :] * x[:, None, :]
        if GATED:
            up_acc += up_w.to(tl.float32)[None, :, :] * x[:, None, :]
    out = tl.sum(acc, axis=2)
    if BIAS:
        out += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(up_acc, axis=2)
        if BIAS:
            up += tl.load(bias_ptr + num_outputs + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
        out = activate(out, ACTIVATION) * up
    elif ACTIVATION is not None:
        out = activate(out, ACTIVATION)
    mask = present & (n < num_outputs)[None, :]
    tl.store(out_ptr + t[:, None] * num_outputs + n[None, :], out, mask=mask)


@triton.jit
def _matrix_kernel(
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
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same on the matrix units: the weight tile is the left operand, the tokens are its few columns."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + n[:, None] * K
    up_rows = rows + num_outputs.to(tl.int64) * K
    exists = (n < num_outputs)[:, None]
    if PDL:
        line = tl.minimum(tl.arange(0, BLOCK_K * 2 // 64) * 64, K - 1)  # two tiles, a pointer for each 128 bytes
        last = (num_outputs - 1).to(tl.int64)
        prefetch(weight_ptr + tl.minimum(n, last)[:, None] * K + line[None, :])
        if GATED:
            prefetch(weight_ptr + (tl.minimum(n, last) + num_outputs)[:, None] * K + line[None, :])
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inside = start + k < K
        w = tl.load(rows + (start + k)[None, :], mask=exists & inside[None, :], other=0.0)
        x = tl.load(
            x_ptr + t[None, :] * K + (start + k)[:, None],
            mask=(t < num_tokens)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(w, x, acc)
        if GATED:
            up_w = tl.load(up_rows + (start + k)[None, :], mask=exists & inside[None, :], other=0.0)
            up_acc = tl.dot(up_w, x, up_acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up_acc += tl.load(bias_ptr + num_outputs + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, ACTIVATION) * up_acc
    elif ACTIVATION is not None:
        acc = activate(acc, ACTIVATION)
    tl.store(
        out_ptr + t[None, :] * num_outputs + n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(t < num_tokens)[None, :] & exists,
    )


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    *,
    gated: bool | int = False,
    vector: bool | int,
    **tile: int,
) -> Tensor:
    """act(x weight^T + bias) for x [T, K] with T <= MAX_TOKENS and weight [N, K], by either kernel, given its tile.

    Gated, act(x G^T + g) * (x U^T + u) for weight [N, K] = [G | U].
    """
    num_tokens, size = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(num_tokens, num_outputs)
    tile["BLOCK_K"] = min(triton.next_power_of_2(size), tile["BLOCK_K"])
    (_vector_kernel if vector else _matrix_kernel)[(triton.cdiv(num_outputs, tile["BLOCK_N"]),)](
        out,
        x.contiguous(),
        weight,
        bias,
        num_tokens,
        num_outputs,
        K=size,
        BLOCK_T=triton.next_power_of_2(num_tokens) if vector else max(8, triton.next_power_of_2(num_tokens)),
        BIAS=bias is not None,
        ACTIVATION=activation,
        GATED=gated,
        **tile,
        **overlapped(x.device),
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """act(x weight^T + bias), x [..., K] -> [..., N], by the kernel that is quickest for so many tokens."""
    if _is_small(x, weight):
        tile = _tile(x.shape[0], *weight.shape)
        if tile is not None:
            return small_linear(x, weight, bias, activation, **tile)
    elif weight.shape[0] <= 1024 and weight.shape[1] <= 4096 and wide.takes(x, weight):
        return wide.linear(x, weight, bias, activation, tokens=64, outputs=32, depth=256, warps=4)
    out = functional.linear(x, weight, bias)
    return out if activation is None else activated_(out, activation)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(x G^T + g) * (x U^T + u) for weight [2 F, K] = [G | U]: one kernel for one token or many, else two."""
    if x.shape[0] == 1 and _is_small(x, weight):
        tile = _tile(1, *weight.shape)
        assert tile is not None
        tile["BLOCK_N"] //= 2  # as many rows of weight in a program as without an activation
        return small_linear(x, weight, bias, activation, gated=True, **tile)
    full = x.shape[0] > MAX_TOKENS and -x.shape[0] % 128 < 32  # the library's tiles fit other counts better
    if full and weight.shape[0] >= 16384 and wide.takes(x, weight):
        return wide.linear(x, weight, bias, activation, gated=True, tokens=128, outputs=128, depth=64, warps=8)
    return gated_mlp(linear(x, weight, bias), activation)


def _is_small(x: Tensor, weight: Tensor) -> bool:
    few = x.dim() == 2 and 0 < x.shape[0] <= MAX_TOKENS
    return few and x.dtype != torch.float32 and weight.is_contiguous()


def _tile(num_tokens: int, num_outputs: int, size: int) -> dict[str, int] | None:
    """The quickest kernel and tile of those tried on an H200 (docs/LOG.md), or None where the library's is quicker.

    Up to 4224 outputs, programs of 32 run at once on its 132 multiprocessors; with more, two of 64 fit on each.
    """
    if num_tokens == 1:
        block_n = 2 if num_outputs <= 1024 else 4
        return dict(vector=True, BLOCK_N=block_n, BLOCK_K=2048 if size > 1024 else 512, num_warps=4, num_stages=3)
    if num_outputs <= 1024:
        if num_tokens <= 4:
            return dict(vector=True, BLOCK_N=4, BLOCK_K=1024, num_warps=4, num_stages=3)
        if num_tokens <= 16:
            return dict(vector=False, BLOCK_N=32, BLOCK_K=512, num_warps=4, num_stages=4 if num_tokens <= 8 else 3)
        return dict(vector=False, BLOCK_N=16, BLOCK_K=256, num_warps=4, num_stages=5)
    if num_outputs >= 24576 and (num_tokens > 16 or size <= 1024):
        return dict(vector=False, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4)
    if size <= 1024 and num_tokens <= 8:
        return dict(vector=False, BLOCK_N=64, BLOCK_K=256, num_warps=4, num_stages=6)
    if size > 1024 and num_outputs <= 4224:
        if num_tokens <= 16:
            return dict(vector=False, BLOCK_N=32, BLOCK_K=512, num_warps=4, num_stages=4)
        if num_tokens <= 32:
            return dict(vector=False, BLOCK_N=32, BLOCK_K=256, num_warps=4, num_stages=5)
        return dict(vector=False, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=6)
    if size > 8192 and num_tokens > 32:
        return None
    if size > 8192 and num_tokens > 16:
        return dict(vector=False, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=8)
    return dict(vector=False, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=6 if num_tokens <= 8 else 5)
