"""A linear layer whose weight is laid out once for the device that reads it.

On CPU the weight is reordered for oneDNN at construction: plain `F.linear` reads bfloat16 weights at half the speed
that the memory gives. On CUDA a few tokens go to our own kernels, the rest to `F.linear`. Models build one per fused weight; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from aserve_kernels.huge_pages import use_huge_pages

_PACK_ROWS = 64  # the batch size that oneDNN chooses the layout for; measured good from 1 to 512 rows


class PackedLinear:
    """y = x weight^T + bias for weight [out, in]. The packed weight is a private copy: drop the original."""

    __slots__ = ("_linear", "bias", "in_features", "out_features", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed: Tensor | None = None
        self.weight: Tensor | None = weight
        self._linear: Callable[..., Tensor] = functional.linear
        if weight.device.type == "cuda":
            from aserve_kernels.triton.linear import linear

            self._linear = linear
        if weight.device.type == "cpu" and _packs(weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
            use_huge_pages(torch.ops.mkldnn.data_ptr(self.packed), torch.ops.mkldnn._nbytes(self.packed))
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype, accumulated in float32."""
        if self.packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return out
        assert self.weight is not None
        return self._linear(x, self.weight, self.bias)


def _packs(dtype: torch.dtype) -> bool:
    """True where oneDNN has a packed product for this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
