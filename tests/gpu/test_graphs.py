"""Steps through StepGraphs equal the CPU runner's: captured on a CUDA device, or (TRITON_INTERPRET=1) uncaptured."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from aserve.plan import BlockCopy, BlockDelta, Chunk, SlotMask
from aserve.request import SamplingParams
from aserve.worker.buckets import DrawShape, ForwardShape, likely_shapes
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
        runner.graphs._capture = lambda work: None  # type: ignore[method-assign]
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


EXTRAS = {
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 50.0, 4: -100.0}),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "prompt logprobs": SamplingParams(temperature=0.0, prompt_logprobs=2),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(5, 11)),
}


@pytest.mark.parametrize("params", EXTRAS.values(), ids=EXTRAS)
def test_a_request_with_options_of_its_own_leaves_the_others_in_graphs(params: SamplingParams) -> None:
    """Both sequences' tokens and logprobs equal the CPU's, and every forward pass has a captured shape."""

    def steps(driver: Driver) -> list[object]:
        updates = []
        for slot, prompt, options in ((1, PROMPTS[1], params), (4, PROMPTS[2], PLAIN)):
            tokens = prompt if options.needs_token_counts else None
            updates.append(driver.start(slot, len(prompt), options, seed=slot, tokens=tokens)[0])
        chunks = (Chunk(1, 0, PROMPTS[1], (1,)), Chunk(4, 0, PROMPTS[2][:6]))
        results = [driver.run(chunks=chunks, slots=tuple(updates))]
        results.append(driver.run((1,), (Chunk(4, 6, PROMPTS[2][6:], (4,)),)))
        results += [driver.run((1, 4)) for _ in range(6)]
        found: list[object] = [result.tokens for result in results]
        for result in results:
            for draw in [*result.logprobs.values(), *(d for part in result.prompt_logprobs.values() for d in part)]:
                found += [draw.token_id, [token for token, _ in draw.top]]
                found.append(pytest.approx(draw.logprob, abs=1e-4))
        return found

    driver = Driver(graph_runner())
    assert driver.runner.graphs is not None
    assert steps(driver) == steps(Driver(make_runner()))
    assert any(isinstance(shape, ForwardShape) and shape.num_decodes for shape in driver.runner.graphs._captured)


class Known:
    """A mask that is there."""

    def __init__(self, *tokens: int) -> None:
        bits = np.zeros(VOCAB + 7, dtype=np.uint8)
        bits[list(tokens)] = 1
        self.bits = np.packbits(bits, bitorder="little").tobytes()

    def read(self) -> bytes:
        return self.bits


def test_a_masked_draw_gives_what_its_mask_allows_and_leaves_its_neighbours() -> None:
    want = solo(PROMPTS[3], SEEDED, 6, seed=2)
    driver = Driver(graph_runner())
    updates = [driver.start(slot, len(p), SEEDED, seed=2)[0] for slot, p in ((0, PROMPTS[3]), (6, PROMPTS[0]))]
    chunks = (Chunk(0, 0, PROMPTS[3], (0,)), Chunk(6, 0, PROMPTS[0], (6,)))
    tokens = []
    for step in range(6):
        masks = (SlotMask(6, Known(step, step + 20)),)
        if step == 0:
            result = driver.run(chunks=chunks, slots=tuple(updates), masks=masks)
        else:
            result = driver.run((0, 6), masks=masks)
        tokens.append(result.tokens[0])
        assert result.tokens[1] in (step, step + 20)
    assert tokens == want


def test_a_sequence_swapped_out_and_in_goes_on_as_before() -> None:
    want = solo(PROMPTS[3], GREEDY, 8)
    driver = Driver(graph_runner(swap_space=0.01))
    update, _ = driver.start(2, len(PROMPTS[3]), GREEDY)
    tokens = driver.run(chunks=(Chunk(2, 0, PROMPTS[3], (2,)),), slots=(update,)).tokens
    tokens += driver.run((2,)).tokens + driver.run((2,)).tokens
    blocks, length = driver.tables[2], driver.lengths[2]
    driver.run(swap_out=tuple(BlockCopy(block, host) for host, block in enumerate(blocks)))
    with torch.inference_mode():
        for key, value in driver.runner.pools.caches:  # others use the blocks meanwhile
            key[blocks], value[blocks] = 9.0, 9.0
    driver.free = [block for block in driver.free if block not in blocks] + blocks
    fresh = [driver.free.pop(0) for _ in blocks]
    update, _ = driver.start(5, len(PROMPTS[3]), GREEDY)
    driver.tables[5], driver.lengths[5] = fresh, length
    swap_in = tuple(BlockCopy(host, block) for host, block in enumerate(fresh))
    chunk = Chunk(5, length, (tokens[-1],), (5,))
    delta = BlockDelta(5, 0, tuple(fresh))
    tokens += driver.run((), (chunk,), (update,), blocks=(delta,), swap_in=swap_in).tokens
    while len(tokens) < 8:
        tokens += driver.run((5,)).tokens
    assert tokens == want


def test_an_idle_worker_captures_what_steps_will_need() -> None:
    want = solo(PROMPTS[2], PLAIN, 8, seed=3)
    runner = graph_runner()
    assert runner.graphs is not None
    runner.graphs._ahead.extend(likely_shapes(8))
    with torch.inference_mode():
        while runner.graphs.idle():
            pass
    shapes = set(runner.graphs._captured)
    assert Driver(runner).generate(3, PROMPTS[2], PLAIN, 8, seed=3) == want
    assert set(runner.graphs._captured) == shapes


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
    captured = runner.graphs._captured.items()
    assert all(each.graph is None for shape, each in captured if not isinstance(shape, DrawShape))
    assert torch.isfinite(torch.randn(8, device="cuda")).all()
