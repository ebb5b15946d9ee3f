"""The mixture of experts that takes an MLP's place: Mixtral, Qwen2-MoE, Qwen3-MoE.

decoder.py makes one per sparse layer. On the host tokens are sorted by expert and each expert that has some computes
them; on CUDA one grouped product does, and nothing there reads device values, so that a step can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aserve.models.families import DecoderConfig, ExpertsConfig
from aserve.models.mlp import GatedMLP, gate_up_weight
from aserve.models.weights import Weights
from aserve_kernels import Kernels
from aserve_kernels.linear import GatedLinear, PackedLinear


class MoE:
    """Each token's `per_token` likeliest experts, weighed by the router's probabilities.

    `grouped` keeps the experts' weights in one tensor for the grouped product; None is on CUDA.
    """

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        prefix: str,
        weights: Weights,
        kernels: Kernels,
        *,
        grouped: bool | None = None,
    ) -> None:
        self._experts = experts
        self._activation = config.activation
        self._kernels = kernels
        self._router = weights.matrix([f"{prefix}.gate.weight"], [experts.num_experts], config.hidden_size)
        size, hidden_size = experts.intermediate_size, config.hidden_size
        gate_ups = [
            [f"{prefix}.experts.{index}.{name}.weight" for name in experts.gate_up_names]
            for index in range(experts.num_experts)
        ]
        downs = [f"{prefix}.experts.{index}.{experts.down_name}.weight" for index in range(experts.num_experts)]
        self._grouped = weights.device.type == "cuda" if grouped is None else grouped
        if self._grouped:
            names = [name for pair in gate_ups for name in pair]
            stacked = weights.matrix(names, [size] * len(names), hidden_size)
            self._gate_up = stacked.view(experts.num_experts, 2 * size, hidden_size)
            self._down = weights.matrix(downs, [hidden_size] * len(downs), size).view(-1, hidden_size, size)
        else:
            self._packed = [
                (
                    GatedLinear(
                        gate_up_weight(weights, pair, [size, size], hidden_size),
                        None,
                        config.activation,
                        kernels.gated_mlp,
                    ),
                    PackedLinear(weights.matrix([down], [hidden_size], size)),
                )
                for pair, down in zip(gate_ups, downs, strict=True)
            ]
        self._shared: GatedMLP | None = None
        if experts.shared_size:
            self._shared = GatedMLP(config, f"{prefix}.shared_expert", experts.shared_size, weights, kernels)
            self._shared_gate = weights.matrix([f"{prefix}.shared_expert_gate.weight"], [1], hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        shares, chosen = self.route(x)
        if not self._grouped:
            out = self._by_expert(x, shares, chosen)
        elif x.dtype == torch.bfloat16:
            out = self.by_group(x, shares, chosen)
        else:
            out = self.by_mask(x, shares, chosen)
        if self._shared is not None:
            out = out + functional.linear(x, self._shared_gate).sigmoid() * self._shared(x)
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares in x's dtype and experts, both [T, per_token]."""
        likely = functional.linear(x, self._router).softmax(dim=-1, dtype=torch.float32)
        shares, chosen = likely.topk(self._experts.per_token, dim=-1)
        if self._experts.normalize:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares.to(x.dtype), chosen

    def _by_expert(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """On the host: the tokens of one expert after another's, each token's sum in the order of its experts."""
        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self._experts.num_experts).tolist()
        start = 0
        for (gated, down), count in zip(self._packed, counts, strict=True):
            if count:
                pairs = order[start : start + count]
                tokens = pairs // self._experts.per_token
                part = down(gated(x[tokens]))
                out.index_add_(0, tokens, part * shares.flatten()[pairs].unsqueeze(1))
                start += count
        return out

    def by_group(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Grouped, in bfloat16: one product over all experts' tokens, whose counts stay on the device."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self._experts.num_experts, dtype=torch.int32, device=x.device)
        ends = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        gathered = x[order // self._experts.per_token]
        hidden = functional.grouped_mm(gathered, self._gate_up.transpose(1, 2), offs=ends)
        part = functional.grouped_mm(
            self._kernels.gated_mlp(hidden, self._activation), self._down.transpose(1, 2), offs=ends
        )
        unsorted = torch.empty_like(part)
        unsorted[order] = part
        return (unsorted.view(*chosen.shape, -1) * shares.unsqueeze(-1)).sum(dim=1)

    def by_mask(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Grouped, in dtypes that CUDA's grouped product does not take: every expert over every token."""
        share_of = torch.zeros(x.shape[0], self._experts.num_experts, dtype=x.dtype, device=x.device)
        share_of.scatter_(1, chosen, shares)
        out = torch.zeros_like(x)
        for index in range(self._experts.num_experts):
            hidden = self._kernels.gated_mlp(functional.linear(x, self._gate_up[index]), self._activation)
            out += functional.linear(hidden, self._down[index]) * share_of[:, index : index + 1]
        return out
