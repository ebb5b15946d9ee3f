from __future__ import annotations

import random

import pytest

from aserve.policy import FairPolicy
from aserve.request import Phase, Request, SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


def flood(driver: Driver, count: int, *, max_tokens: int = 40, priority: int = 0, n: int = 1) -> list[Request]:
    params = SamplingParams(temperature=1.0, n=n, seed=1)
    requests = [
        make_request(range(10 * k + 10, 10 * k + 16), params, max_tokens=max_tokens, tenant="flood", priority=priority)
        for k in range(count)
    ]
    driver.add(*requests)
    return requests


def guest(driver: Driver, *, priority: int = 0, prompt: int = 6, n: int = 1, tenant: str = "guest") -> Request:
    params = SamplingParams(temperature=1.0, n=n, seed=2)
    request = make_request(
        range(500, 500 + prompt), params, max_tokens=8, tenant=tenant, arrival=driver.now, priority=priority
    )
    driver.add(request)
    return request


def runs(request: Request) -> bool:
    return any(sequence.phase is Phase.RUNNING for sequence in request.sequences)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_guest_takes_the_newest_place_of_a_flood_at_once(depth: int, preemption: str) -> None:
    driver = Driver(
        max_num_seqs=4,
        num_gpu_blocks=100,
        num_cpu_blocks=50,
        depth=depth,
        policy="fair",
        preemption=preemption,  # type: ignore[arg-type]
    )
    requests = flood(driver, 6)
    for _ in range(5):
        driver.step()
    assert [runs(request) for request in requests] == [True] * 4 + [False] * 2
    late = guest(driver)
    driver.launch()
    assert runs(late) and not runs(requests[3])
    driver.run()  # every output equals its solo run
    stats = driver.scheduler.stats()
    assert stats.num_yields >= 1 and stats.num_yields == stats.num_preemptions
    assert (stats.num_swaps > 0) == (preemption == "swap")


def test_memory_is_made_too() -> None:
    driver = Driver(max_num_seqs=8, num_gpu_blocks=16, policy="fair", preemption="recompute")
    requests = flood(driver, 6, max_tokens=12)
    while driver.blocks.num_free > 2:
        driver.step()
    late = guest(driver, prompt=14)
    driver.launch()
    assert runs(late) and driver.scheduler.stats().num_yields >= 1
    assert runs(requests[0])
    driver.run()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tenant": "flood"}, "it is the same tenant"),
        ({"priority": 1}, "its priority is lower"),
        ({"n": 3}, "it would run nearly as much"),
    ],
)
def test_a_claim_needs_its_reason(options: dict[str, object], why: str) -> None:
    driver = Driver(max_num_seqs=4, num_gpu_blocks=100, policy="fair")
    flood(driver, 4)
    for _ in range(3):
        driver.step()
    late = guest(driver, **options)  # type: ignore[arg-type]
    driver.launch()
    assert not runs(late), why
    assert driver.scheduler.stats().num_preemptions == 0
    driver.run()


def test_a_claim_that_cannot_be_met_preempts_nobody() -> None:
    driver = Driver(max_num_seqs=8, num_gpu_blocks=36, policy="fair")
    flood(driver, 3, max_tokens=40)
    while driver.blocks.num_free > 4:
        driver.step()
    late = guest(driver, prompt=120)
    driver.launch()
    assert not runs(late) and driver.scheduler.stats().num_preemptions == 0
    driver.run()


def test_the_oldest_keeps_its_place_and_a_request_gives_way_twice_at_most() -> None:
    driver = Driver(max_num_seqs=2, num_gpu_blocks=100, num_cpu_blocks=50, policy="fair")
    oldest, newest = flood(driver, 2, max_tokens=100)
    for number in range(8):
        for _ in range(4):
            driver.step()
        guest(driver, tenant=f"guest {number}")
    driver.run()
    assert oldest.num_preemptions == 0 and newest.num_preemptions <= 2
    assert driver.scheduler.stats().num_yields >= 1


def test_the_order_alone_preempts_nobody() -> None:
    driver = Driver(max_num_seqs=4, num_gpu_blocks=100, policy=FairPolicy(preempt=False))
    flood(driver, 6)
    for _ in range(3):
        driver.step()
    late = guest(driver)
    driver.launch()
    assert not runs(late)
    driver.run()
    assert driver.scheduler.stats().num_yields == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_claims_beside_every_other_event_change_no_output(depth: int) -> None:
    yields = 0
    for seed in range(30):
        rng = random.Random(seed)
        driver = Driver(
            depth=depth,
            num_gpu_blocks=rng.randint(24, 60),
            num_cpu_blocks=rng.choice([0, 6, 60]),
            max_num_seqs=rng.randint(3, 8),
            max_num_batched_tokens=rng.choice([8, 16, 64]),
            policy="fair",
            eos_chance=0.02,
        )
        for _ in range(14):
            if rng.random() < 0.4:
                flood(driver, rng.randint(1, 4), max_tokens=30, n=rng.choice([1, 1, 2]))
            else:
                guest(driver, priority=rng.choice([0, 0, -1, 1]), n=rng.choice([1, 1, 2]), tenant=rng.choice("xyz"))
            for _ in range(rng.randint(0, 4)):
                driver.step()
            if rng.random() < 0.3:
                driver.scheduler.cancel(rng.choice(driver.requests), "cancelled")
        driver.run()
        yields += driver.scheduler.stats().num_yields
    assert yields > 20


@pytest.mark.parametrize("depth", [2, 3])
def test_a_limit_holds_whichever_draws_are_in_flight_when_a_place_is_taken(depth: int) -> None:
    yields = 0
    for max_tokens in range(5, 13):
        for delay in range(12):
            driver = Driver(max_num_seqs=2, num_gpu_blocks=100, depth=depth, policy="fair", preemption="recompute")
            flood(driver, 2, max_tokens=max_tokens)
            for _ in range(delay):
                driver.step()
            guest(driver)
            driver.run()
            yields += driver.scheduler.stats().num_yields
    assert yields > 20
