"""K10: a cached block that was evicted and filled anew is never found by its old name."""

from __future__ import annotations

import pytest

from aserve.request import SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_prompt_is_exact_after_its_blocks_were_reused(depth: int) -> None:
    driver = Driver(num_gpu_blocks=12, depth=depth)
    first = range(30)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for start in (0, 100, 200, 0, 300, 0):  # each fills most of the pool, so that it evicts the one before it
        driver.add(make_request(range(start, start + len(first)), params))
        driver.run()  # checks every output against its solo run, and reads the KV back through the block tables
    assert [driver.outputs[request.sequences[0]] for request in driver.requests][3] == driver.outputs[
        driver.requests[0].sequences[0]
    ]
