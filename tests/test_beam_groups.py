"""Beam searches in the scheduler: forked tables, one group in and out of memory, the prompt computed once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from aserve.beams import BeamSearch
from aserve.plan import StepPlan
from aserve.request import Phase, Request, SamplingParams
from tests.driver import Driver, prompt
from tests.fakes import make_request


def beams(width: int, max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, **options)


def num_computed(plans: list[StepPlan], before: int) -> int:
    """Tokens that plans compute at positions below `before`."""
    return sum(max(0, min(chunk.start + len(chunk.tokens), before) - chunk.start) for p in plans for chunk in p.chunks)


def search_of(request: Request) -> BeamSearch:
    assert request.beams is not None
    return request.beams


def preempt(driver: Driver, request: Request) -> None:
    driver.scheduler._preempt(request, "memory")
    driver.check()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 19])
def test_the_prompt_is_computed_once_and_each_beam_token_once(length: int, depth: int, prefix_caching: bool) -> None:
    driver = Driver(depth=depth, prefix_caching=prefix_caching, max_num_batched_tokens=8)
    request = make_request(prompt(length), beams(3, 9))
    driver.add(request)
    driver.run()
    assert num_computed(driver.runner.plans, length) == length
    assert sum(plan.num_tokens for plan in driver.runner.plans) == length + 3 * 8


def test_what_beams_share_is_stored_once() -> None:
    driver = Driver(prefix_caching=False, block_size=4)
    request = make_request(prompt(18), beams(4, 12))
    driver.add(request)
    driver.step()
    assert driver.blocks.num_used == 5
    while driver.step() == []:
        tables = [seat.table.blocks for seat in driver.scheduler._batch.groups.get(request, [])]
        assert all(table[:4] == tables[0][:4] for table in tables)
        assert driver.blocks.num_used == len({block for table in tables for block in table})
    driver.run()


def test_a_fork_copies_the_last_block_and_no_other() -> None:
    driver = Driver(prefix_caching=False, block_size=4, eos_chance=0.0)
    request = make_request(prompt(6), beams(3, 12))
    driver.add(request)
    driver.step()
    last = driver.runner.slots[0].table[1]
    plan = driver.launch()
    assert plan is not None
    assert len(plan.copies) == 2 and {copy.source for copy in plan.copies} == {last}
    assert [len(chunk.tokens) for chunk in plan.chunks] == [1, 1, 1]
    driver.collect()
    driver.run()
    assert all(len(plan.copies) <= 3 for plan in driver.runner.plans)


def test_a_group_waits_for_its_own_draws_alone() -> None:
    driver = Driver(depth=2)
    request, other = make_request(prompt(5), beams(2, 20)), make_request(prompt(5, 50), SamplingParams(max_tokens=30))
    driver.add(request, other)
    for _ in range(10):
        driver.step()
    together = []
    for _ in range(6):
        while driver.launch() is not None:
            pass
        chunks = [bool(plan.chunks) for plan, _ in driver.in_flight]
        assert sum(chunks) <= 1 and all(plan.decodes for plan, _ in driver.in_flight)
        together.append(len(chunks))
        driver.collect()
    assert together == [2] * 6
    driver.run()


def test_beams_go_before_the_prompts_of_others() -> None:
    driver = Driver(max_num_batched_tokens=8, prefix_caching=False)
    driver.add(make_request(prompt(4), beams(3, 8)))
    driver.step()
    driver.add(make_request(prompt(200, 300), SamplingParams(max_tokens=2, temperature=0.0)))
    steps = 0
    while driver.scheduler.num_unfinished == 2:
        driver.step()
        steps += 1
    assert steps == 7
    driver.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_group_is_swapped_as_one_and_shared_blocks_once(steps: int, depth: int) -> None:
    driver = Driver(depth=depth, num_cpu_blocks=40, preemption="swap", prefix_caching=False)
    request = make_request(prompt(10), beams(4, 12))
    driver.add(request)
    for _ in range(steps):
        driver.step()
    driver.launch()  # what is in flight then is drawn again
    held = {block for seat in driver.scheduler._batch.groups[request] for block in seat.table.blocks}
    preempt(driver, request)
    assert {sequence.phase for sequence in request.sequences} == {Phase.SWAPPED}
    assert len(driver.scheduler._swap_out) <= len(held)
    assert driver.blocks.num_used == 0
    assert driver.blocks.num_host_blocks - driver.blocks.num_host_free == len(driver.scheduler._swap_out)
    driver.run()
    assert driver.scheduler.stats().num_swaps == 1
    assert num_computed(driver.runner.plans, 9) == 9


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 12))
def test_a_recomputed_group_computes_what_its_beams_share_once(steps: int, depth: int) -> None:
    driver = Driver(depth=depth, preemption="recompute", prefix_caching=False, max_num_batched_tokens=8)
    request = make_request(prompt(16), beams(4, 16))
    driver.add(request)
    for _ in range(steps + 1):
        driver.step()
    outputs = [beam.tokens for beam in search_of(request).live]
    shared = 0
    while outputs[0] and len({output[: shared + 1] for output in outputs}) == 1:
        shared += 1
    before = len(driver.runner.plans)
    preempt(driver, request)
    driver.run()
    whole = 16 + shared - (16 + shared) % 4
    assert num_computed(driver.runner.plans[before:], whole) == whole


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
def test_cached_blocks_of_beams_hold_what_their_names_say(depth: int, preemption: Any) -> None:
    driver = Driver(depth=depth, preemption=preemption, num_cpu_blocks=60, max_num_batched_tokens=8)
    requests = [make_request(prompt(6), beams(3, 40, length_penalty=penalty)) for penalty in (1.0, 0.5)]
    driver.add(*requests)
    for step in range(400):
        if driver.scheduler.num_unfinished:
            driver.step()
            running = list(driver.scheduler._batch.groups)
            if step % 7 == 6 and running:
                preempt(driver, running[step % len(running)])
    driver.run()
    assert driver.scheduler.stats().num_preemptions >= 5
    assert num_computed(driver.runner.plans, 4) == 4


def test_beams_that_do_not_fit_beside_others_take_their_blocks() -> None:
    driver = Driver(num_gpu_blocks=16, prefix_caching=False, num_cpu_blocks=20, preemption="swap")
    first = make_request(prompt(8), beams(4, 20))
    later = [make_request(prompt(8, 100 * i), SamplingParams(max_tokens=20), arrival=float(i)) for i in range(1, 4)]
    driver.add(first, *later)
    driver.run()
    assert first.num_preemptions == 0
    assert sum(request.num_preemptions for request in later) > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_group_leaves_nothing(depth: int) -> None:
    driver = Driver(depth=depth)
    request = make_request(prompt(9), beams(3, 30))
    driver.add(request)
    for _ in range(6):
        driver.step()
    driver.launch()
    driver.scheduler.cancel(request, "cancelled")
    driver.run()
    assert set(driver.ends.values()) == {"cancelled"}


def test_a_deadline_shows_the_best_so_far() -> None:
    driver = Driver()
    request = make_request(prompt(9), SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=30), deadline=6.5)
    driver.add(request)
    driver.run()
    assert [sequence.finish_reason for sequence in request.sequences] == ["deadline"] * 3
    assert [len(sequence.output) for sequence in request.sequences] == [7, 7, 0]
    assert request.error is None
    late = make_request(prompt(9), beams(2, 30), arrival=driver.now, deadline=driver.now - 1)
    driver.add(late)
    driver.run()
    assert late.error is not None and search_of(late).beams() == []


class Stops:
    """Calls everything a stop string but multiples of three."""

    def fork(self) -> Stops:
        return self

    def push(self, token_id: int) -> bool:
        return token_id % 3 != 0


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
def test_a_group_that_narrows_keeps_its_slots_and_widens_again(preemption: Any) -> None:
    found = []
    for interrupted in (False, True):
        driver = Driver(num_cpu_blocks=40, preemption=preemption or "auto", prefix_caching=False, depth=2)
        request = make_request(prompt(7), beams(4, 14, ignore_eos=True))
        request.beams = BeamSearch(4, 14, (), early_stopping="never", length_penalty=3.0, watch=Stops())
        driver.add(request)
        widths = []
        for step in range(60):
            if not driver.scheduler.num_unfinished:
                break
            driver.step()
            live = len(request.beams.live)
            seats = driver.scheduler._batch.groups.get(request, [])
            if seats:
                assert len(seats) == 4
                widths.append(live)
                if not driver.in_flight:
                    assert all(bool(seat.table.blocks) == (place < live) for place, seat in enumerate(seats))
            if interrupted and preemption is not None and step % 3 == 2 and seats:
                preempt(driver, request)
        assert not driver.scheduler.num_unfinished and driver.blocks.num_used == 0
        changes = [after - before for before, after in pairwise(widths)]
        assert min(changes) < 0 < max(changes)
        found.append(request.beams.beams())
    assert found[0] == found[1] and len(found[0]) == 4


def test_fewer_than_all_beams_are_shown() -> None:
    driver = Driver(eos_chance=0.2)
    request = make_request(prompt(9), SamplingParams(n=2, best_of=5, use_beam_search=True, max_tokens=10, logprobs=2))
    driver.add(request)
    driver.run()
    best = driver.runner.solo_beams(request)
    assert [tuple(sequence.output) for sequence in request.sequences] == [
        *(beam.token_ids for beam in best[:2]),
        (),
        (),
        (),
    ]
    assert len(best) == 5 and all(len(beam.logprobs or ()) == len(beam.token_ids) for beam in best)
