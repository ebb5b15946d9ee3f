"""Every family against transformers: float32 logits of mixed batches over paged memory, and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models_util import TINY, PagedMemory, load_saved, make_reference

# tokens per step of each sequence; longer than the windows of 9 and across block boundaries of 4
CHUNKS = [
    [5, 1, 1, 1, 1, 1, 1],
    [0, 17, 1, 7, 1, 1, 1],
    [3, 3, 3, 3, 3, 3, 3],
    [0, 0, 30, 1, 1, 6, 1],
    [1, 1, 1, 1, 1, 1, 1],
]


@pytest.fixture(params=sorted(set(TINY) - {"phi3-longrope"}))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    reference = make_reference(request.param)
    reference.save_pretrained(tmp_path)
    return reference, tmp_path


def test_logits_of_mixed_chunked_batches_match_transformers(family: tuple[Any, Path]) -> None:
    reference, directory = family
    memory = PagedMemory(load_saved(directory))
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 97, (sum(chunks),), generator=generator).tolist() for chunks in CHUNKS]
    sequences = [memory.add() for _ in CHUNKS]
    got: list[list[torch.Tensor]] = [[] for _ in CHUNKS]
    for step in range(len(CHUNKS[0])):
        rows = [index for index, chunks in enumerate(CHUNKS) if chunks[step]]
        work = []
        for index in rows:
            done = sequences[index].length
            work.append((sequences[index], texts[index][done : done + CHUNKS[index][step]]))
        for index, logits in zip(rows, memory.step(work), strict=True):
            got[index].append(logits)
    for text, logits in zip(texts, got, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0]
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers(family: tuple[Any, Path]) -> None:
    reference, directory = family
    memory = PagedMemory(load_saved(directory))
    prompt = [7, 50, 31, 4, 88]
    sequence = memory.add()
    tokens: list[int] = []
    pending = prompt
    for _ in range(64):
        (logits,) = memory.step([(sequence, pending)])
        pending = [int(logits[-1].argmax())]
        tokens += pending
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
    assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("served", "length"), [(32, 30), (None, 46)])
def test_longrope_turns_every_key_by_the_factors_of_the_context_served(
    tmp_path: Path, served: int | None, length: int
) -> None:
    reference = make_reference("phi3-longrope")
    reference.save_pretrained(tmp_path)
    memory = PagedMemory(load_saved(tmp_path, max_positions=served))
    text = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    sequence = memory.add()
    logits = [memory.step([(sequence, text[start : start + 7])])[0] for start in range(0, length, 7)]
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)
