"""A trial of a model from transformers: does it compute in batches over paged memory what it computes alone?

hf.py runs it once at load. Two short texts go through alone, and together in pieces, chunks and decodes side by side;
the first is compared with what the model's own attention gives, the second with the first. It finds what no flag tells:
layers that mix tokens outside of attention, positions that the model counts itself, masks that it adds elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aserve.models import KVCache, Model
from aserve_kernels import AttentionMeta

_BLOCK_SIZE = 16
_BLOCKS = ((2, 0), (3, 1))  # of the first text, and of the second; 4 is scratch
_STEPS = ((4, 0), (15, 6), (1, 1))  # tokens of each text: a chunk, two chunks, two decodes


class _Part(NamedTuple):
    """Tokens [start, end) of a text, in one step."""

    text: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Differences(NamedTuple):
    """How far logits of a text lie apart, relative to their size: `alone` is ours from the model's own, `together` ours
    in a batch, in pieces, from ours alone. Of the worst token in float32; of the worse text's typical token else: half
    types round too differently in the few that a router sends elsewhere."""

    alone: float
    together: float


def differences(model: Model, own_logits: Callable[[Tensor], Tensor], device: torch.device) -> Differences:
    """Tries the model; own_logits ([T] -> [T, V]) are those of its own attention."""
    spec = model.spec
    shape = (len(_BLOCKS) * 2 + 1, _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    caches = [
        (torch.zeros(shape, dtype=spec.dtype, device=device), torch.zeros(shape, dtype=spec.dtype, device=device))
        for _ in range(spec.num_layers)
    ]
    lengths = [sum(step[text] for step in _STEPS) for text in range(len(_BLOCKS))]
    texts = [
        (torch.arange(length, device=device) * 37 + 11 * text + 5) % spec.vocab_size
        for text, length in enumerate(lengths)
    ]
    alone = [
        _run(model, caches, texts, [[length if at == text else 0 for at in range(len(texts))]])[text]
        for text, length in enumerate(lengths)
    ]
    together = _run(model, caches, texts, _STEPS)
    typical = torch.max if spec.dtype == torch.float32 else torch.median
    return Differences(
        max(float(typical(apart(found, own_logits(text)))) for found, text in zip(alone, texts, strict=True)),
        max(float(typical(apart(found, whole))) for found, whole in zip(together, alone, strict=True)),
    )


def _run(model: Model, caches: list[KVCache], texts: Sequence[Tensor], steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [T, V] of each text after steps with so many tokens of each."""
    found: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    for step in steps:
        parts = [_Part(text, done[text], done[text] + count) for text, count in enumerate(step) if count]
        tokens = torch.cat([texts[part.text][part.start : part.end] for part in parts])
        logits = model.logits(model.forward(tokens, _meta(parts, tokens.device), caches))
        for part, rows in zip(parts, torch.split(logits, [part.size for part in parts]), strict=True):
            found[part.text].append(rows)
            done[part.text] = part.end
    return [torch.cat(rows) if rows else torch.empty(0) for rows in found]


def apart(found: Tensor, expected: Tensor) -> Tensor:
    """Per token, the distance of logits [T, V] relative to their spread: what they have in common says nothing."""
    found, expected = (each.float() - each.float().mean(-1, keepdim=True) for each in (found, expected))
    relative: Tensor = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return relative


def _meta(parts: Sequence[_Part], device: torch.device) -> AttentionMeta:
    """Where the tokens of a step are."""
    positions = torch.cat([torch.arange(part.start, part.end) for part in parts])
    tables = torch.tensor([_BLOCKS[part.text] for part in parts], dtype=torch.int32)
    sizes = torch.tensor([part.size for part in parts])
    blocks = tables.repeat_interleave(sizes, dim=0).gather(1, (positions // _BLOCK_SIZE).unsqueeze(1)).squeeze(1)
    return AttentionMeta(
        num_decodes=sum(part.size == 1 for part in parts),
        positions=positions.to(device),
        slot_mapping=(blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE).to(device),
        query_starts=torch.tensor([0, *sizes.cumsum(0).tolist()], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([part.end for part in parts], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        max_query_len=max(part.size for part in parts),
        max_seq_len=max(part.end for part in parts),
    )
