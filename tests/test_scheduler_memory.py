"""The scheduler's memory: shared prefixes, choices that fork, and preemption by swap or recompute."""

from __future__ import annotations

from typing import Any

import pytest

from aserve.plan import StepResult, TokenLogprobs
from aserve.preemption import CostModel
from aserve.request import Phase, Request
from tests.driver import Driver, fail_once, greedy, plan_of, prompt, sampled
from tests.fakes import make_request

# prefix cache


def test_a_second_request_computes_only_what_the_cache_lacks() -> None:
    driver = Driver()
    first, second = make_request(prompt(10), greedy(3)), make_request((*prompt(10), 77), greedy(3))
    driver.add(first)
    driver.run()
    driver.add(second)
    assert plan_of(driver).chunks[0].start == 8
    driver.run()
    assert (first.num_cached, second.num_cached) == (0, 8)


def test_a_full_hit_still_computes_the_last_token() -> None:
    driver = Driver()
    driver.add(make_request(prompt(8), greedy(3)))
    driver.run()
    driver.add(make_request(prompt(8), greedy(3)))
    chunk = plan_of(driver).chunks[0]
    assert chunk.start == 4 and chunk.draws
    driver.run()


def test_output_is_shared_with_the_next_turn() -> None:
    driver = Driver()
    first = make_request(prompt(6), greedy(10))
    driver.add(first)
    driver.run()
    turn = make_request((*first.prompt, *first.sequences[0].output, 5, 6), greedy(3))
    driver.add(turn)
    driver.run()
    assert turn.num_cached == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_arrive_together_compute_their_prefix_once(depth: int) -> None:
    driver = Driver(depth=depth, max_num_batched_tokens=16, num_gpu_blocks=100)
    requests = [make_request((*prompt(32), 500 + number), greedy(3)) for number in range(6)]
    driver.add(*requests)
    driver.run()
    assert [request.num_cached for request in requests] == [0] + [32] * 5
    computed = sum(len(chunk.tokens) for plan in driver.runner.plans for chunk in plan.chunks)
    assert computed == 33 + 5


def test_others_do_not_wait_for_those_that_wait_for_a_prefix() -> None:
    driver = Driver(max_num_batched_tokens=64)
    same = [make_request(prompt(20), greedy(3)) for _ in range(2)]
    other = make_request(prompt(5, 100), greedy(3))
    driver.add(*same, other)
    assert len(plan_of(driver).chunks) == 2
    assert same[1].sequences[0].phase is Phase.WAITING and other.sequences[0].phase is Phase.RUNNING
    driver.run()


def test_one_whose_prefix_is_never_finished_by_another_computes_it_itself() -> None:
    driver = Driver(max_num_batched_tokens=8)
    first, second = make_request(prompt(30), greedy(3)), make_request(prompt(30), greedy(3))
    driver.add(first, second)
    driver.step()
    driver.scheduler.cancel(first, "cancelled")
    driver.run()
    assert driver.ends[second.sequences[0]] == "length"


def test_different_salts_share_nothing() -> None:
    driver = Driver()
    for salt in ("a", "b", None):
        request = make_request(prompt(12), greedy(2), cache_salt=salt)
        driver.add(request)
        driver.run()
        assert request.num_cached == 0


def test_prompt_logprobs_skip_the_lookup() -> None:
    driver = Driver()
    driver.add(make_request(prompt(12), greedy(2)))
    driver.run()
    request = make_request(prompt(12), greedy(2, prompt_logprobs=0))
    driver.add(request)
    driver.run()
    assert request.num_cached == 0


def test_a_reused_block_is_not_found_by_its_old_name() -> None:
    driver = Driver(num_gpu_blocks=8)
    first = prompt(12)
    for tokens in (first, prompt(28, 100), prompt(28, 200), first):
        driver.add(make_request(tokens, greedy(3)))
        driver.run()
    assert driver.requests[-1].num_cached == 0


def test_prompt_logprobs_are_collected_over_chunks() -> None:
    driver = Driver(max_num_batched_tokens=4)
    request = make_request(prompt(10), greedy(2, prompt_logprobs=0))
    driver.add(request)
    given = []
    while request.sequences[0].output == []:
        plan = plan_of(driver)
        _, result = driver.in_flight[0]
        assert isinstance(result, StepResult)
        chunk = plan.chunks[0]
        positions = range(chunk.start + 1, min(chunk.start + len(chunk.tokens) + 1, 10))
        result.prompt_logprobs[0] = [TokenLogprobs(request.prompt[each], -float(each)) for each in positions]
        given += result.prompt_logprobs[0]
        driver.collect()
    assert request.prompt_logprobs == given and len(given) == 9
    driver.run()


# several choices


@pytest.mark.parametrize("length", [8, 10])
def test_choices_draw_from_one_prompt_row(length: int) -> None:
    driver = Driver()
    request = make_request(prompt(length), sampled(6, n=3, seed=7))
    driver.add(request)
    plan = plan_of(driver)
    assert len(plan.chunks) == 1 and len(plan.chunks[0].draws) == 3 and len(plan.slots) == 3
    driver.collect()
    shared = length // 4
    tables = [seat.table.blocks for seat in driver.scheduler._batch.groups[request]]
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    copies = len(plan_of(driver).copies)
    assert copies == (2 if length % 4 else 0), "the last writer keeps the shared block"
    driver.run()
    outputs = [tuple(sequence.output) for sequence in request.sequences]
    assert len(set(outputs)) == 3
    assert outputs[0] == tuple(driver.runner.solo(request.prompt, request.params, seed=7))


def test_a_wide_request_fits_exactly_the_pool_that_admission_promised() -> None:
    driver = Driver(num_gpu_blocks=8)  # 2 shared blocks, 3 x 2 for the choices
    driver.add(make_request(prompt(10), sampled(6, n=3, seed=1)))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_choices_survive_preemption_with_their_shared_prompt(depth: int, preemption: Any) -> None:
    driver = Driver(num_gpu_blocks=14, num_cpu_blocks=20, depth=depth, preemption=preemption)
    driver.add(make_request(prompt(6, 100), sampled(30, seed=1)))
    wide = make_request(prompt(10), sampled(10, n=3, seed=2))
    driver.add(wide)
    driver.run()
    assert wide.num_preemptions > 0


def test_a_choice_takes_over_the_shared_prompt_when_its_leader_ends() -> None:
    driver = Driver(max_num_batched_tokens=4, num_gpu_blocks=40, prefix_caching=False)
    request = make_request(prompt(18), sampled(12, n=3, seed=2))
    driver.add(request)
    while len(request.sequences[0].output) < 3:
        driver.step()
    fail_once(driver, 99)  # nobody's fault: all is computed again
    driver.step()
    driver.step()  # the leader has computed a part of the prompt, the others wait
    assert [sequence.num_computed for sequence in request.sequences] == [4, 0, 0]
    driver.finish(request.sequences[0])
    chunk = plan_of(driver).chunks[0]
    assert chunk.slot == request.sequences[1].slot and chunk.start == 4
    driver.run()
    assert all(len(sequence.output) == 12 for sequence in request.sequences[1:])


# preemption


def fill(driver: Driver, *requests: Request) -> None:
    """Runs until a preemption has happened."""
    driver.add(*requests)
    for _ in range(200):
        driver.step()
        if driver.scheduler.stats().num_preemptions:
            return
    raise AssertionError("nothing was preempted")


def test_the_newest_of_the_lowest_priority_is_the_victim() -> None:
    driver = Driver(num_gpu_blocks=12, prefix_caching=False)
    requests = [
        make_request(prompt(4, 10), greedy(30), priority=1, arrival=0.0),
        make_request(prompt(4, 50), greedy(30), priority=0, arrival=1.0),
        make_request(prompt(4, 90), greedy(30), priority=1, arrival=2.0),
    ]
    fill(driver, *requests)
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    driver.run()
    assert requests[1].num_preemptions == 0, "the oldest of the highest priority is never a victim"


def test_a_step_that_preempts_admits_nobody() -> None:
    driver = Driver(num_gpu_blocks=12, prefix_caching=False, max_num_seqs=8)
    driver.add(*(make_request(prompt(4, start), greedy(30)) for start in range(10, 100, 20)))
    before = 0
    for _ in range(150):
        plan = driver.launch()
        after = driver.scheduler.stats().num_preemptions
        assert plan is None or after == before or not plan.slots
        before = after
        if driver.in_flight:
            driver.collect()
    assert before > 0
    driver.run()


def test_a_swapped_request_resumes_from_the_host_pool_without_recomputing() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, preemption="swap")
    first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
    fill(driver, first, second)
    assert second.sequences[0].phase is Phase.SWAPPED and driver.scheduler.num_swapped == 1
    driver.run()
    resumed = [chunk for plan in driver.runner.plans if plan.swap_in for chunk in plan.chunks]
    assert resumed and all(len(chunk.tokens) == 1 for chunk in resumed)


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=2, preemption="swap")
    first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
    fill(driver, first, second)
    assert second.sequences[0].phase is Phase.WAITING
    driver.run()
    assert driver.scheduler.stats().num_swaps == 0


def test_a_swapped_request_may_be_cancelled() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, preemption="swap")
    first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
    fill(driver, first, second)
    driver.scheduler.cancel(second, "cancelled")
    driver.step()
    assert driver.ends[second.sequences[0]] == "cancelled"
    assert driver.blocks.num_host_free == 20
    driver.run()


def test_tokens_in_flight_at_preemption_are_kept() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, depth=2, preemption="swap")
    first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
    driver.add(first, second)
    sequence = second.sequences[0]
    for _ in range(50):
        driver.launch()
        if driver.scheduler.num_swapped:
            break
        if len(driver.in_flight) == 2:
            driver.collect()
    assert sequence.phase is Phase.SWAPPED and sequence.num_inflight == 1
    before = len(sequence.output)
    while sequence.num_inflight:
        driver.collect()
    assert len(sequence.output) == before + 1
    driver.run()


def test_the_cost_decides_between_swap_and_recompute() -> None:
    for prefill_rate, phase in ((1.0, Phase.SWAPPED), (1e12, Phase.WAITING)):
        costs = CostModel("auto", block_size=4, block_bytes=1000, copy_rate=1e6, prefill_rate=prefill_rate)
        driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, preemption=costs, prefix_caching=False)
        first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
        fill(driver, first, second)
        assert second.sequences[0].phase is phase
        driver.run()


def test_preempted_requests_go_before_new_ones() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, preemption="swap")
    first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
    fill(driver, first, second)
    late = [make_request(prompt(4, start), greedy(4)) for start in range(100, 200, 10)]
    driver.add(*late)
    while second.sequences[0].phase is Phase.SWAPPED:
        assert all(each.first_scheduled is None for each in late)
        driver.step()
    driver.run()
