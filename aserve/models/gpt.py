"""The decoder of the GPT-like families: OPT, GPT-2, GPT-NeoX, Phi. Layer norms, biases, a plain MLP.

loader.py builds it from a GPTConfig and Weights; the runner calls forward and logits on the model thread. As
decoder.py, it keeps to aserve_kernels and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from aserve.models import KVCache, ModelSpec
from aserve.models.gpt_families import GPTConfig
from aserve.models.rope import cos_sin_table
from aserve.models.weights import Weights
from aserve_kernels import AttentionMeta, Kernels
from aserve_kernels.linear import PackedLinear


class GPT:
    """Embedding (and learned positions), layers, norm, head. `max_positions` bounds the rotary table."""

    def __init__(
        self, config: GPTConfig, weights: Weights, kernels: Kernels, *, max_positions: int | None = None
    ) -> None:
        num_positions = min(max_positions or config.context, config.context)
        self.spec = ModelSpec(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context,
            dtype=weights.dtype,
        )
        self._config = config
        names, hidden_size = config.names, config.hidden_size
        table = f"{names.embedding}.weight"
        self._embedding = weights.embedding(table, config.vocab_size, hidden_size)
        if config.tied:  # the head comes first: converting and packing the largest matrix is the peak of memory
            head = weights.tied_head(table, self._embedding, f"{names.head}.weight")
        else:
            head = weights.matrix([f"{names.head}.weight"], [config.vocab_size], hidden_size)
        bias = weights.vector([f"{names.head}.bias"], [config.vocab_size]) if config.head_bias else None
        self._head = PackedLinear(head, bias)
        del head
        self._positions: Tensor | None = None
        if config.rope is not None:
            cos_sin = cos_sin_table(config.rope, num_positions, weights.device)
        else:
            rows = config.context + config.position_offset
            self._positions = weights.embedding(f"{names.positions}.weight", rows, hidden_size)[
                config.position_offset :
            ]
            cos_sin = _unrotated(num_positions, config.head_dim, weights.device)
        self._layers = [_Layer(config, index, cos_sin, weights, kernels) for index in range(config.num_layers)]
        self._norm = _Norm(config, names.final_norm, weights, kernels)
        # as in decoder.py, a layer's last addition is fused with the norm that opens the next
        self._next_norms = [layer.input_norm for _, layer in pairwise(self._layers)] + [self._norm]

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        """Final hidden states [T, H] of token_ids int64 [T]."""
        residual = functional.embedding(token_ids, self._embedding).to(self.spec.dtype)
        if self._positions is not None:
            residual = residual + functional.embedding(meta.positions, self._positions).to(self.spec.dtype)
        hidden = self._layers[0].input_norm(residual)
        for layer, cache, next_norm in zip(self._layers, caches, self._next_norms, strict=True):
            hidden = next_norm.of_sum_(layer(hidden, residual, meta, cache), residual)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, V] of hidden [S, H]."""
        return self._head(hidden)


class _Norm:
    """Layer norm with bias."""

    def __init__(self, config: GPTConfig, name: str, weights: Weights, kernels: Kernels) -> None:
        self._eps = config.norm_eps
        self._kernels = kernels
        self._weight = weights.norm(f"{name}.weight", config.hidden_size).to(weights.dtype)
        self._bias = weights.vector([f"{name}.bias"], [config.hidden_size])

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum_(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place; the norm of that."""
        return self._kernels.add_layer_norm_(x, residual, self._weight, self._bias, self._eps)


class _Layer:
    """One block: attention and MLP, after each other or side by side."""

    def __init__(self, config: GPTConfig, index: int, cos_sin: Tensor, weights: Weights, kernels: Kernels) -> None:
        self._config = config
        self._kernels = kernels
        self._cos_sin = cos_sin
        names, prefix, hidden_size = config.names, config.names.layer.format(index), config.hidden_size

        def by_head(stored: Tensor) -> Tensor:
            """[heads, (q, k, v), D, ...] in the checkpoint, (q, k, v) first here."""
            by_part = stored.reshape(config.num_heads, 3, config.head_dim, -1).transpose(0, 1)
            return by_part.reshape(stored.shape)

        def linear(
            parts: tuple[str, ...], rows: int, columns: int, bias: bool, activation: str | None = None
        ) -> PackedLinear:
            sizes = [rows // len(parts)] * len(parts)
            arrange: Callable[[Tensor], Tensor] | None = None
            if config.stored == "columns":
                arrange = Tensor.t
            elif config.stored == "heads" and parts == names.qkv:
                arrange = by_head
            weight = weights.matrix([f"{prefix}{part}.weight" for part in parts], sizes, columns, arrange)
            if not bias:
                return PackedLinear(weight, None, activation)
            bias_names = [f"{prefix}{part}.bias" for part in parts]
            added = weights.vector(bias_names, sizes, by_head if arrange is by_head else None)
            return PackedLinear(weight, added, activation)

        self._qkv = linear(names.qkv, 3 * hidden_size, hidden_size, config.attention_bias)
        self._output = linear((names.output,), hidden_size, hidden_size, config.attention_bias)
        self._up = linear((names.up,), config.intermediate_size, hidden_size, True, config.activation)
        self._down = linear((names.down,), hidden_size, config.intermediate_size, True)
        self.input_norm = _Norm(config, f"{prefix}{names.input_norm}", weights, kernels)
        self._mlp_norm = _Norm(config, f"{prefix}{names.mlp_norm}", weights, kernels) if names.mlp_norm else None

    def __call__(self, hidden: Tensor, residual: Tensor, meta: AttentionMeta, cache: KVCache) -> Tensor:
        """What the block still adds to `residual` [T, H], whose input norm is `hidden`."""
        attended = self._attend(hidden, meta, cache)
        if self._mlp_norm is not None:
            parallel = self._config.parallel
            hidden = self._mlp_norm(residual) if parallel else self._mlp_norm.of_sum_(attended, residual)
        out = self._down(self._up(hidden))
        return out.add_(attended) if self._config.parallel else out

    def _attend(self, normed: Tensor, meta: AttentionMeta, cache: KVCache) -> Tensor:
        config, kernels = self._config, self._kernels
        query = kernels.rotary_kv_write_(
            self._qkv(normed),
            meta.positions,
            meta.slot_mapping,
            self._cos_sin,
            *cache,
            config.num_heads,
            config.num_heads,
            config.head_dim,
            None,
            None,
            config.norm_eps,
        )
        return self._output(kernels.paged_attention(query, *cache, meta, config.head_dim**-0.5))


def _unrotated(num_positions: int, head_dim: int, device: torch.device) -> Tensor:
    """A rotary table that turns nothing, for families whose positions are learned: exact, as x * 1 - y * 0 is x."""
    table = torch.zeros(num_positions, head_dim, dtype=torch.float32, device=device)
    table[:, : head_dim // 2] = 1.0
    return table
