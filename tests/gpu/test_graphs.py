"""Steps through StepGraphs equal the CPU runner's: captured on a CUDA device, or (TRITON_INTERPRET=1) uncaptured."""

from __future__ import annotations

import os

import pytest
import torch

from aserve.plan import Chunk
from aserve.request import SamplingParams
from aserve.worker.runner import ModelRunner
from tests.tiny_model import VOCAB, Driver, make_runner

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA and not INTERPRETED, reason="needs a CUDA device or the interpreter"),
    pytest.mark.filterwarnings("ignore"),
]
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20)
PLAIN = SamplingParams(temperature=1.0)
PROMPTS = [tuple((i * 7 + j * 3) % VOCAB for j in range(5 + 4 * i)) for i in range(4)]


def graph_runner(**options: object) -> ModelRunner:
    runner = make_runner(device="cuda" if CUDA else "cpu", **options)
    if not CUDA:
        runner.graphs = runner._make_graphs(128)
        assert runner.graphs is not None
        runner.graphs._capture = lambda rows, bucket: None  # type: ignore[method-assign]
    return runner


def solo(prompt: tuple[int, ...], params: SamplingParams, count: int, **fields: object) -> list[int]:
    return Driver(make_runner()).generate(0, prompt, params, count, **fields)


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PLAIN], ids=["greedy", "limited", "plain"])
def test_mixed_and_decode_steps_equal_the_cpus(params: SamplingParams) -> None:
    want = [solo(prompt, params, 8, seed=i) for i, prompt in enumerate(PROMPTS)]
    driver = Driver(graph_runner())
    out: dict[int, list[int]] = {slot: [] for slot in range(4)}
    done = dict.fromkeys(range(4), 0)
    slots = [7, 2, 5, 0]
    for step in range(40):
        decodes = tuple(slots[i] for i in range(4) if out[i] and len(out[i]) < 8)
        chunks, updates = [], []
        for i in range(min(4, step + 1)):
            rest = PROMPTS[i][done[i] : done[i] + 3]
            if not rest:
                continue
            if done[i] == 0:
                updates.append(driver.start(slots[i], len(PROMPTS[i]), params, seed=i)[0])
            last = done[i] + len(rest) == len(PROMPTS[i])
            chunks.append(Chunk(slots[i], done[i], rest, (slots[i],) if last else ()))
            done[i] += len(rest)
        plan = driver.plan(decodes, tuple(chunks), tuple(updates))
        if not plan.num_tokens:
            break
        result = driver.runner.wait(driver.runner.launch(plan))
        assert result.bad == ()
        for slot, token in zip(plan.draws, result.tokens, strict=True):
            out[slots.index(slot)].append(token)
    assert list(out.values()) == want
    assert driver.runner.graphs is not None and driver.runner.graphs._captured


def test_steps_launched_ahead_read_what_the_device_keeps() -> None:
    want = solo(PROMPTS[2], SEEDED, 8, seed=3)
    driver = Driver(graph_runner())
    update, _ = driver.start(1, len(PROMPTS[2]), SEEDED, seed=3)
    handles = [driver.runner.launch(driver.plan(chunks=(Chunk(1, 0, PROMPTS[2], (1,)),), slots=(update,)))]
    decodes = (1,)
    handles += [driver.runner.launch(driver.plan(decodes)) for _ in range(7)]
    assert [driver.runner.wait(handle).tokens[0] for handle in handles] == want


def test_a_mixed_step_between_leaves_the_decodes_as_they_were() -> None:
    want = [solo(PROMPTS[0], GREEDY, 9, seed=0), solo(PROMPTS[3], GREEDY, 2, seed=1)]
    driver = Driver(graph_runner())
    update, _ = driver.start(3, len(PROMPTS[0]), GREEDY, seed=0)
    decodes = (3,)
    tokens = driver.run(chunks=(Chunk(3, 0, PROMPTS[0], (3,)),), slots=(update,)).tokens
    for step in range(7):
        if step == 3:
            other, _ = driver.start(4, len(PROMPTS[3]), GREEDY, seed=1)
            mixed = driver.run(decodes, (Chunk(4, 0, PROMPTS[3], (4,)),), (other,)).tokens
            tokens.append(mixed[0])
            assert mixed[1] == want[1][0]
        tokens += driver.run(decodes).tokens
    assert tokens == want[0]


def test_choices_draw_from_one_prompt_row() -> None:
    want = [solo(PROMPTS[1], PLAIN, 1, seed=5, choice=choice)[0] for choice in range(3)]
    driver = Driver(graph_runner())
    updates = [driver.start(slot, len(PROMPTS[1]), PLAIN, seed=5, choice=slot)[0] for slot in range(3)]
    assert driver.run(chunks=(Chunk(0, 0, PROMPTS[1], (0, 1, 2)),), slots=tuple(updates)).tokens == want


def test_a_row_that_is_not_finite_is_reported_alone() -> None:
    runner = graph_runner()
    runner.model.poison = 42  # type: ignore[attr-defined]
    assert runner.graphs is not None
    runner.graphs._captured.clear()  # captured at start, without the poison
    driver = Driver(runner)
    prompts = [(1, 2, 3), (4, 42, 5), (6, 7)]
    updates = [driver.start(slot, len(prompt), GREEDY)[0] for slot, prompt in enumerate(prompts)]
    chunks = tuple(Chunk(slot, 0, prompt, (slot,)) for slot, prompt in enumerate(prompts))
    result = driver.run(chunks=chunks, slots=tuple(updates))
    assert result.bad == (1,)
    assert len(result.tokens) == 3


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_model_that_cannot_be_captured_runs_and_leaves_torchs_generator_usable() -> None:
    runner = graph_runner()
    assert runner.graphs is not None
    runner.graphs._captured.clear()
    forward = runner.model.forward

    def reads(token_ids, meta, caches):  # type: ignore[no-untyped-def]
        token_ids.tolist()
        return forward(token_ids, meta, caches)

    runner.model.forward = reads  # type: ignore[method-assign]
    assert Driver(runner).generate(0, PROMPTS[0], GREEDY, 6) == solo(PROMPTS[0], GREEDY, 6)
    assert set(runner.graphs._captured.values()) == {None}
    assert torch.isfinite(torch.randn(8, device="cuda")).all()
