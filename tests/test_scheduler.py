from __future__ import annotations

from typing import Any

import pytest

from aserve.errors import DeadlineError, RequestFailedError
from aserve.executors import StepError
from aserve.plan import Chunk, StepPlan, StepResult, TokenLogprobs
from aserve.preemption import CostModel
from aserve.request import Phase, Request, SamplingParams
from aserve.scheduler import Scheduler
from tests.driver import Driver
from tests.fakes import make_request


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def sampled(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **options)


def prompt(length: int, start: int = 10) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def plan_of(driver: Driver) -> StepPlan:
    plan = driver.launch()
    assert plan is not None
    return plan


# batching


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(make_request(prompt(19), greedy(3)))
    sizes = []
    for _ in range(3):
        plan = plan_of(driver)
        sizes.append([len(chunk.tokens) for chunk in plan.chunks])
        assert bool(plan.draws) == (len(sizes) == 3)
        driver.collect()
    assert sizes == [[8], [8], [3]]
    driver.run()


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_prompts_around_the_budget_are_exact(length: int) -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(make_request(prompt(length), greedy(5)))
    driver.run()


def test_decodes_and_chunks_share_one_step_and_decodes_go_first() -> None:
    driver = Driver(max_num_batched_tokens=8, prefix_caching=False)
    driver.add(make_request(prompt(4), greedy(20)))
    driver.step()
    driver.add(make_request(prompt(20, 100), greedy(4)))
    plan = plan_of(driver)
    assert len(plan.decodes) == 1 and len(plan.chunks[0].tokens) == 7
    assert plan.num_tokens == 8
    driver.run()


def test_a_steady_batch_reuses_the_tuple_of_decodes() -> None:
    driver = Driver()
    driver.add(*(make_request(prompt(4, start), greedy(30)) for start in (10, 50, 90)))
    driver.step()
    plans = []
    for _ in range(10):
        plans.append(plan_of(driver))
        driver.collect()
    assert all(plan.decodes is plans[0].decodes for plan in plans)
    assert all(not plan.slots and not plan.chunks for plan in plans)
    driver.run()


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    driver = Driver(max_num_seqs=8, max_num_batched_tokens=3)
    driver.add(*(make_request(prompt(2, start), greedy(9)) for start in range(10, 70, 10)))
    for _ in range(20):
        driver.step()
        assert driver.scheduler.num_running <= 3
    driver.run()


def test_nothing_to_do_plans_nothing() -> None:
    driver = Driver()
    assert driver.scheduler.schedule(0.0) is None
    assert driver.scheduler.next_deadline() is None


def test_max_tokens_zero_computes_the_prompt_and_draws_nothing() -> None:
    driver = Driver(max_num_batched_tokens=4)
    request = make_request(prompt(6), greedy(0))
    driver.add(request)
    driver.run()
    assert driver.ends == {request.sequences[0]: "length"} and request.sequences[0].output == []
    assert all(not plan.draws for plan in driver.runner.plans)


def test_a_request_beyond_the_context_must_have_been_refused() -> None:
    with pytest.raises(ValueError, match="context"):
        Driver(max_model_len=8).scheduler.add(make_request(prompt(6), greedy(3)))


# ends


def test_an_end_token_is_committed_and_ends_with_stop() -> None:
    driver = Driver(eos_chance=1.0)
    request = make_request(prompt(4), greedy(9))
    driver.add(request)
    driver.run()
    sequence = request.sequences[0]
    assert sequence.output == [2] and sequence.stop_token == 2 and sequence.finish_reason == "stop"


def test_no_end_token_comes_before_min_tokens() -> None:
    driver = Driver(eos_chance=1.0)
    request = make_request(prompt(4), greedy(9, min_tokens=4))
    driver.add(request)
    driver.run()
    assert len(request.sequences[0].output) == 5 and request.sequences[0].output[-1] == 2


def test_a_users_stop_token_ends_even_when_eos_is_ignored() -> None:
    driver = Driver(eos_chance=1.0)
    params = greedy(9, ignore_eos=True)
    stop = driver.runner.solo(prompt(4), params)[3]
    request = make_request(prompt(4), greedy(9, ignore_eos=True, stop_token_ids=(stop,)))
    driver.add(request)
    driver.run()
    assert request.sequences[0].output[-1] == stop == request.sequences[0].stop_token


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_late_stop_drops_the_tokens_in_flight(depth: int) -> None:
    driver = Driver(depth=depth, eos_chance=0.3)
    driver.add(*(make_request(prompt(4, start), greedy(30)) for start in range(10, 200, 8)))
    driver.run()
    assert "stop" in driver.ends.values()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_draw_is_planned_past_max_tokens(depth: int) -> None:
    driver = Driver(depth=depth)
    driver.add(make_request(prompt(4), greedy(5)))
    driver.run()
    assert sum(len(plan.draws) for plan in driver.runner.plans) == 5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_ends_a_sequence_now_and_its_blocks_are_free(depth: int) -> None:
    driver = Driver(depth=depth)
    request = make_request(prompt(4), greedy(30))
    driver.add(request)
    driver.step()
    driver.step()
    sequence = request.sequences[0]
    driver.launch()
    assert driver.scheduler.finish(sequence, "stop")
    assert not driver.scheduler.finish(sequence, "stop")
    assert driver.blocks.num_used == 0 and driver.scheduler.num_unfinished == 0
    num_tokens = len(sequence.output)
    while driver.in_flight:
        assert driver.collect() == []
    assert len(sequence.output) == num_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_request_is_reaped_at_the_next_step_wherever_it_is(depth: int) -> None:
    driver = Driver(depth=depth, max_num_seqs=2, max_num_batched_tokens=8)
    requests = [make_request(prompt(6, start), greedy(30)) for start in (10, 50, 90)]
    driver.add(*requests)
    for _ in range(4):
        driver.step()
    assert [request.sequences[0].phase for request in requests] == [Phase.RUNNING, Phase.RUNNING, Phase.WAITING]
    for request in requests:
        driver.scheduler.cancel(request, "cancelled")
        driver.scheduler.cancel(request, "error")  # the first reason stays
    driver.step()
    assert list(driver.ends.values()) == ["cancelled"] * 3
    assert driver.blocks.num_used == 0
    driver.run()


def test_a_departed_request_that_waits_costs_no_prefill() -> None:
    driver = Driver(max_num_seqs=1)
    running, waiting = make_request(prompt(4), greedy(5)), make_request(prompt(4, 50), greedy(5))
    driver.add(running, waiting)
    driver.step()
    driver.scheduler.cancel(waiting, "cancelled")
    driver.run()
    assert sum(len(plan.chunks) for plan in driver.runner.plans) == 1
    assert waiting.first_scheduled is None


def test_thousands_that_leave_at_once_are_reaped_over_several_steps() -> None:
    driver = Driver(max_num_seqs=1)
    requests = [make_request(prompt(4), greedy(5)) for _ in range(1500)]
    driver.add(*requests)
    driver.launch()
    for request in requests:
        driver.scheduler.cancel(request, "cancelled")
    driver.collect()
    assert driver.scheduler.schedule(0.0) is None
    events = driver.scheduler.take_events()
    driver.take(events)
    assert events[0].sequence is requests[0].sequences[0], "what holds memory goes first"
    assert driver.blocks.num_used == 0 and 500 <= len(events) < 600
    driver.run()
    assert len(driver.ends) == 1500


def test_a_deadline_ends_a_request_in_any_phase() -> None:
    driver = Driver(max_num_seqs=1)
    running = make_request(prompt(4), greedy(30), deadline=6.0)
    waiting = make_request(prompt(4), greedy(30), first_token_deadline=3.5)
    driver.add(running, waiting)
    assert driver.scheduler.next_deadline() == 3.5
    driver.run()
    assert set(driver.ends.values()) == {"deadline"}
    assert isinstance(waiting.error, DeadlineError)
    assert running.error is None and len(running.sequences[0].output) == 6


def test_the_first_token_lifts_its_deadline() -> None:
    driver = Driver()
    request = make_request(prompt(4), greedy(9), first_token_deadline=2.5)
    driver.add(request)
    driver.run()
    assert driver.ends[request.sequences[0]] == "length" and request.first_token == 0.0


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


# failures


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    driver = Driver()
    bad, good = make_request(prompt(8), sampled(9, n=2)), make_request(prompt(4, 50), greedy(9))
    driver.add(bad, good)
    driver.step()
    driver.runner.bad_slots = {bad.sequences[1].slot or 0}
    driver.step()
    driver.runner.bad_slots = set()
    assert [driver.ends[sequence] for sequence in bad.sequences] == ["error", "error"]
    assert isinstance(bad.error, RequestFailedError)
    driver.run()
    assert driver.ends[good.sequences[0]] == "length"
    again = make_request(prompt(8), greedy(2))
    driver.add(again)
    driver.run()
    assert again.num_cached == 0, "its KV is not to be trusted"


def fail_once(driver: Driver, *slots: int) -> None:
    def before_step(plan: StepPlan) -> None:
        driver.runner.before_step = None
        raise StepError("out of memory", slots)

    driver.runner.before_step = before_step


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_once_without_a_culprit_ends_nobody(depth: int) -> None:
    driver = Driver(depth=depth, max_num_seqs=2)
    requests = [make_request(prompt(4, start), greedy(9)) for start in (10, 50, 90)]
    driver.add(*requests)
    driver.step()
    while driver.in_flight:
        driver.collect()
    fail_once(driver)
    driver.run()
    assert [driver.ends[request.sequences[0]] for request in requests] == ["length"] * 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_free", [0, 1, 4])
def test_the_culprit_of_failing_steps_is_found_and_ends_alone(depth: int, num_free: int) -> None:
    """Whatever step computes the request with the odd prompt fails, once it has `num_free` tokens."""
    driver = Driver(depth=depth, num_cpu_blocks=64)
    odd = make_request(prompt(7, 500), greedy(9))
    requests = [make_request(prompt(4, start), greedy(9)) for start in (10, 50)]
    driver.add(*requests, odd, *(late := [make_request(prompt(4, start), greedy(9)) for start in (90, 130)]))

    def fail(plan: StepPlan) -> None:
        sequence = odd.sequences[0]
        busy = {*plan.decodes, *(chunk.slot for chunk in plan.chunks)}
        if sequence.slot in busy and len(sequence.output) >= num_free:
            raise StepError("it cannot be computed")

    driver.runner.before_step = fail
    driver.run()
    assert driver.ends[odd.sequences[0]] == "error"
    assert [driver.ends[request.sequences[0]] for request in requests + late] == ["length"] * 4


def test_a_machine_on_which_no_step_works_ends_everyone() -> None:
    driver = Driver()
    requests = [make_request(prompt(4, start), greedy(9)) for start in (10, 50, 90)]
    driver.add(*requests)

    def fail(plan: StepPlan) -> None:
        raise StepError("nothing works")

    driver.runner.before_step = fail
    driver.run()
    assert [driver.ends[request.sequences[0]] for request in requests] == ["error"] * 3


def test_requests_that_fail_only_together_end_after_some_tries() -> None:
    driver = Driver()
    requests = [make_request(prompt(4, start), greedy(60)) for start in (10, 50)]
    driver.add(*requests)

    def fail(plan: StepPlan) -> None:
        if len(plan.decodes) == 2:
            raise StepError("two are too many")

    driver.runner.before_step = fail
    driver.run()
    assert "error" in {driver.ends[request.sequences[0]] for request in requests}


def test_a_request_whose_reader_is_away_is_preempted_first() -> None:
    driver = Driver(num_gpu_blocks=12, max_num_seqs=4, prefix_caching=False)
    requests = [make_request(prompt(4, start), greedy(24)) for start in (10, 50, 90)]
    driver.add(*requests)
    driver.step()
    requests[1].detached = True
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
    assert requests[1].num_preemptions == 1
    driver.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_with_a_culprit_is_made_good_for_the_others(depth: int) -> None:
    driver = Driver(depth=depth)
    requests = [make_request(prompt(4, start), greedy(20)) for start in (10, 50, 90)]
    driver.add(*requests)
    driver.step()
    driver.step()
    fail_once(driver, requests[1].sequences[0].slot or 0)
    driver.run()
    assert [driver.ends[request.sequences[0]] for request in requests] == ["length", "error", "length"]


def test_a_failed_step_that_swapped_out_recomputes_the_victim() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, preemption="swap")
    first, second = make_request(prompt(8), greedy(30)), make_request(prompt(8, 50), greedy(30))
    driver.add(first, second)

    def before_step(plan: StepPlan) -> None:
        if plan.swap_out:
            driver.runner.before_step = None
            raise StepError("the copy failed", (99,))

    driver.runner.before_step = before_step
    driver.run()
    assert driver.runner.before_step is None
    assert list(driver.ends.values()) == ["length", "length"]
    assert not any(plan.swap_in for plan in driver.runner.plans)


def test_results_must_come_in_order() -> None:
    driver = Driver(depth=2)
    driver.add(make_request(prompt(4), greedy(9)))
    driver.launch()
    driver.launch()
    _, second = driver.in_flight[1]
    assert isinstance(second, StepResult)
    with pytest.raises(ValueError, match="step 2 came where step 1"):
        driver.scheduler.commit(second, 0.0)


def test_no_more_steps_are_planned_than_may_be_in_flight() -> None:
    driver = Driver()
    driver.add(make_request(prompt(4), greedy(9)))
    driver.launch()
    with pytest.raises(RuntimeError, match="in flight"):
        driver.scheduler.schedule(0.0)


# order and bookkeeping


def test_logprobs_ride_on_their_token() -> None:
    driver = Driver()
    plain, asked = make_request(prompt(4), greedy(3)), make_request(prompt(4, 50), greedy(3, logprobs=2))
    driver.add(plain, asked)
    seen = []
    while driver.scheduler.num_unfinished:
        seen += driver.step()
    for event in seen:
        if event.sequence.request is plain:
            assert event.logprobs is None
        else:
            assert event.logprobs is not None and event.logprobs.token_id == event.token_id
            assert len(event.logprobs.top) == 2


def test_tokens_so_far_are_sent_only_for_penalties() -> None:
    driver = Driver()
    driver.add(make_request(prompt(4), greedy(3)), make_request(prompt(4, 50), greedy(3, presence_penalty=0.5)))
    assert [update.tokens for update in plan_of(driver).slots] == [None, prompt(4, 50)]
    driver.run()


def test_a_high_priority_request_overtakes_those_that_wait() -> None:
    driver = Driver(policy="priority", max_num_seqs=1)
    driver.add(make_request(prompt(4), greedy(3)))
    driver.step()
    slow, urgent = make_request(prompt(4, 50), greedy(3)), make_request(prompt(4, 90), greedy(3), priority=-5)
    driver.add(slow, urgent)
    driver.run()
    assert urgent.first_scheduled is not None and slow.first_scheduled is not None
    assert urgent.first_scheduled < slow.first_scheduled


def test_counts_follow_the_requests() -> None:
    driver = Driver(max_num_seqs=2, num_gpu_blocks=20)
    driver.add(*(make_request(prompt(8, start), greedy(6)) for start in (10, 50, 90)))
    scheduler = driver.scheduler
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_unfinished) == (3, 0, 3)
    driver.step()
    stats = scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_blocks) == (1, 2, 20)
    assert stats.num_blocks_used == 4 and stats.num_prompt_tokens == 16
    driver.run()
    assert scheduler.stats()[:5] == (0, 0, 0, 0, 20)


def test_an_engines_options_make_a_scheduler() -> None:
    from aserve.config import EngineConfig

    info = Driver(depth=2, num_gpu_blocks=9, num_cpu_blocks=3).runner.info
    scheduler = Scheduler.create(EngineConfig(enable_prefix_caching=False, policy="fcfs", preemption="swap"), info)
    assert scheduler.depth == 2 and scheduler.blocks.num_device_blocks == 9 and scheduler.blocks.num_host_blocks == 3
    assert not scheduler.blocks.prefix_caching and scheduler.costs.mode == "swap"
    scheduler.add(make_request(prompt(4), greedy(2)))
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.chunks == (Chunk(0, 0, prompt(4), (0,)),)
