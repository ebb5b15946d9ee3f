"""Draws: the pruned CPU form against the dense definition, and the definition against plain arithmetic."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from aserve_kernels import SamplingRows
from aserve_kernels.ops import philox_uniform
from aserve_kernels.torch_sample import sample, sample_dense


def rows(
    count: int,
    temperature: float = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    first_seed: int = 0,
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        seeds=torch.arange(first_seed, first_seed + count),
        choices=torch.zeros(count, dtype=torch.int64),
        output_index=torch.zeros(count, dtype=torch.int64),
        top_k=None if top_k is None else torch.full((count,), top_k),
        top_p=None if top_p is None else torch.full((count,), top_p),
        min_p=None if min_p is None else torch.full((count,), min_p),
    )


def kept(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> set[int]:
    """The words that one row's options keep, by plain sorting."""
    scaled = [value / temperature for value in logits.double().tolist()]
    words = sorted(range(len(scaled)), key=lambda word: -scaled[word])
    if top_k is not None:
        words = [word for word in words if scaled[word] >= scaled[words[top_k - 1]]]
    best = scaled[words[0]]
    weight = {word: pow(2.718281828459045, scaled[word] - best) for word in words}
    total = sum(weight.values())
    if top_p is not None:
        words = [w for w in words if sum(weight[v] for v in words if scaled[v] > scaled[w]) / total < top_p]
    if min_p is not None:
        words = [word for word in words if weight[word] >= min_p]
    return set(words)


def test_philox_words_are_the_published_ones() -> None:
    """The known answer of philox4x32-10 for a key and a counter of zeros (Random123's test vectors)."""
    zero = torch.zeros(1, dtype=torch.int64)
    want = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    got = [float(u) for u in philox_uniform(zero, zero, zero, zero)]
    assert got == pytest.approx([(w + 0.5) / 2**32 for w in want], abs=1e-7)


@pytest.mark.parametrize("vocab_size", [5, 300, 20_011])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, vocab_size).to(dtype)
    logits[2, 1] = logits[2, 3] = 9.0
    greedy = rows(4, 0.0)
    greedy.all_greedy = True
    want = [row.tolist().index(max(row.tolist())) for row in logits]
    assert sample(logits, greedy).tolist() == want
    assert sample(logits, rows(4, 0.0)).tolist() == want
    assert sample_dense(logits, rows(4, 0.0)).tolist() == want


@pytest.mark.parametrize("seed", range(40))
def test_pruned_draws_equal_the_dense_definition(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = rng.choice([7, 255, 1000, 20_011])
    count = rng.choice([1, 5])
    logits = torch.randn(count, vocab_size) * rng.choice([0.0, 0.3, 2.0, 8.0])
    if rng.random() < 0.3:
        logits = logits.round()  # many ties
    if rng.random() < 0.3:
        logits[:, rng.randrange(1, vocab_size) :] = float("-inf")
    if rng.random() < 0.3:
        logits = logits.bfloat16()
    some = rows(count, rng.choice([0.3, 1.0, 2.0]), first_seed=seed * 100)
    if rng.random() < 0.5:
        some.top_k = torch.tensor([rng.choice([1, 3, 64, 400, vocab_size]) for _ in range(count)]).clamp(max=vocab_size)
    if rng.random() < 0.5:
        some.top_p = torch.tensor([rng.choice([0.01, 0.5, 0.95, 0.9999, 1.0]) for _ in range(count)])
    if rng.random() < 0.5:
        some.min_p = torch.tensor([rng.choice([0.0, 0.05, 1.0]) for _ in range(count)])
    if rng.random() < 0.5:
        some.temperature[0] = 0.0
    some.output_index += rng.randrange(1000)
    assert sample(logits, some).tolist() == sample_dense(logits, some).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(3, None, None), (None, 0.7, None), (None, None, 0.2), (6, 0.8, None), (5, 0.9, 0.1), (None, 0.01, None)],
)
def test_every_kept_word_is_drawn_and_no_other(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.5, -1.0, 1.5, 0.0, -30.0, 1.0])
    count = 4000
    some = rows(count, 1.5, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = set(sample(logits.expand(count, -1), some).tolist())
    assert drawn == kept(logits, 1.5, top_k, top_p, min_p)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, -2.0])
    count = 40_000
    drawn = sample(logits.expand(count, -1), rows(count, 0.8)).bincount(minlength=5) / count
    torch.testing.assert_close(drawn, (logits / 0.8).softmax(0), atol=0.01, rtol=0)


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 20_000) * 3
    many = rows(6, 1.0, top_p=0.9)
    many.temperature = torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0, 0.5])
    together = sample(logits, many)
    for i in range(6):
        alone = rows(1, float(many.temperature[i]), top_p=0.9, first_seed=i)
        assert sample(logits[i : i + 1], alone).item() == together[i].item()


@pytest.mark.parametrize("temperature", [1e-12, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20_000) * 50
    for options in ({}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.1}):
        some = rows(3, temperature, **options)  # type: ignore[arg-type]
        assert sample(logits, some).tolist() == logits.argmax(-1).tolist()
        assert sample_dense(logits, some).tolist() == logits.argmax(-1).tolist()


def test_choices_and_output_positions_draw_apart() -> None:
    logits = torch.zeros(64, 1000)
    base = rows(64)
    base.seeds.zero_()
    base.choices = torch.arange(64)
    by_choice = sample(logits, base).tolist()
    base.choices = torch.zeros(64, dtype=torch.int64)
    base.output_index = torch.arange(64)
    by_position = sample(logits, base).tolist()
    assert len(set(by_choice)) > 50
    assert len(set(by_position)) > 50
    assert by_choice[0] == by_position[0]
    assert by_choice[1:] != by_position[1:]
