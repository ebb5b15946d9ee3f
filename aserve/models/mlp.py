"""The gated MLP of a decoder's layer. decoder.py makes one per dense layer, moe.py one as a shared expert."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aserve.models.families import DecoderConfig
from aserve.models.weights import Weights
from aserve_kernels import Kernels
from aserve_kernels.linear import GatedLinear, PackedLinear


def gate_up_weight(
    weights: Weights, names: Sequence[str], rows: Sequence[int], columns: int
) -> Tensor | tuple[Tensor, Tensor]:
    """What GatedLinear takes: on the host gate and up apart, which it packs apart, else one fused matrix."""
    if weights.device.type == "cpu" and len(names) == 2:
        gate, up = (weights.matrix([name], [count], columns) for name, count in zip(names, rows, strict=True))
        return gate, up
    return weights.matrix(names, rows, columns)


class GatedMLP:
    """down(act(gate x) * up x), gate and up fused. Weights are found under `prefix`."""

    def __init__(
        self, config: DecoderConfig, prefix: str, intermediate_size: int, weights: Weights, kernels: Kernels
    ) -> None:
        names = [f"{prefix}.{name}" for name in config.gate_up_names]
        # the checkpoint may hold gate and up fused already
        rows = [intermediate_size] * 2 if len(names) == 2 else [2 * intermediate_size]
        self._gated = GatedLinear(
            gate_up_weight(weights, [f"{name}.weight" for name in names], rows, config.hidden_size),
            weights.vector([f"{name}.bias" for name in names], rows) if config.mlp_bias else None,
            config.activation,
            kernels.gated_mlp,
        )
        down, hidden_size = f"{prefix}.down_proj", config.hidden_size
        self._down = PackedLinear(
            weights.matrix([f"{down}.weight"], [hidden_size], intermediate_size),
            weights.vector([f"{down}.bias"], [hidden_size]) if config.mlp_bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._down(self._gated(x))
