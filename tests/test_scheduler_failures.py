"""Steps that fail: who ends, and that everybody else gets what they would have had."""

from __future__ import annotations

import pytest

from aserve.errors import RequestFailedError
from aserve.executors import StepError
from aserve.plan import StepPlan, StepResult
from tests.driver import Driver, fail_once, greedy, prompt, sampled
from tests.fakes import make_request


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
