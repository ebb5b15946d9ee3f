"""K09: requests that share a cached prefix do not overtake a cold, long prompt without end."""

from __future__ import annotations

import pytest

from aserve.request import SamplingParams
from tests.driver import Driver
from tests.fakes import make_request

HOT = list(range(12))


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_a_cold_prompt_gets_its_turn(policy: str) -> None:
    driver = Driver(num_gpu_blocks=32, max_num_seqs=2, max_num_batched_tokens=16, policy=policy)

    def hot() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        driver.add(make_request([*HOT, 500 + len(driver.requests)], params, arrival=driver.now, tenant="hot"))

    for _ in range(4):
        hot()
    cold = make_request(
        range(700, 764), SamplingParams(temperature=0.0, max_tokens=4), arrival=driver.now, tenant="cold"
    )
    driver.add(cold)
    for step in range(200):
        hot()
        driver.step()
        if cold.sequences[0] in driver.ends:
            assert step <= 60
            break
    assert driver.ends[cold.sequences[0]] == "length"
    driver.run()
