"""What the runner needs of a model: a forward pass over paged KV, and logits for the rows that sample.

decoder.py implements it for the Llama-like families; loader.py builds one from files.py's directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from aserve.errors import ConfigError

if TYPE_CHECKING:  # files.py is imported where torch is not
    import torch
    from torch import Tensor

    from aserve_kernels import AttentionMeta


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers the runner sizes memory by."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype  # of weights, activations and KV


KVCache: TypeAlias = "tuple[Tensor, Tensor]"  # key and value pools of one layer, [num_blocks + 1, block_size, Hk, D]


class Model(Protocol):
    """A causal language model over paged memory."""

    spec: ModelSpec

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        """Final hidden states [T, H] (after the last norm) of token_ids int64 [T]; writes their keys and values."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, V] of hidden [S, H], soft-capped where the model does so; float32 out for float32 in."""
        ...


def check_finite(logits: Tensor) -> None:
    """Raises ConfigError where a model has nothing to say."""
    if not logits.isfinite().all():
        raise ConfigError(
            "the model's logits are not finite: its weights hold NaN or infinity, or are too large for "
            f"{str(logits.dtype).removeprefix('torch.')}",
            param="model",
        )
