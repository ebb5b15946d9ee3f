"""K07: n > 1 under recomputation: every choice finishes, as if it had run alone."""

from __future__ import annotations

import pytest

from aserve.request import SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_four_choices_survive_being_recomputed(depth: int, prefix_caching: bool) -> None:
    driver = Driver(num_gpu_blocks=24, preemption="recompute", depth=depth, prefix_caching=prefix_caching)
    requests = [
        make_request(
            range(50 * i, 50 * i + 10), SamplingParams(n=4, temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
        )
        for i in range(3)
    ]
    driver.add(*requests)
    driver.run()
    assert any(request.num_preemptions for request in requests)
    assert all(driver.ends[sequence] == "length" for request in requests for sequence in request.sequences)
