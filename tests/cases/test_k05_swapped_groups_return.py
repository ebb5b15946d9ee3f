"""K05: swapped requests go before new ones, and all finish, while arrivals never stop."""

from __future__ import annotations

import pytest

from aserve.request import Phase, SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


@pytest.mark.parametrize("depth", [1, 2])
def test_arrivals_do_not_overtake_what_is_swapped(depth: int) -> None:
    driver = Driver(
        num_gpu_blocks=24, num_cpu_blocks=64, max_num_seqs=8, max_num_batched_tokens=8, preemption="swap", depth=depth
    )
    pairs = [
        make_request(
            range(100 * i, 100 * i + 14),
            SamplingParams(n=2, temperature=1.0, seed=i, max_tokens=20, ignore_eos=True),
            arrival=float(i),
        )
        for i in range(6)
    ]
    driver.add(*pairs)
    swapped = 0
    for step in range(120):
        new = make_request([900 + step, 1], SamplingParams(temperature=0.0, max_tokens=2), arrival=driver.now)
        driver.add(new)
        before = [request for request in driver.requests if _phase(request, Phase.SWAPPED)]
        swapped += bool(before)
        waiting = {
            request for request in driver.requests if _phase(request, Phase.WAITING) and not request.num_preemptions
        }
        driver.step()
        if before and all(_phase(request, Phase.SWAPPED) for request in before):
            started = [request for request in waiting if _phase(request, Phase.RUNNING)]
            assert not started, "a new prefill overtook a swapped request"
    assert swapped, "nothing was swapped: the pool is too large for this test"
    driver.run()
    assert all(driver.ends[sequence] == "length" for request in pairs for sequence in request.sequences)


def _phase(request: object, phase: Phase) -> bool:
    return any(sequence.phase is phase for sequence in request.sequences)  # type: ignore[attr-defined]
