"""Log-probabilities of prompt tokens, for the requests that ask: chunk by chunk, a few rows at a time.

Called by runner.py after each forward. The logits at a chunk's last position predict the next chunk's first token, so
that position's hidden state is kept for the slot until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.models import Model
from aserve.plan import Chunk, StepPlan, TokenLogprobs
from aserve.worker.sampler import DrawnLogprobs, Sampler, top_logprobs

_TILE = 64  # rows of logits at a time


@dataclass(slots=True)
class PromptPart:
    """One chunk's share: logprobs of `tokens`, which are prompt tokens at successive positions."""

    chunk: int
    tokens: tuple[int, ...]
    tiles: list[DrawnLogprobs]

    def read(self) -> list[TokenLogprobs]:
        """In order of position. Read once the step's event has passed."""
        return [word for tile in self.tiles for word in tile.read(self.tokens).values()]


class PromptLogprobs:
    """Over a prompt's chunks the parts hold every token but the first, once each, in order.

    A prompt that was swapped out between two chunks lacks the one token between them: the scheduler recomputes these
    requests instead.
    """

    def __init__(self, model: Model, sampler: Sampler) -> None:
        self._model = model
        self._extras = sampler.extras
        self._staging = sampler.staging
        self._last_hidden: dict[int, Tensor] = {}

    def start(self, slots: Iterable[int]) -> None:
        """Forgets what these slots held: they are handed to other sequences."""
        if self._last_hidden:
            for slot in slots:
                self._last_hidden.pop(slot, None)

    def compute(self, plan: StepPlan, hidden: Tensor, prompt_len: np.ndarray) -> list[PromptPart]:
        """The parts of the plan's chunks whose slots ask, from the step's hidden states [T, H]."""
        parts = []
        first = len(plan.decodes)
        for index, chunk in enumerate(plan.chunks):
            extras = self._extras.get(chunk.slot)
            if extras is not None and extras.prompt_logprobs is not None:
                rows = hidden[first : first + len(chunk.tokens)]
                parts.append(self._part(index, chunk, rows, int(prompt_len[chunk.slot]), extras.prompt_logprobs))
            first += len(chunk.tokens)
        return parts

    def _part(self, index: int, chunk: Chunk, rows: Tensor, prompt_len: int, width: int) -> PromptPart:
        tokens = chunk.tokens[: max(0, prompt_len - chunk.start)]
        before = self._last_hidden.pop(chunk.slot, None)
        if before is None:
            tokens = tokens[1:]
        else:
            rows = torch.cat((before, rows))
        if chunk.start + len(chunk.tokens) < prompt_len:
            self._last_hidden[chunk.slot] = rows[-1:].clone()
        tiles = []
        for low in range(0, len(tokens), _TILE):
            targets = torch.tensor(tokens[low : low + _TILE], dtype=torch.int64, device=rows.device)
            count = len(targets)
            raw = self._model.logits(rows[low : low + count]).float().log_softmax(dim=-1)
            tiles.append(
                top_logprobs(raw, targets, list(range(low, low + count)), [width] * count).to_host(self._staging)
            )
        return PromptPart(index, tokens, tiles)
