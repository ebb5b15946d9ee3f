"""K08: a victim whose prefill is larger than a step's budget comes back once, not for one chunk at a time."""

from __future__ import annotations

from aserve.request import SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


def test_a_long_victim_is_not_resumed_and_evicted_over_and_over() -> None:
    driver = Driver(num_gpu_blocks=26, max_num_batched_tokens=8, preemption="recompute", prefix_caching=False)
    long = make_request(range(48), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), arrival=1.0)
    rivals = [
        make_request(
            range(100 * i, 100 * i + 20), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), arrival=0.0
        )
        for i in range(1, 3)
    ]
    driver.add(*rivals, long)
    driver.run(max_steps=400)
    assert all(driver.ends[request.sequences[0]] == "length" for request in (*rivals, long))
    assert long.num_preemptions <= 3
    assert sum(plan.num_tokens for plan in driver.runner.plans) <= 4 * (48 + 16 + 2 * 44)  # little was computed in vain
