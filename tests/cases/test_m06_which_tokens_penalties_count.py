"""M06: repetition counts prompt and output from the first draw on; presence and frequency count the output alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aserve import Engine, EngineConfig, SamplingParams
from tests.serving import LLAMA, write_tokenizer

pytestmark = pytest.mark.anyio

COUNT = 12
VARIANTS = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 1.0},
    {"frequency_penalty": -1.0},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(LLAMA)).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # close enough for penalties to decide
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model, directory


def reference(model: Any, prompt: list[int], penalties: dict[str, float], *, swapped: bool = False) -> list[int]:
    """Greedy tokens with each penalty over its own tokens; `swapped`: over the other's."""
    tokens = list(prompt)
    for _ in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].float()
        output = tokens[len(prompt) :]
        repeated, counted = (output, tokens) if swapped else (tokens, output)
        for token in set(repeated):
            factor = penalties.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(counted).items():
            logits[token] -= penalties.get("presence_penalty", 0.0) + count * penalties.get("frequency_penalty", 0.0)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("penalties", VARIANTS, ids=str)
async def test_a_penalty_counts_its_own_tokens(model: tuple[Any, Path], penalties: dict[str, float]) -> None:
    network, directory = model
    prompts = [[30, 31, 32], [*range(10, 210), *[60] * 9]]  # the second holds most of what may be drawn
    config = EngineConfig(model=str(directory), dtype="float32", device="cpu", num_threads=1)
    told_apart = False
    async with Engine(config) as engine:
        for prompt in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, **penalties)
            [done] = await (await engine.submit(prompt, params)).completions()
            assert list(done.token_ids) == reference(network, prompt, penalties)
            told_apart |= list(done.token_ids) != reference(network, prompt, penalties, swapped=True)
    assert told_apart  # counting the other's tokens would have shown
