"""K11: equal values of different kinds of extra keys never name the same block."""

from __future__ import annotations

from aserve.prefix_cache import HashChain, root_hash
from aserve.request import SamplingParams
from tests.driver import Driver
from tests.fakes import make_request


def test_a_salt_shares_with_nothing_but_itself() -> None:
    driver = Driver()
    params = SamplingParams(temperature=0.0, max_tokens=2)
    requests = []
    for salt in (None, "x", "y", "x", ""):
        requests.append(make_request(range(16), params, cache_salt=salt))
        driver.add(requests[-1])
        driver.run()
    assert [request.num_cached > 0 for request in requests] == [False, False, False, True, False]


def test_an_adapter_never_meets_a_salt_of_its_name() -> None:
    roots = [root_hash(), root_hash(salt="x"), root_hash(adapter="x"), root_hash(salt="", adapter="x")]
    names = {HashChain(root, 4).extend(range(4), (), 1)[0] for root in roots}
    assert len(names) == 4
