"""Linear layers whose weights are laid out once for the device that reads them.

On CPU a weight is reordered for oneDNN at construction: plain `F.linear` reads bfloat16 weights at half the speed that
the memory gives. On CUDA a few tokens go to our own kernels, the rest to `F.linear`. Models build one per fused
weight; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from aserve_kernels.huge_pages import use_huge_pages

_PACK_ROWS = 64  # the batch size that oneDNN chooses the layout for; measured good from 1 to 512 rows
_LEAST_ROWS = 4  # oneDNN takes longer for one to three bfloat16 rows than for four


class PackedLinear:
    """y = act(x weight^T + bias) for weight [out, in]. The packed weight is a private copy: drop the original.

    `activation` is "relu", "silu", "gelu", "gelu_tanh" or None: applied as products are stored, where that can be.
    """

    __slots__ = ("_activation", "_linear", "bias", "in_features", "out_features", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._activation = activation
        self.packed: Tensor | None = None
        self.weight: Tensor | None = weight
        self._linear: Callable[..., Tensor] = _plain_linear
        if weight.device.type == "cuda":
            from aserve_kernels.triton.linear import linear

            self._linear = linear
        if packs(weight):
            self.packed = _pack(weight)
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype, accumulated in float32."""
        if self.packed is not None:
            name, variant = ("none", "") if self._activation is None else _ONEDNN_ACTIVATIONS[self._activation]
            out: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), self.packed, self.bias, name, [], variant)
            return out[: x.shape[0]]
        assert self.weight is not None
        return self._linear(x, self.weight, self.bias, self._activation)


def activate_(x: Tensor, activation: str) -> Tensor:
    """The activation of x; x may be overwritten."""
    match activation:
        case "relu":
            return x.relu_()
        case "silu":
            return functional.silu(x, inplace=True)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case _:
            raise ValueError(f"unknown activation {activation!r}")


def _plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    out = functional.linear(x, weight, bias)
    return out if activation is None else activate_(out, activation)


class GatedLinear:
    """act(x G^T + g) * (x U^T + u) for weight [2F, in] = [G | U], or G and U apart, and bias [2F] = [g | u].

    On CPU oneDNN activates and multiplies while it stores its products, and on CUDA our kernels do for one token
    and for some larger counts; otherwise `gated_mlp` (ops.Kernels') follows one product.
    """

    __slots__ = ("_activation", "_bias", "_few", "_fused", "_gate", "_gated_mlp", "_up")

    def __init__(
        self,
        weight: Tensor | tuple[Tensor, Tensor],
        bias: Tensor | None,
        activation: str,
        gated_mlp: Callable[[Tensor, str], Tensor],
    ) -> None:
        self._activation = activation
        self._gated_mlp = gated_mlp
        self._fused: PackedLinear | None = None
        gate, up = weight.chunk(2) if isinstance(weight, Tensor) else weight
        if packs(gate) and activation in _ONEDNN_ACTIVATIONS:
            self._gate, self._up = _pack(gate), _pack(up)
            self._bias = (None, None) if bias is None else bias.chunk(2)
        else:
            self._fused = PackedLinear(weight if isinstance(weight, Tensor) else torch.cat(weight), bias)
        self._few: Callable[..., Tensor] | None = None
        if gate.device.type == "cuda":
            from aserve_kernels.triton.linear import gated_linear

            self._few = gated_linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, F]."""
        if self._few is not None and self._fused is not None:
            return self._few(x, self._fused.weight, self._fused.bias, self._activation)
        if self._fused is not None:
            return self._gated_mlp(self._fused(x), self._activation)
        name, variant = _ONEDNN_ACTIVATIONS[self._activation]
        linear, padded = torch.ops.mkldnn._linear_pointwise, _padded(x)
        gate = linear(padded, self._gate, self._bias[0], name, [], variant)
        out: Tensor = linear.binary(padded, gate, self._up, self._bias[1], "mul")
        return out[: x.shape[0]]


_ONEDNN_ACTIVATIONS = {
    "relu": ("relu", None),
    "silu": ("swish", None),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}


def _padded(x: Tensor) -> Tensor:
    """x, with rows of zeros after it where that is quicker."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or not 0 < x.shape[0] < _LEAST_ROWS:
        return x
    return functional.pad(x, (0, 0, 0, _LEAST_ROWS - x.shape[0]))


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
    use_huge_pages(packed)
    return packed


def packs(weight: Tensor) -> bool:
    """True where oneDNN has a packed product for this weight on this processor."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
