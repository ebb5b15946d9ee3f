"""Bias, masks, penalties and logprobs, against plain arithmetic and through the runner."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from aserve.executors import StepError
from aserve.grammar import KnownMask
from aserve.plan import Chunk, SlotMask, SlotUpdate, TokenLogprobs
from aserve.request import SamplingParams
from aserve.worker.sampler import Sampler
from aserve.worker.staging import Staging
from aserve_kernels import SamplingRows, load
from tests.tiny_model import VOCAB, Driver, make_runner

SIZE = 12


def greedy_rows(count: int) -> SamplingRows:
    zeros = torch.zeros(count, dtype=torch.int64)
    return SamplingRows(torch.zeros(count), zeros, zeros, zeros, all_greedy=True)


def update(slot: int, prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), **options: object) -> SlotUpdate:
    params = SamplingParams(temperature=0.0, **options)  # type: ignore[arg-type]
    ends = (3,) if params.min_tokens else ()
    tokens = prompt + output if params.needs_token_counts else None
    return SlotUpdate(slot, params, 0, 0, len(prompt), ends, tokens)


def draw(sampler: Sampler, logits: Tensor, *slots: int, output_index: tuple[int, ...] | None = None) -> list[int]:
    tokens, _ = sampler.draw(logits.clone(), greedy_rows(len(slots)), slots, output_index or (0,) * len(slots))
    return tokens.tolist()


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(load("torch"), SIZE, torch.device("cpu"), Staging(torch.device("cpu")))


def test_slots_without_uncommon_options_are_plain(sampler: Sampler) -> None:
    sampler.update([update(0), update(1, logprobs=0)])
    assert sampler.plain((0, 2))
    assert not sampler.plain((0, 1))
    sampler.update([update(1)])
    assert sampler.plain((0, 1))


def test_bias_moves_only_its_own_row(sampler: Sampler) -> None:
    sampler.update([update(4, logit_bias={7: 100.0, 2: -100.0}), update(5)])
    logits = torch.zeros(2, SIZE)
    logits[:, 2] = 50.0
    assert draw(sampler, logits, 4, 5) == [7, 2]


def test_a_mask_holds_its_own_row_whatever_its_length(sampler: Sampler) -> None:
    logits = torch.arange(SIZE).float().repeat(4, 1)
    masks = [SlotMask(1, KnownMask(b"\x12\x00")), SlotMask(3, KnownMask(b"\x01")), SlotMask(2, KnownMask(b"\xff" * 9))]
    tokens, _ = sampler.draw(logits, greedy_rows(4), (0, 1, 2, 3), (0,) * 4, masks)
    assert tokens.tolist() == [SIZE - 1, 4, SIZE - 1, 0]


def test_a_mask_outranks_bias_and_penalties(sampler: Sampler) -> None:
    sampler.update([update(0, logit_bias={7: 100.0}, repetition_penalty=2.0, logprobs=2)])
    logits = torch.zeros(1, SIZE)
    tokens, found = sampler.draw(logits, greedy_rows(1), (0,), (0,), [SlotMask(0, KnownMask(b"\x20"))])
    assert tokens.tolist() == [5]
    assert found is not None
    assert found.read([5])[0].logprob == pytest.approx(-math.log(SIZE))  # of the raw logits


def test_only_allowed_tokens_are_drawn(sampler: Sampler) -> None:
    sampler.update([update(0, allowed_token_ids=(5, 9))])
    logits = torch.arange(SIZE).float().flip(0).unsqueeze(0)
    assert draw(sampler, logits, 0) == [5]


def test_end_and_stop_tokens_are_masked_until_min_tokens_are_out(sampler: Sampler) -> None:
    sampler.update([update(0, min_tokens=2, stop_token_ids=(4,))])
    logits = torch.zeros(1, SIZE)
    logits[0, 3], logits[0, 4], logits[0, 8] = 9.0, 8.0, 1.0
    assert [draw(sampler, logits, 0, output_index=(i,))[0] for i in range(4)] == [8, 8, 3, 3]


def test_penalties_follow_prompt_and_output(sampler: Sampler) -> None:
    options = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    prompt, output = (1, 2), [2, 6, 6]
    sampler.update([update(3, prompt, tuple(output), **options), update(1)])
    torch.manual_seed(0)
    for _ in range(8):
        logits = torch.randn(2, SIZE) * 0.5
        want = logits[1].tolist()
        for token in range(SIZE):
            if token in prompt or token in output:
                want[token] *= 0.5 if want[token] > 0 else 2.0
            want[token] -= 0.25 * output.count(token) + 0.5 * (token in output)
        drawn = draw(sampler, logits, 1, 3)
        assert drawn == [int(logits[0].argmax()), want.index(max(want))]
        output.append(drawn[1])


def test_a_slot_handed_on_forgets_its_counts(sampler: Sampler) -> None:
    logits = torch.zeros(1, SIZE)
    logits[0, 6] = 0.5
    sampler.update([update(0, (1,), (6, 6, 6), frequency_penalty=1.0)])
    assert draw(sampler, logits, 0) != [6]
    sampler.update([update(0, (1,), (), frequency_penalty=1.0)])
    assert draw(sampler, logits, 0) == [6]
    sampler.update([update(0)])
    assert not sampler.counts.row_of
    sampler.update([update(slot, (slot,), (), presence_penalty=1.0) for slot in range(6)])
    assert len(set(sampler.counts.row_of.values())) == 6


def test_logprobs_are_of_the_raw_logits(sampler: Sampler) -> None:
    sampler.update([update(0), update(1, logprobs=2, logit_bias={5: 100.0}), update(2, logprobs=0)])
    torch.manual_seed(0)
    logits = torch.randn(3, SIZE)
    tokens, drawn = sampler.draw(logits.clone(), greedy_rows(3), (0, 1, 2), (0, 0, 0))
    assert drawn is not None
    words = drawn.read(tokens.tolist())
    raw = logits.double().log_softmax(-1)
    assert set(words) == {1, 2}
    assert words[1].token_id == 5
    assert words[1].logprob == pytest.approx(float(raw[1, 5]), abs=1e-5)
    order = raw[1].argsort(descending=True)[:2].tolist()
    assert [token for token, _ in words[1].top] == order
    assert [value for _, value in words[1].top] == pytest.approx(raw[1][order].tolist(), abs=1e-5)
    assert words[2] == TokenLogprobs(tokens.tolist()[2], pytest.approx(float(raw[2].max()), abs=1e-5), ())


@pytest.mark.parametrize(
    "options", [{"logit_bias": {SIZE: 1.0}}, {"allowed_token_ids": (1, -1)}, {"stop_token_ids": (SIZE,)}]
)
def test_options_that_name_no_token_fail_their_slot_alone(sampler: Sampler, options: dict[str, object]) -> None:
    with pytest.raises(StepError) as caught:
        sampler.update([update(0, logprobs=1), update(2, **options)])
    assert caught.value.slots == (2,)


def test_options_hold_over_a_generation() -> None:
    driver = Driver(make_runner())
    prompt = (5, 6, 7)
    free = driver.generate(0, prompt, SamplingParams(temperature=0.0), 6)
    only = driver.generate(1, prompt, SamplingParams(temperature=0.0, allowed_token_ids=(11, 12)), 6)
    apart = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    spread = driver.generate(2, prompt, apart, 20, tokens=prompt)
    held = SamplingParams(temperature=0.0, min_tokens=3)
    later = driver.generate(3, prompt, held, 6, end_token_ids=(free[0],))
    assert set(only) <= {11, 12}
    assert len(set(spread)) == 20
    assert free[0] not in later[:3]


@pytest.mark.parametrize("sizes", [(20,), (1, 7, 12), (19, 1)])
def test_prompt_logprobs_do_not_depend_on_chunks(sizes: tuple[int, ...]) -> None:
    prompt = tuple(i * 5 % VOCAB for i in range(20))
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    driver = Driver(make_runner())
    slot_update, _ = driver.start(2, len(prompt), params)
    words: list[TokenLogprobs] = []
    start = 0
    for size in sizes:
        part = prompt[start : start + size]
        last = start + size == len(prompt)
        slots = () if start else (slot_update,)
        result = driver.run(chunks=(Chunk(2, start, part, (2,) if last else ()),), slots=slots)
        words += result.prompt_logprobs[0]
        start += size
    assert [word.token_id for word in words] == list(prompt[1:])
    alone = Driver(make_runner())
    for position in (1, 9, 19):  # the token's logprob as a draw would have seen it
        params = SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=(prompt[position],))
        slot_update, _ = alone.start(position % 8, position, params)
        chunk = Chunk(position % 8, 0, prompt[:position], (position % 8,))
        want = alone.run(chunks=(chunk,), slots=(slot_update,)).logprobs[0]
        got = words[position - 1]
        assert math.isclose(got.logprob, want.logprob, abs_tol=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in want.top]
