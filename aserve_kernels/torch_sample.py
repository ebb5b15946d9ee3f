"""The twin of `sample`: exact seeded draws, without a sort or a random word for every vocabulary entry.

Called through torch_ops. Elsewhere than on CPU the dense form runs: it is plain, and reads nothing back. On CPU most
words are ruled out first: what top-k, top-p and min-p keep is always a threshold on the logit, and Gumbel noise is
bounded, so a word far enough below the best can never win.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve_kernels.ops import SamplingRows, philox_uniform

_LIST = 256  # best logits looked at first
_STRIDE = 64  # words per group whose maximum is taken first
_SMALL_VOCAB = 16_384  # below it a plain topk is as quick
_MAX_GUMBEL = 16.6356  # -log(-log(u)) at philox_uniform's largest u
_MIN_TEMPERATURE = 1e-20  # (logit - best) / it cannot overflow


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    if rows.all_greedy:
        return _argmax(logits)
    if logits.device.type != "cpu":
        return sample_dense(logits, rows)
    tokens = _argmax(logits)
    drawn = (rows.temperature > 0).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return tokens
    if drawn.numel() < logits.shape[0]:
        tokens[drawn] = _sample_pruned(logits[drawn], _select(rows, drawn))
        return tokens
    return _sample_pruned(logits, rows)


def sample_dense(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The definition, word for word: every logit scaled, sorted, masked and given its noise."""
    wide = logits.float()
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) / _temperature(rows).unsqueeze(1)
    if rows.top_k is not None:
        kth = scaled.sort(dim=-1, descending=True).values.gather(1, rows.top_k.unsqueeze(1) - 1)
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    if rows.top_p is not None:
        best = scaled.sort(dim=-1, descending=True).values
        last = _nucleus_end(best.softmax(dim=-1).cumsum(dim=-1), rows.top_p)
        scaled = scaled.masked_fill(scaled < best.gather(1, last.unsqueeze(1)), float("-inf"))
    if rows.min_p is not None:
        scaled = scaled.masked_fill(scaled < rows.min_p.log().unsqueeze(1), float("-inf"))
    words = torch.arange(logits.shape[1], device=logits.device).expand_as(scaled)
    noise = _gumbel(words, rows.seeds.unsqueeze(1), rows.output_index.unsqueeze(1), rows.choices.unsqueeze(1))
    return torch.where(rows.temperature > 0, (scaled + noise).argmax(dim=-1), _argmax(logits))


def _sample_pruned(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draws for rows that all have a temperature, on CPU."""
    values, words = _best(logits, min(_LIST, logits.shape[1]))
    best, floor = values[:, 0], values[:, -1]  # a word outside the list is <= floor
    temperature = _temperature(rows)
    cut = _cut(logits, values, rows, temperature)
    row, column = (values >= cut.unsqueeze(1)).nonzero().unbind(1)
    word = words[row, column]
    score = (values[row, column] - best[row]) / temperature[row]
    score += _gumbel(word, rows.seeds[row], rows.output_index[row], rows.choices[row])
    table = torch.full(values.shape, float("-inf"))
    table[row, column] = score
    top = table.max(dim=1)
    tokens = words.gather(1, top.indices.unsqueeze(1)).squeeze(1)
    # A word outside the list wins only from above both the cut and (best score - largest noise).
    bound = torch.maximum(cut, best + temperature * (top.values - _MAX_GUMBEL))
    if values.shape[1] < logits.shape[1]:
        for i in (bound <= floor).nonzero().squeeze(1).tolist():
            word = (logits[i] >= bound[i]).nonzero().squeeze(1)
            if word.numel():
                score = (logits[i, word].float() - best[i]) / temperature[i]
                score += _gumbel(word, rows.seeds[i], rows.output_index[i], rows.choices[i])
                tokens[i] = word[score.argmax()]
    return tokens


def _cut(logits: Tensor, values: Tensor, rows: SamplingRows, temperature: Tensor) -> Tensor:
    """The smallest logit that top-k, top-p and min-p keep, per row; -inf where all are kept."""
    num_rows, length = values.shape
    vocab_size = logits.shape[1]
    cut = torch.full((num_rows,), float("-inf"))
    if rows.top_k is not None:
        top_k = rows.top_k
        cut = values.gather(1, (top_k.clamp(max=length) - 1).unsqueeze(1)).squeeze(1)
        cut = cut.masked_fill_(top_k >= vocab_size, float("-inf"))
        for i in ((top_k > length) & (top_k < vocab_size)).nonzero().squeeze(1).tolist():
            cut[i] = logits[i].topk(int(top_k[i])).values[-1]
    if rows.top_p is not None:
        scaled = (values - values[:, :1]) / temperature.unsqueeze(1)
        weights = scaled.exp().masked_fill_(values < cut.unsqueeze(1), 0.0)
        total = weights.sum(dim=1)
        for i in ((cut <= values[:, -1]) & (rows.top_p < 1)).nonzero().squeeze(1).tolist():
            wide = logits[i].float()
            kept = ((wide - values[i, 0]) / temperature[i]).exp_()
            total[i] = kept.masked_fill_(wide < cut[i], 0.0).sum()
        mass = weights.cumsum(dim=1) / total.unsqueeze(1)
        nucleus = values.gather(1, _nucleus_end(mass, rows.top_p).unsqueeze(1)).squeeze(1)
        active = rows.top_p < 1
        for i in (active & (mass[:, -1] < rows.top_p) & (cut <= values[:, -1])).nonzero().squeeze(1).tolist():
            ordered = logits[i].float().sort(descending=True).values
            share = ((ordered - ordered[0]) / temperature[i]).masked_fill_(ordered < cut[i], float("-inf")).softmax(0)
            nucleus[i] = ordered[_nucleus_end(share.cumsum(0).unsqueeze(0), rows.top_p[i : i + 1])]
        cut = torch.where(active, torch.maximum(cut, nucleus), cut)
    if rows.min_p is not None:
        cut = torch.maximum(cut, values[:, 0] + temperature * rows.min_p.log())
    return cut


def _nucleus_end(mass: Tensor, top_p: Tensor) -> Tensor:
    """Index of the last word in the nucleus for cumulative masses [S, L] in descending order."""
    return (mass < top_p.unsqueeze(1)).sum(dim=1).clamp_(max=mass.shape[1] - 1)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row in descending order, float32, and their words.

    Words are grouped by stride; the `count` groups with the largest maxima hold the `count` largest logits.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size <= _SMALL_VOCAB:
        top = logits.topk(count)
        return top.values.float(), top.indices
    num_groups = vocab_size // _STRIDE
    groups = logits[:, : num_groups * _STRIDE].view(num_rows, _STRIDE, num_groups)
    chosen = groups.amax(dim=1).topk(count, sorted=False).indices
    words = (chosen.unsqueeze(2) + torch.arange(0, num_groups * _STRIDE, num_groups)).flatten(1)
    tail = torch.arange(num_groups * _STRIDE, vocab_size).expand(num_rows, -1)
    words = torch.cat((words, tail), dim=1)
    top = logits.gather(1, words).topk(count)
    return top.values.float(), words.gather(1, top.indices)


def _argmax(logits: Tensor) -> Tensor:
    return logits.max(dim=-1).indices  # several times as quick as argmax on CPU in bfloat16


def _temperature(rows: SamplingRows) -> Tensor:
    return rows.temperature.clamp(min=_MIN_TEMPERATURE)


def _gumbel(words: Tensor, seeds: Tensor, output_index: Tensor, choices: Tensor) -> Tensor:
    """The noise of each word: its own Philox word, whatever else is drawn."""
    four = torch.stack(philox_uniform(seeds, words >> 2, output_index, choices))
    uniform = four.gather(0, (words & 3).unsqueeze(0)).squeeze(0)
    return uniform.log_().neg_().log_().neg_()


def _select(rows: SamplingRows, index: Tensor) -> SamplingRows:
    return SamplingRows(
        temperature=rows.temperature[index],
        seeds=rows.seeds[index],
        choices=rows.choices[index],
        output_index=rows.output_index[index],
        top_k=None if rows.top_k is None else rows.top_k[index],
        top_p=None if rows.top_p is None else rows.top_p[index],
        min_p=None if rows.min_p is None else rows.min_p[index],
    )
