"""Requests whose readers are behind: they keep their blocks until memory is short."""

from __future__ import annotations

import pytest

from aserve.executors import StepError
from aserve.plan import StepPlan
from aserve.request import Phase, SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompt(length: int, start: int = 10) -> list[int]:
    return list(range(start, start + length))


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a_paused_request_gives_its_slot_up_and_goes_on_where_it_was(depth: int, caching: bool) -> None:
    driver = Driver(depth=depth, prefix_caching=caching, max_num_seqs=1)
    paused, other = (make_request(prompt(4, start), greedy(30)) for start in (10, 50))
    driver.add(paused, other)
    steps(driver, 8)
    driver.scheduler.pause(paused, paused=True)
    driver.check()
    assert driver.scheduler.stats().num_paused == 1
    while other.sequences[0] not in driver.ends:
        driver.step()
    length = len(driver.outputs[paused.sequences[0]])
    assert 0 < length < 15
    assert driver.blocks.num_used == driver.blocks.blocks_for(paused.sequences[0].num_computed)
    driver.scheduler.pause(paused, paused=False)
    driver.scheduler.pause(paused, paused=False)
    driver.run()
    assert len(driver.outputs[paused.sequences[0]]) == 30
    computed = [chunk for plan in driver.runner.plans for chunk in plan.chunks if chunk.tokens[0] not in (10, 50)]
    assert [len(chunk.tokens) for chunk in computed] == [1]  # its last draw; nothing twice


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_cpu_blocks", [0, 2, 20])
@pytest.mark.parametrize("n", [1, 2])
def test_a_paused_request_leaves_before_anyone_is_preempted(depth: int, num_cpu_blocks: int, n: int) -> None:
    driver = Driver(num_gpu_blocks=14, num_cpu_blocks=num_cpu_blocks, depth=depth, preemption="swap")
    params = SamplingParams(temperature=1.0, n=n, max_tokens=20, ignore_eos=True)
    paused, other = make_request(prompt(8), params), make_request(prompt(8, 50), greedy(40))
    driver.add(paused, other)
    steps(driver, 8)
    driver.scheduler.pause(paused, paused=True)
    while other.sequences[0] not in driver.ends:
        driver.step()
    assert driver.scheduler.preemptions.total() == 1 and other.num_preemptions == 0
    kind = "swap" if num_cpu_blocks == 20 else "recompute"
    assert driver.scheduler.preemptions[kind, "away"] == 1
    assert driver.blocks.num_used == 0 and paused.sequences[0].phase is Phase.PAUSED
    assert driver.scheduler.num_waiting == driver.scheduler.num_swapped == 0
    driver.scheduler.pause(paused, paused=False)
    driver.check()
    driver.run()
    assert all(len(driver.outputs[sequence]) == 20 for sequence in paused.sequences)
    assert not driver.scheduler.stats().num_paused


def test_a_paused_request_makes_room_for_a_new_one() -> None:
    driver = Driver(num_gpu_blocks=12, num_cpu_blocks=20, preemption="swap")
    paused, late = make_request(prompt(16), greedy(20)), make_request(prompt(32, 50), greedy(4))
    driver.add(paused)
    steps(driver, 6)
    driver.scheduler.pause(paused, paused=True)
    driver.add(late)
    steps(driver, 2)
    assert late.first_scheduled is not None and driver.scheduler.preemptions["swap", "away"] == 1
    driver.scheduler.pause(paused, paused=False)
    driver.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_gpu_blocks", [10, 64])
def test_a_paused_request_can_be_cancelled_or_pass_its_deadline(depth: int, num_gpu_blocks: int) -> None:
    driver = Driver(depth=depth, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=10, preemption="swap", max_model_len=36)
    requests = [make_request(prompt(4, 10), greedy(30)), make_request(prompt(4, 50), greedy(30), deadline=32.0)]
    driver.add(*requests)
    steps(driver, 6)
    for request in requests:
        driver.scheduler.pause(request, paused=True)
    driver.add(make_request(prompt(4, 90), greedy(24)))
    steps(driver, 20)
    driver.scheduler.cancel(requests[0], "cancelled")
    while requests[0].sequences[0] not in driver.ends:
        driver.step()
    driver.now = 33.0
    driver.run()
    assert [driver.ends[request.sequences[0]] for request in requests] == ["cancelled", "deadline"]


@pytest.mark.parametrize("slots", [(), (0,)])
def test_a_step_that_fails_takes_the_memory_of_what_was_paused_in_it(slots: tuple[int, ...]) -> None:
    driver = Driver(depth=2)
    paused, other = (make_request(prompt(4, start), greedy(20)) for start in (10, 50))
    driver.add(paused, other)
    steps(driver, 4)

    def fail(plan: StepPlan) -> None:
        driver.runner.before_step = None
        raise StepError("the step failed", tuple(other.sequences[0].slot or 0 for _ in slots))

    driver.runner.before_step = fail
    driver.launch()
    driver.scheduler.pause(paused, paused=True)
    steps(driver, 4)
    driver.scheduler.pause(paused, paused=False)
    driver.run()
    assert driver.ends[paused.sequences[0]] == "length"
