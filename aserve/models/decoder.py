"""The decoder of the Llama-like families: one forward pass over paged keys and values.

loader.py builds it from a DecoderConfig and Weights; the runner calls forward and logits on the model thread. It is
written against aserve_kernels alone. No host reads of device values and no loop over sequences: a decode step can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from aserve.models import KVCache, ModelSpec
from aserve.models.families import DecoderConfig, LayerConfig
from aserve.models.mlp import GatedMLP
from aserve.models.moe import MoE
from aserve.models.rope import cos_sin_table
from aserve.models.weights import Weights
from aserve_kernels import AttentionMeta, Kernels
from aserve_kernels.linear import PackedLinear


class Decoder:
    """Embedding, layers, norm, head. Residuals are in the model's dtype, norm weights and rotations in float32.

    `max_positions` bounds the rotary tables; None is the model's context.
    """

    def __init__(
        self, config: DecoderConfig, weights: Weights, kernels: Kernels, *, max_positions: int | None = None
    ) -> None:
        num_positions = min(max_positions or config.context, config.context)
        self.spec = ModelSpec(
            num_layers=len(config.layers),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context,
            dtype=weights.dtype,
        )
        self._config = config
        self._kernels = kernels
        table = "model.embed_tokens.weight"
        self._embedding = weights.embedding(table, config.vocab_size, config.hidden_size)
        scale = config.embedding_scale  # transformers multiplies by a tensor of the model's dtype, so this is rounded
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=weights.dtype))
        if config.tied:  # the head comes first: converting and packing the largest matrix is the peak of memory
            head = weights.tied_head(table, self._embedding, "lm_head.weight")
        else:
            head = weights.matrix(["lm_head.weight"], [config.vocab_size], config.hidden_size)
        self._head = PackedLinear(head)
        del head
        ropes = {layer.rope for layer in config.layers}  # two at most: a long table takes as long as a layer to make
        tables = {rope: cos_sin_table(rope, num_positions, weights.device) for rope in ropes}
        self._layers = [
            Layer(config, layer, tables[layer.rope], f"model.layers.{index}", weights, kernels)
            for index, layer in enumerate(config.layers)
        ]
        self._norm = weights.norm("model.norm.weight", config.hidden_size, config.norm_offset)
        # each layer's last addition is fused with the norm that opens the next, or with the final one
        self._next_norms = [layer.input_norm for _, layer in pairwise(self._layers)] + [self._norm]

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        """Final hidden states [T, H] of token_ids int64 [T]."""
        kernels, eps = self._kernels, self._config.norm_eps
        residual = functional.embedding(token_ids, self._embedding).to(self.spec.dtype)
        if self._scale is not None:
            residual = residual * self._scale
        hidden = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for layer, cache, next_norm in zip(self._layers, caches, self._next_norms, strict=True):
            hidden = layer.attend(hidden, meta, cache)
            hidden = kernels.add_rms_norm_(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.mlp(hidden)
            hidden = kernels.add_rms_norm_(hidden, residual, next_norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, V] of hidden [S, H]."""
        logits = self._head(hidden)
        cap = self._config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class Layer:
    """One block: attention and an MLP or experts, each after a norm that the decoder applies."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        cos_sin: Tensor,
        prefix: str,
        weights: Weights,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._window = layer.window
        self._cos_sin = cos_sin
        hidden_size, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

        def linear(names: tuple[str, ...], rows: list[int], columns: int, bias: bool) -> PackedLinear:
            rows = [sum(rows)] if len(names) == 1 else rows  # the checkpoint may hold them fused already
            weight = weights.matrix([f"{prefix}.{name}.weight" for name in names], rows, columns)
            added = weights.vector([f"{prefix}.{name}.bias" for name in names], rows) if bias else None
            return PackedLinear(weight, added)

        def norm(name: str, size: int = hidden_size) -> Tensor:
            return weights.norm(f"{prefix}.{name}.weight", size, config.norm_offset)

        qkv_names = tuple(f"self_attn.{name}" for name in config.qkv_names)
        self._qkv = linear(qkv_names, [q_size, kv_size, kv_size], hidden_size, config.qkv_bias)
        self._output = linear(("self_attn.o_proj",), [hidden_size], q_size, config.output_bias)
        self._mlp: Callable[[Tensor], Tensor]
        if config.experts is not None and layer.sparse:
            self._mlp = MoE(config, config.experts, f"{prefix}.{config.experts.prefix}", weights, kernels)
        else:
            self._mlp = GatedMLP(config, f"{prefix}.mlp", config.intermediate_size, weights, kernels)
        self._q_norm = norm("self_attn.q_norm", head_dim) if config.qk_norm else None
        self._k_norm = norm("self_attn.k_norm", head_dim) if config.qk_norm else None
        self.input_norm = norm("input_layernorm")
        if config.post_norms:
            self._post_attention_norm = norm("post_attention_layernorm")
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self._post_mlp_norm = norm("post_feedforward_layernorm")
        else:
            self.mlp_norm = norm("post_attention_layernorm")

    def attend(self, hidden: Tensor, meta: AttentionMeta, cache: KVCache) -> Tensor:
        """Attention of normed hidden [T, H]; what to add to the residual."""
        config, kernels = self._config, self._kernels
        query = kernels.rotary_kv_write_(
            self._qkv(hidden),
            meta.positions,
            meta.slot_mapping,
            self._cos_sin,
            *cache,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            self._q_norm,
            self._k_norm,
            config.norm_eps,
        )
        attended = kernels.paged_attention(
            query, *cache, meta, config.attention_scale, self._window, config.attention_softcap
        )
        out = self._output(attended)
        return kernels.rms_norm(out, self._post_attention_norm, config.norm_eps) if config.post_norms else out

    def mlp(self, hidden: Tensor) -> Tensor:
        """The MLP of normed hidden [T, H]; what to add to the residual."""
        out = self._mlp(hidden)
        if not self._config.post_norms:
            return out
        return self._kernels.rms_norm(out, self._post_mlp_norm, self._config.norm_eps)
