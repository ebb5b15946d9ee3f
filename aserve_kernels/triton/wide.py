"""Linear layers of 65 to 256 tokens, where the library's GEMM leaves time: few outputs, or a gate and its partner.

linear.py chooses. Tiles are moved by the tensor memory accelerator (Hopper), so that a few warps keep the matrix units
fed; as every kernel here, the launch overlaps the end of the one before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aserve_kernels.triton.launch import begin, overlapped
from aserve_kernels.triton.norm import activate

MAX_TOKENS = 256  # the library's tiles are full beyond


@triton.jit(do_not_specialize=["num_tokens"])  # one kernel for any batch size
def _wide_kernel(
    out_ptr,
    x_desc,
    weight_desc,
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
    """A tile of act(x weight^T + bias); GATED, the weight is [gate | up] and gate's is multiplied by up."""
    tiles = tl.cdiv(num_tokens, BLOCK_T)
    first_token = tl.program_id(0) % tiles * BLOCK_T  # neighbours share the weight's tile
    first_output = tl.program_id(0) // tiles * BLOCK_N
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    begin(PDL)
    for k in tl.range(0, K, BLOCK_K):
        x = x_desc.load([first_token, k])
        w = weight_desc.load([first_output, k])
        acc = tl.dot(x, w.T, acc)
        if GATED:
            up_w = weight_desc.load([num_outputs + first_output, k])
            up_acc = tl.dot(x, up_w.T, up_acc)
    t = first_token + tl.arange(0, BLOCK_T)
    n = first_output + tl.arange(0, BLOCK_N)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        acc = activate(acc, ACTIVATION)
    if GATED:
        if BIAS:
            up_acc += tl.load(bias_ptr + num_outputs + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
        acc *= up_acc
    mask = (t < num_tokens)[:, None] & (n < num_outputs)[None, :]
    tl.store(out_ptr + t[:, None] * num_outputs + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def takes(x: Tensor, weight: Tensor) -> bool:
    """True where `linear` can compute it: a half type on Hopper, rows at multiples of 16 bytes."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 8 == 0
        and weight.is_contiguous()
        and bool(overlapped(x.device)["PDL"])
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    gated: bool = False,
    tokens: int,
    outputs: int,
    depth: int,
    warps: int,
) -> Tensor:
    """act(x weight^T + bias), or gated act(x G^T + g) * (x U^T + u), in tiles of tokens x outputs x depth."""
    num_tokens, size = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(num_tokens, num_outputs)
    x = x.contiguous()
    _wide_kernel[(triton.cdiv(num_tokens, tokens) * triton.cdiv(num_outputs, outputs),)](
        out,
        TensorDescriptor.from_tensor(x, [tokens, depth]),
        TensorDescriptor.from_tensor(weight, [outputs, depth]),
        bias,
        num_tokens,
        num_outputs,
        K=size,
        BLOCK_T=tokens,
        BLOCK_N=outputs,
        BLOCK_K=depth,
        BIAS=bias is not None,
        ACTIVATION=activation,
        GATED=gated,
        num_warps=warps,
        num_stages=4,
        **overlapped(x.device),
    )
    return out
