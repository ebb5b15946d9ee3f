"""The chat workload: prompts of random ids and output lengths drawn from a fixed seed, equal on every machine.

Lengths are log-normal like chat's: prompts of about 190 tokens and outputs of about 185 on average, 4 to 1024 each.
"""

from __future__ import annotations

import random
from typing import NamedTuple

SHORTEST, LONGEST = 4, 1024
FIRST_ID = 10  # ids below are special tokens in most vocabularies


class Item(NamedTuple):
    """One request: its prompt's token ids, and how many tokens it asks for."""

    prompt: list[int]
    output_len: int


def lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) lengths."""
    draw = random.Random(seed)  # nosec B311 # no secret
    return [(_length(draw, 4.8, 1.0), _length(draw, 4.9, 0.8)) for _ in range(count)]


def chat(count: int, vocab_size: int, seed: int = 0) -> list[Item]:
    """`count` requests over a vocabulary."""
    draw = random.Random(seed + 1)  # nosec B311 # no secret
    return [
        Item([draw.randrange(FIRST_ID, vocab_size) for _ in range(prompt_len)], output_len)
        for prompt_len, output_len in lengths(count, seed)
    ]


def _length(draw: random.Random, mu: float, sigma: float) -> int:
    return max(SHORTEST, min(LONGEST, int(draw.lognormvariate(mu, sigma))))
