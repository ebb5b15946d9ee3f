"""RMSNorm and LayerNorm, alone and fused with the residual add, and an MLP's gated activation; once or twice a layer.

One program owns a row (or a few short ones); statistics are float32 whatever the tensors hold.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty_like

from aserve_kernels.triton.launch import begin, overlapped


@triton.jit
def _norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    PDL: tl.constexpr,
):
    """RMSNorm, or with CENTER LayerNorm, of x, or with ADD of x + residual, which becomes the residual."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    offset = row[:, None] * SIZE + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if CENTER:
        bias = tl.load(bias_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    begin(PDL)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)  # the norm sees the residual as stored
        tl.store(residual_ptr + offset, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if CENTER:
        x = tl.where(mask, x - (tl.sum(x, axis=1) / SIZE)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    out = x * scale[:, None] * weight[None, :]
    if CENTER:
        out += bias[None, :]
    tl.store(out_ptr + offset, out, mask=mask)


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.contiguous()
    assert residual is None or residual.is_contiguous()  # it is written in place
    out = empty_like(x)
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(size)
    rows = max(1, min(8, 1024 // block))  # a head's norm packs several rows into a program
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        out,
        x,
        residual,
        weight,
        bias,
        num_rows,
        eps,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        ADD=residual is not None,
        CENTER=bias is not None,
        num_warps=max(1, min(16, block * rows // 512)),
        **overlapped(x.device),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ops.Kernels."""
    return _normed(x, None, weight, None, eps)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ops.Kernels."""
    return _normed(x, residual, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See ops.Kernels."""
    return _normed(x, None, weight, bias, eps)


def add_layer_norm_(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See ops.Kernels."""
    return _normed(x, residual, weight, bias, eps)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """relu, silu, gelu_tanh or gelu of float32 x."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":  # x / 2 (1 + tanh z) = x sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gated_kernel(
    out_ptr,
    gate_up_ptr,
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate_ptr = gate_up_ptr + row * 2 * size + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, activate(gate, ACTIVATION) * up, mask=mask)


def gated_mlp(gate_up: Tensor, activation: str) -> Tensor:
    """See ops.Kernels."""
    if activation not in ("silu", "gelu_tanh", "gelu"):
        raise ValueError(f"unknown activation {activation!r}")
    gate_up = gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        block = 512 if num_rows < 64 else 1024  # more programs where rows are few
        blocks = triton.cdiv(size, block)
        _gated_kernel[(num_rows * blocks,)](  # a grid's other axes end at 65,535, and experts have more rows
            out,
            gate_up,
            size,
            ACTIVATION=activation,
            BLOCK=block,
            BLOCKS=blocks,
            num_warps=4,
            **overlapped(out.device),
        )
    return out


@triton.jit
def _activate_kernel(x_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, activate(x, ACTIVATION), mask=at < size)


def activated_(x: Tensor, activation: str) -> Tensor:
    """The activation of contiguous x, in place."""
    if x.numel():
        _activate_kernel[(triton.cdiv(x.numel(), 2048),)](
            x, x.numel(), ACTIVATION=activation, BLOCK=2048, num_warps=8, **overlapped(x.device)
        )
    return x
