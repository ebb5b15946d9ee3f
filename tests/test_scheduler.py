"""The scheduler over a fake runner: what a step holds, how sequences end, and in which order requests come."""

from __future__ import annotations

import pytest

from aserve.errors import DeadlineError
from aserve.plan import Chunk
from aserve.request import Phase
from aserve.scheduler import Scheduler
from tests.driver import Driver, greedy, plan_of, prompt
from tests.fakes import make_request

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
