"""The signatures every kernel backend implements, and the tensors they share.

T tokens of a step, R rows (sequences with tokens in it), S draws, V vocabulary, H hidden, Hq / Hk query / KV heads,
D head dim. Key and value pools are [num_blocks + 1, block_size, Hk, D], zeroed; the last block is scratch, where
padding rows write. Rows are ordered decodes first (one token each), then chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class AttentionMeta:
    """Where each row's tokens and context are. Device tensors; the ints are host-side bounds fixed at capture."""

    num_decodes: int  # rows [0, num_decodes) have one token each, and the last of them none where seq_lens is 0
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: block * block_size + offset, where each token's K and V are written
    query_starts: Tensor  # int32 [R + 1]: row r's tokens are [query_starts[r], query_starts[r + 1])
    seq_lens: Tensor  # int32 [R]: the row's context after this step's write (its last position + 1)
    block_tables: Tensor  # int32 [R, max_blocks]
    max_query_len: int
    max_seq_len: int
    memo: dict[object, Any] = field(default_factory=dict)  # a backend's own: what it derives once for all layers


@dataclass(slots=True)
class SamplingRows:
    """Parameters of S draws, gathered from the slots. A None means no draw of the step uses that option.

    A draw's Philox key is `seeds`; its counter is (vocabulary id // 4, output index, choice, 0), its word
    vocabulary id % 4. Order of effects: bias and masks, penalties, (logprobs are of raw logits), temperature, top-k,
    top-p, min-p, draw by Gumbel-max. What is kept depends on values alone, never on their order: top-k keeps every
    logit >= the k-th largest; top-p every one whose strictly larger ones (after top-k, renormalized) sum below top_p;
    min-p every one whose probability is >= min_p times the largest.
    """

    temperature: Tensor  # float32 [S]; 0 is greedy
    seeds: Tensor  # int64 [S], bits of an unsigned 64-bit seed
    choices: Tensor  # int64 [S]
    output_index: Tensor  # int64 [S]: index of the output token this draw makes
    top_k: Tensor | None = None  # int64 [S]; V where off
    top_p: Tensor | None = None  # float32 [S]; 1 where off
    min_p: Tensor | None = None  # float32 [S]; 0 where off
    all_greedy: bool = False  # host-side: every draw takes the argmax


class Kernels(Protocol):
    """A backend. Outputs are new tensors unless a name ends in `_`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H] (H may be one head's D) scaled to unit root mean square in float32, times weight."""
        ...

    def add_rms_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual)."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """x [..., H] less its mean, scaled to unit variance in float32, times weight plus bias."""
        ...

    def add_layer_norm_(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns layer_norm(residual)."""
        ...

    def gated_mlp(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up for gate_up [T, 2F] = [gate | up]; activation "silu", "gelu_tanh" or "gelu"."""
        ...

    def rotary_kv_write_(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Splits qkv [T, (Hq + 2 Hk) D], normalizes q and k per head where weights are given, rotates both (NeoX
        halves; cos_sin float32 [max_position, rotary_dim] = [cos | sin] halves), writes k and v to their slots.
        Returns q [T, Hq, D]."""
        ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        meta: AttentionMeta,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of query [T, Hq, D] over each row's paged context, grouped heads; a token sees at most
        the last `window` positions (itself included). Returns [T, Hq * D]. Scores and softmax in float32. `sinks`
        [Hq] are scores of one more position per head, whose value is zero."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Draws one token per row of float logits [S, V]. Returns int64 [S]."""
        ...

    def copy_blocks_(self, caches: list[Tensor], pairs: Tensor) -> None:
        """For each (source, target) of pairs int64 [P, 2], copies the block in every cache."""
        ...

    def gather_blocks(self, caches: list[Tensor], blocks: Tensor) -> Tensor:
        """The blocks of every cache in one staging buffer [len(caches), B, block_size, Hk, D]."""
        ...

    def scatter_blocks_(self, caches: list[Tensor], blocks: Tensor, staged: Tensor) -> None:
        """The reverse of gather_blocks: writes staged into the caches' blocks."""
        ...


def philox_uniform(seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011) of broadcast int64 key `seeds` and counter (c0, c1, c2, 0).

    Returns four float32 tensors in (0, 1): (word + 0.5) / 2^32 rounded in float32, clamped below 1.
    """
    mask = 0xFFFFFFFF
    k0, k1 = seeds & mask, (seeds >> 32) & mask
    x0, x1, x2, x3 = c0 & mask, c1 & mask, c2 & mask, torch.zeros_like(c0)  # broadcasting does the rest
    for _ in range(10):
        low0, high0 = _mul32(x0, 0xD2511F53)
        low1, high1 = _mul32(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    top = 1.0 - 2.0**-24
    x = [((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=top) for word in (x0, x1, x2, x3)]
    return x[0], x[1], x[2], x[3]


def _mul32(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of a * b for 32-bit values held in int64, without overflowing int64's sign."""
    a_low, a_high = a & 0xFFFF, a >> 16
    low, high = a_low * b, a_high * b  # both < 2^48
    middle = (low >> 16) + (high & 0xFFFFFFFF)
    return ((middle & 0xFFFF) << 16) | (low & 0xFFFF), (high + (low >> 16)) >> 16
