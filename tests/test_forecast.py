"""Requests that surely come too late: the estimate, and what the scheduler does with it."""

from __future__ import annotations

from aserve.errors import DeadlineError
from aserve.forecast import Ahead, Forecast
from aserve.plan import StepResult, StepTimings
from aserve.request import Request, SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


def seen(rate: int = 100, draws: int = 10, output: int = 20) -> Forecast:
    forecast = Forecast()
    forecast.observe_step(rate, draws, 1.0)
    forecast.observe_end(output)
    return forecast


def test_nothing_is_known_before_a_step() -> None:
    assert Forecast().least_wait(Ahead(9, 9000, 9), 1) == 0.0
    assert Forecast().can_compute(10**9, 0.001)


def test_the_prompts_ahead_take_their_time_at_the_best_rate() -> None:
    forecast = seen()
    assert forecast.least_wait(Ahead(3, 600, 3), num_slots=8) == 6.0
    assert forecast.least_wait(Ahead(3, 600, 3), num_slots=8, share_computed=0.5) == 3.0
    forecast.observe_step(50, 1, 1.0)  # a slow step says nothing about the best one
    assert 6.0 <= forecast.least_wait(Ahead(3, 600, 3), num_slots=8) < 6.1


def test_outputs_count_beyond_what_slots_may_end_at_once() -> None:
    forecast = seen()
    assert forecast.least_wait(Ahead(8, 0, 8), num_slots=8) == 0.0
    assert forecast.least_wait(Ahead(13, 0, 13), num_slots=8) == 5 * 20 / 10


def test_a_prompt_is_computed_no_faster_than_the_best_step() -> None:
    assert seen().can_compute(200, 2.0)
    assert not seen().can_compute(201, 2.0)


def timed(driver: Driver, seconds: float) -> None:
    """Every step takes that long, on the model's side and on the clock."""
    launch = driver.runner.launch

    def slow(plan: object) -> StepResult:
        result = launch(plan)  # type: ignore[arg-type]
        result.timings = StepTimings(compute=seconds)
        return result

    driver.runner.launch = slow  # type: ignore[method-assign]


def request(length: int, start: int = 10, **options: float) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return make_request(range(start, start + length), params, **options)  # type: ignore[arg-type]


def test_a_prompt_that_cannot_be_computed_in_time_gives_its_blocks_to_others() -> None:
    driver = Driver(max_num_batched_tokens=8, num_gpu_blocks=64)
    timed(driver, 1.0)
    driver.add(request(8))
    driver.run()
    assert driver.scheduler._roster.forecast.rate > 7.9
    hopeless = request(80, 100, arrival=driver.now, first_token_deadline=driver.now + 6.0)
    hopeful = request(16, 300, arrival=driver.now, first_token_deadline=driver.now + 30.0)
    driver.add(hopeless, hopeful)
    began = driver.now
    while hopeless.sequences[0] not in driver.ends:
        driver.step()
    assert driver.now - began <= 2.0  # not after six
    assert isinstance(hopeless.error, DeadlineError) and "cannot be met" in hopeless.error.message
    driver.run()
    assert driver.ends[hopeful.sequences[0]] == "length"


def test_the_load_counts_what_a_tenant_cannot_overtake() -> None:
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8)
    timed(driver, 1.0)
    driver.add(request(8))
    driver.run()
    for index, (tenant, priority) in enumerate([("a", 0), ("a", 0), ("a", 1), ("b", 0)]):
        each = request(16, 100 + 20 * index)
        each.tenant, each.priority = tenant, priority
        driver.add(each)
    load = driver.scheduler.load
    assert load("a", 0)[:2] == (4, 3) and load("b", 0)[:2] == (4, 1) and load("c", 0) == (4, 0, 0.0)
    assert load("a", 1).least_wait > load("a", 0).least_wait > load("b", 0).least_wait > 0
    driver.run()
    assert load("a", 0) == (0, 0, 0.0)
