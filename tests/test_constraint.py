"""How constrained sequences are planned: masks with every draw, one draw at a time, and nobody waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.constraint import StructuredOutput
from aserve.errors import InvalidRequestError, RequestFailedError
from aserve.grammar import KnownMask
from aserve.request import Request, SamplingParams, Sequence
from tests.driver import Driver
from tests.fakes import make_request

LENGTH = 6


class Chain:
    """Every token is one to three more than the last; LENGTH of them are a whole output."""

    def __init__(self, length: int = LENGTH) -> None:
        self.tokens: list[int] = []
        self.length = length
        self.ready = True
        self.broken = False

    def mask(self) -> KnownMask:
        last = self.tokens[-1] if self.tokens else 10
        bits = sum(1 << (last + step) for step in (1, 2, 3))
        return KnownMask(bits.to_bytes(bits.bit_length() // 8 + 1, "little"))

    def accept(self, token_id: int) -> bool:
        last = self.tokens[-1] if self.tokens else 10
        if self.broken or not 1 <= token_id - last <= 3:
            raise RequestFailedError(f"token {token_id} after {last}")
        self.tokens.append(token_id)
        return len(self.tokens) == self.length


class ChainDriver(Driver):
    """Knows what constrained requests give when they run alone."""

    def expected(self, sequence: Sequence) -> list[int]:
        request = sequence.request
        fresh = Chain(sequence.constraint.length) if isinstance(sequence.constraint, Chain) else None
        return self.runner.solo(
            request.prompt,
            request.params,
            seed=request.seed,
            choice=sequence.index,
            max_tokens=request.max_tokens,
            constraint=fresh,
        )


def chained(prompt: list[int], *, n: int = 1, max_tokens: int = 20, length: int = LENGTH, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n, seed=5)
    request = make_request(prompt, params, **options)
    for sequence in request.sequences:
        sequence.constraint = Chain(length)
    return request


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_an_output_keeps_to_its_masks_and_ends_when_it_is_complete(depth: int, n: int) -> None:
    driver = ChainDriver(depth=depth)
    request = chained([1, 2, 3, 4, 5], n=n)
    driver.add(request)
    driver.run()
    for sequence in request.sequences:
        assert isinstance(sequence.constraint, Chain)
        assert sequence.constraint.tokens == sequence.output
        assert len(sequence.output) == LENGTH
        assert driver.ends[sequence] == "stop"
        assert sequence.stop_token is None  # the last token is text, to be shown


@pytest.mark.parametrize("depth", [1, 2])
def test_the_last_draw_under_a_cap_is_masked_too(depth: int) -> None:
    driver = ChainDriver(depth=depth)
    request = chained([1, 2, 3], max_tokens=4)
    driver.add(request)
    driver.run()
    assert driver.ends[request.sequences[0]] == "length"
    assert len(request.sequences[0].output) == 4  # each of them accepted: Chain raises otherwise


def test_complete_at_the_cap_is_complete() -> None:
    driver = ChainDriver()
    request = chained([1, 2, 3], max_tokens=LENGTH)
    driver.add(request)
    driver.run()
    assert driver.ends[request.sequences[0]] == "stop"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_constrained_neighbour_delays_nobody(depth: int) -> None:
    def steps(neighbours: int) -> int:
        driver = ChainDriver(depth=depth)
        free = make_request([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=30))
        driver.add(free, *(chained([1, 2, number], length=25, max_tokens=60) for number in range(neighbours)))
        count = 0
        while free.sequences[0] not in driver.ends:
            driver.step()
            count += 1
        driver.run()
        return count

    assert steps(3) == steps(0)


def test_a_row_is_planned_only_with_its_last_draw_committed() -> None:
    driver = ChainDriver(depth=3)
    request = chained([1, 2, 3])
    driver.add(request, make_request([4, 5, 6], SamplingParams(temperature=0.0, max_tokens=20)))
    sequence = request.sequences[0]
    while sequence not in driver.ends:
        driver.step()
        assert sequence.num_inflight <= 1
        drawn = [slot for plan, _ in driver.in_flight for slot in plan.draws]
        masked = [slot for plan, _ in driver.in_flight for slot, _ in plan.masks]
        assert drawn.count(sequence.slot) == masked.count(sequence.slot) <= 1
    driver.run()


def test_a_row_whose_mask_takes_long_waits_for_it_alone() -> None:
    driver = ChainDriver(depth=2)
    slow, free = chained([1, 2, 3]), make_request([4, 5, 6], SamplingParams(temperature=0.0, max_tokens=12))
    driver.add(slow, free)
    sequence = slow.sequences[0]
    while len(sequence.output) < 2:
        driver.step()
    assert isinstance(sequence.constraint, Chain)
    sequence.constraint.ready = False
    while free.sequences[0] not in driver.ends:
        driver.step()
    assert len(sequence.output) <= 3  # a draw may have been planned before
    sequence.constraint.ready = True
    driver.run()
    assert driver.ends[sequence] == "stop"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_and_resumed_equals_alone(depth: int, preemption: Any) -> None:
    driver = ChainDriver(depth=depth, num_gpu_blocks=24, num_cpu_blocks=48, preemption=preemption)
    requests = [chained([number, 2, 3, 4, 5, 6], length=30, max_tokens=30, n=2) for number in range(3)]
    driver.add(*requests)
    driver.run()  # compares with solo runs at the end
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(driver.ends[sequence] == "stop" for request in requests for sequence in request.sequences)


def test_a_broken_constraint_ends_its_request_alone() -> None:
    driver = ChainDriver(depth=2)
    broken, free = chained([1, 2, 3], n=2), make_request([4, 5, 6], SamplingParams(temperature=0.0, max_tokens=9))
    driver.add(broken, free)
    while not broken.sequences[1].output:
        driver.step()
    assert isinstance(broken.sequences[1].constraint, Chain)
    broken.sequences[1].constraint.broken = True
    while driver.scheduler.num_unfinished or driver.in_flight:
        driver.step()
    driver.take(driver.scheduler.take_events())
    assert [driver.ends[sequence] for sequence in broken.sequences] == ["error", "error"]
    assert isinstance(broken.error, RequestFailedError)
    assert driver.ends[free.sequences[0]] == "length"
    assert driver.blocks.num_used == 0


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", None),
        ("json_schema", 3),
        ("json_object", {}),
        ("regex", ""),
        ("regex", ("a",)),
        ("choice", ()),
        ("choice", "ab"),
        ("choice", ("a", "")),
        ("choice", ("a",) * 1025),
        ("grammar", None),
        ("yaml", "a"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(kind: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutput(kind, value, name="guided_thing")
    assert caught.value.param == "guided_thing"


@pytest.mark.parametrize("options", [{"min_tokens": 1}, {"allowed_token_ids": (1,)}])
def test_what_could_leave_no_token_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured=StructuredOutput("json_object"), **options)
    assert caught.value.param in options
