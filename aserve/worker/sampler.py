"""From logits to tokens: grammar masks, bias, penalties and logprobs around the kernels' draw, for the slots that ask.

Owned by runner.py. What a step's draws do not use costs nothing: a plain step goes straight to `kernels.sample`. Token
counts live on the device, one row for each slot with penalties, and follow the draws without a read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.executors import StepError
from aserve.plan import SlotMask, SlotUpdate, TokenLogprobs
from aserve.worker.staging import Staging
from aserve_kernels import Kernels, SamplingRows

NEG_INF = float("-inf")


@dataclass(slots=True)
class Extras:
    """The uncommon options of one slot; ids are int64 on the device."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    ends: Tensor | None = None  # masked while fewer than min_tokens are out
    bias: tuple[Tensor, Tensor] | None = None  # ids, float32 values
    allowed: Tensor | None = None
    penalties: tuple[float, float, float] | None = None  # repetition, presence, frequency


@dataclass(slots=True)
class DrawnLogprobs:
    """Logprobs of the draws that asked, still on the device: `top` is as wide as the widest asks for."""

    draws: list[int]
    widths: list[int]
    chosen: Tensor  # float32 [R]
    top_values: Tensor  # float32 [R, K]
    top_ids: Tensor  # int64 [R, K]

    def to_host(self, staging: Staging) -> DrawnLogprobs:
        """On their way to the host."""
        parts = (staging.to_host(part) for part in (self.chosen, self.top_values, self.top_ids))
        return DrawnLogprobs(self.draws, self.widths, *parts)

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By draw index; `tokens` are the step's."""
        chosen, values, ids = self.chosen.tolist(), self.top_values.tolist(), self.top_ids.tolist()
        return {
            draw: TokenLogprobs(tokens[draw], chosen[i], tuple(zip(ids[i][:width], values[i][:width], strict=True)))
            for i, (draw, width) in enumerate(zip(self.draws, self.widths, strict=True))
        }


class TokenCounts:
    """How often each slot with penalties has put out each token, and which tokens its prompt holds."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.row_of: dict[int, int] = {}
        self._free: list[int] = []

    def start(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Gives the slot a row that holds these tokens."""
        row = self.row_of.get(slot)
        if row is None:
            if not self._free:
                self._grow()
            row = self.row_of[slot] = self._free.pop()
        device = self.output.device
        self.prompt[row] = False
        self.prompt[row, torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        ids = torch.tensor(output, dtype=torch.int64, device=device)
        self.output[row] = 0
        self.output[row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def stop(self, slot: int) -> None:
        """Gives the slot's row back."""
        row = self.row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def _grow(self) -> None:
        old = self.output.shape[0]
        extra = max(4, old)
        self._free += range(old + extra - 1, old - 1, -1)
        for name in ("output", "prompt"):
            tensor: Tensor = getattr(self, name)
            setattr(self, name, torch.cat((tensor, tensor.new_zeros((extra, tensor.shape[1])))))


class Sampler:
    """Draws a step's tokens. `update` before each step with the plan's slot updates."""

    def __init__(self, kernels: Kernels, vocab_size: int, device: torch.device, staging: Staging) -> None:
        self.staging = staging
        self.extras: dict[int, Extras] = {}
        self.counts = TokenCounts(vocab_size, device)
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._device = device

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        """Starts slots afresh. Raises StepError naming the slots whose options name words out of the vocabulary."""
        bad = tuple(update.slot for update in updates if not self._valid(update))
        if bad:
            raise StepError(f"a sampling option names a token outside the vocabulary of {self._vocab_size}", bad)
        for update in updates:
            extras = self._extras_of(update)
            if extras is None:
                self.extras.pop(update.slot, None)
            else:
                self.extras[update.slot] = extras
            if extras is not None and extras.penalties is not None:
                tokens = update.tokens or ()
                count = update.num_prompt_tokens
                self.counts.start(update.slot, tokens[:count], tokens[count:])
            else:
                self.counts.stop(update.slot)

    def plain(self, draws: Sequence[int]) -> bool:
        """True where no draw needs more than `kernels.sample`."""
        return not self.extras or self.extras.keys().isdisjoint(draws)

    def draw(
        self,
        logits: Tensor,
        rows: SamplingRows,
        draws: Sequence[int],
        output_index: Sequence[int],
        masks: Sequence[SlotMask] = (),
    ) -> tuple[Tensor, DrawnLogprobs | None]:
        """Tokens int64 [S] of logits [S, V], whose contents may be overwritten, and logprobs where asked.

        `output_index` is the host's copy of rows.output_index, for min_tokens. The `masks` are waited for here, with
        the forward pass already under way on a GPU.
        """
        found = [(i, self.extras[slot]) for i, slot in enumerate(draws) if slot in self.extras]
        asked = [(i, extras.logprobs) for i, extras in found if extras.logprobs is not None]
        raw = None
        if asked:
            raw = logits[torch.tensor([i for i, _ in asked], device=self._device)].float().log_softmax(dim=-1)
        if masks:
            logits = self._mask(logits, draws, masks)
        logits = self._adjust(logits, draws, found, output_index)
        tokens = self._kernels.sample(logits, rows)
        self._count(draws, tokens, found)
        if raw is None:
            return tokens, None
        picked = tokens[torch.tensor([i for i, _ in asked], device=self._device)]
        return tokens, top_logprobs(raw, picked, [i for i, _ in asked], [width for _, width in asked])

    def _valid(self, update: SlotUpdate) -> bool:
        params = update.params
        ids = (*params.logit_bias, *(params.allowed_token_ids or ()), *params.stop_token_ids, *update.end_token_ids)
        return all(0 <= token < self._vocab_size for token in ids)

    def _extras_of(self, update: SlotUpdate) -> Extras | None:
        params = update.params
        logprobs = params.logprobs if update.num_top is None else update.num_top
        ends = {*update.end_token_ids, *params.stop_token_ids} if params.min_tokens else ()
        if not (
            ends
            or params.needs_token_counts
            or params.logit_bias
            or params.allowed_token_ids is not None
            or logprobs is not None
            or params.prompt_logprobs is not None
        ):
            return None
        extras = Extras(logprobs, params.prompt_logprobs)
        if ends:
            extras.min_tokens = params.min_tokens
            extras.ends = self._ids(sorted(ends))
        if params.logit_bias:
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device)
            extras.bias = (self._ids(list(params.logit_bias)), values)
        if params.allowed_token_ids is not None:
            extras.allowed = self._ids(list(params.allowed_token_ids))
        if params.needs_token_counts:
            extras.penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return extras

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _adjust(
        self,
        logits: Tensor,
        draws: Sequence[int],
        found: list[tuple[int, Extras]],
        output_index: Sequence[int],
    ) -> Tensor:
        masked = [(i, e.ends) for i, e in found if e.ends is not None and output_index[i] < e.min_tokens]
        penalized = [i for i, extras in found if extras.penalties is not None]
        if not masked and not penalized and not any(e.bias is not None or e.allowed is not None for _, e in found):
            return logits
        logits = logits.float()
        for i, extras in found:
            if extras.bias is not None:
                logits[i].index_add_(0, *extras.bias)
            if extras.allowed is not None:
                only = torch.full_like(logits[i], NEG_INF)
                only[extras.allowed] = logits[i, extras.allowed]
                logits[i] = only
        for i, ends in masked:
            logits[i].index_fill_(0, ends, NEG_INF)
        if penalized:
            index = self._ids(penalized)
            values = torch.tensor([e.penalties for _, e in found if e.penalties is not None], device=self._device)
            logits[index] = self._penalize(logits[index], [draws[i] for i in penalized], values)
        return logits

    def _mask(self, logits: Tensor, draws: Sequence[int], masks: Sequence[SlotMask]) -> Tensor:
        """Leaves the tokens that each constrained draw may give."""
        bits = np.zeros((len(masks), -(-self._vocab_size // 8)), dtype=np.uint8)
        for row, (_, mask) in enumerate(masks):
            given = np.frombuffer(mask.read(), dtype=np.uint8)[: bits.shape[1]]
            bits[row, : len(given)] = given
        rows = [draws.index(slot) for slot, _ in masks]
        if self._device.type != "cuda":
            barred = np.unpackbits(~bits, axis=1, count=self._vocab_size, bitorder="little").view(np.bool_)
            for row, each in zip(rows, torch.from_numpy(barred), strict=True):
                logits[row].masked_fill_(each, NEG_INF)
            return logits
        packed = self.staging.pinned(bits).to(self._device, non_blocking=True)  # an eighth of the bytes
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        allowed = (packed.unsqueeze(2) >> shifts).bitwise_and_(1).view(len(masks), -1)[:, : self._vocab_size]
        index = self._ids(rows)
        logits[index] = logits[index].masked_fill_(allowed == 0, NEG_INF)
        return logits

    def _penalize(self, logits: Tensor, slots: list[int], values: Tensor) -> Tensor:
        repetition, presence, frequency = values.unsqueeze(2).unbind(1)
        index = self._ids([self.counts.row_of[slot] for slot in slots])
        output = self.counts.output[index]
        out = output > 0
        seen = self.counts.prompt[index] | out
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        return logits - frequency * output - presence * out

    def _count(self, draws: Sequence[int], tokens: Tensor, found: list[tuple[int, Extras]]) -> None:
        penalized = [i for i, extras in found if extras.penalties is not None]
        if penalized:
            first = self._ids([self.counts.row_of[draws[i]] * self._vocab_size for i in penalized])
            at = first + tokens[self._ids(penalized)]
            self.counts.output.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))


def top_logprobs(raw: Tensor, tokens: Tensor, draws: list[int], widths: list[int]) -> DrawnLogprobs:
    """Logprobs float32 [R, V] -> the chosen tokens' and the best."""
    best = raw.topk(min(max(widths), raw.shape[1]), dim=-1)
    return DrawnLogprobs(draws, widths, raw.gather(1, tokens.unsqueeze(1)).squeeze(1), best.values, best.indices)
