"""K06: a host pool of a few blocks falls back to recomputing, and nothing is lost."""

from __future__ import annotations

import pytest

from aserve.request import SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


@pytest.mark.parametrize("num_cpu_blocks", [0, 1, 3])
def test_eight_choices_with_hardly_any_swap_space_all_finish(num_cpu_blocks: int) -> None:
    driver = Driver(num_gpu_blocks=40, num_cpu_blocks=num_cpu_blocks, max_num_seqs=16, preemption="swap")
    requests = [
        make_request(
            range(50 * i, 50 * i + 9), SamplingParams(n=8, temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
        )
        for i in range(2)
    ]
    driver.add(*requests)
    driver.run()
    assert any(request.num_preemptions for request in requests)
    assert all(driver.ends[sequence] == "length" for request in requests for sequence in request.sequences)
