"""L07: prompt logprobs are those of a cold run, whatever the prefix cache holds and in whatever order prompts came."""

from __future__ import annotations

import itertools

import pytest

from aserve import Engine, EngineConfig, SamplingParams, TokenLogprobs
from tests.serving import LLAMA

pytestmark = pytest.mark.anyio

SHARED = list(range(20, 60))  # 10 blocks of 4
PROMPTS = [[*SHARED, 70, 71, 72], [*SHARED, 80, 81], SHARED[:-3]]


async def _scores(engine: Engine, prompt: list[int]) -> list[tuple[int, float]]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    stream = await engine.submit(prompt, params)
    await stream.completions()
    entries = [entry for entry in stream.prompt_logprobs if isinstance(entry, TokenLogprobs)]
    return [(entry.token_id, entry.logprob) for entry in entries]


def _config(caching: bool) -> EngineConfig:
    return EngineConfig(
        model=str(LLAMA),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        num_threads=1,
        block_size=4,
        enable_prefix_caching=caching,
    )


async def test_every_order_gives_the_scores_of_a_run_without_a_cache() -> None:
    async with Engine(_config(False)) as engine:
        expected = [await _scores(engine, prompt) for prompt in PROMPTS]
    async with Engine(_config(True)) as engine:
        warm = await engine.submit(SHARED, SamplingParams(max_tokens=4, temperature=0.0))
        await warm.completions()
        for order in itertools.permutations(range(len(PROMPTS))):
            for i in order:
                found = await _scores(engine, PROMPTS[i])
                assert [token for token, _ in found] == PROMPTS[i][1:]
                assert [value for _, value in found] == pytest.approx([v for _, v in expected[i]], abs=1e-4)
        assert engine.stats().num_blocks_used == 0
