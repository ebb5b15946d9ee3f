"""The scheduler's plans on the real runner with a tiny model: sharing, swapping and recomputing change no output."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from aserve.block_manager import BlockManager
from aserve.policy import FCFSPolicy
from aserve.request import Request, SamplingParams
from aserve.scheduler import Scheduler
from tests.fakes import make_request
from tests.tiny_model import VOCAB, make_runner

PREFIX = tuple((7 * i + 3) % VOCAB for i in range(12))


def requests() -> list[Request]:
    """Greedy, sampled and beams, alone and three at a time, with penalties, with a shared prefix and without."""
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=12),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=20),
        SamplingParams(temperature=1.0, seed=3, n=2, frequency_penalty=0.7, max_tokens=16),
        SamplingParams(n=3, use_beam_search=True, max_tokens=14),
    )
    prompts = [(*PREFIX[: 3 * (i % 5)], *((11 * i + j) % VOCAB for j in range(1 + i))) for i in range(10)]
    return [make_request(prompt, kinds[i % 5], end_token_ids=()) for i, prompt in enumerate(prompts)]


def run(batch: list[Request], depth: int, **options: Any) -> Scheduler:
    """Serves the requests, `depth` plans in flight."""
    preemption, prefix_caching = options.pop("preemption", "auto"), options.pop("prefix_caching", True)
    runner = make_runner(max_num_batched_tokens=24, **options)
    info = runner.load()
    scheduler = Scheduler(
        blocks=BlockManager(info.num_gpu_blocks, info.num_cpu_blocks, info.block_size, prefix_caching=prefix_caching),
        policy=FCFSPolicy(),
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        depth=depth,
        preemption=preemption,
    )
    for request in batch:
        scheduler.add(request)
    in_flight: deque[object] = deque()
    while scheduler.num_unfinished or in_flight:
        while len(in_flight) < depth and (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(runner.launch(plan))
        scheduler.commit(runner.wait(in_flight.popleft()), 0.0)
        scheduler.check_invariants()
    runner.close()
    return scheduler


def outputs(batch: list[Request]) -> list[list[int]]:
    return [sequence.output for request in batch for sequence in request.sequences]


@pytest.fixture(scope="module")
def solo() -> list[list[int]]:
    """Each request's outputs when it runs alone."""
    alone = requests()
    for request in alone:
        run([request], 1, prefix_caching=False)
    return outputs(alone)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_outputs_under_memory_pressure_equal_the_solo_runs(
    solo: list[list[int]], depth: int, preemption: str, prefix_caching: bool
) -> None:
    batch = requests()
    scheduler = run(
        batch,
        depth,
        preemption=preemption,
        prefix_caching=prefix_caching,
        num_gpu_blocks_override=20,
    )
    assert outputs(batch) == solo
    assert scheduler.stats().num_preemptions > 0
    assert (scheduler.stats().num_swaps > 0) == (preemption == "swap")
