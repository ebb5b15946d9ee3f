"""M15: beams rank as the reference implementation ranks them, by the length of the output alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aserve import Engine, EngineConfig, beam_search
from tests.serving import EOS, LLAMA, write_tokenizer

pytestmark = pytest.mark.anyio

PAD = 3  # which nothing here draws
PROMPTS = [list(range(10, 10 + length)) for length in (3, 70)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"length_penalty": 2.0},
    {"length_penalty": -1.0},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"early_stopping": True},
    {"length_penalty": 1.5, "early_stopping": "never"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama with random weights, of whose tokens one that its beams do draw is made an end."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(LLAMA)).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # as far apart as a trained model's logits
    free = model.generate(
        torch.tensor(PROMPTS[:1]), num_beams=3, max_new_tokens=12, eos_token_id=None, pad_token_id=PAD
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = [EOS, int(free[0, len(PROMPTS[0]) + 9])]
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model, directory


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
async def test_beams_equal_the_reference(model: Any, variant: dict[str, Any]) -> None:
    reference, directory = model
    config = EngineConfig(model=str(directory), dtype="float32", device="cpu", num_threads=1, block_size=4)
    ended = 0
    async with Engine(config) as engine:
        assert set(engine.end_token_ids) == set(reference.generation_config.eos_token_id)
        for prompt in PROMPTS:
            beams = await beam_search(engine, prompt, width=3, max_tokens=12, **variant)
            expected = reference.generate(
                torch.tensor([prompt]),
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=12,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=PAD,
                **variant,
            )
            outputs = [[t for t in row if t != PAD] for row in expected.sequences[:, len(prompt) :].tolist()]
            assert [list(beam.token_ids) for beam in beams] == outputs
            assert [beam.score for beam in beams] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)
            ended += sum(beam.finish_reason == "stop" for beam in beams)
    assert ended or variant.get("length_penalty", 1.0) > 1  # which prefers what does not end
