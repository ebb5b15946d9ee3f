"""Counters: every request under one outcome, every value in one bucket."""

from __future__ import annotations

import pytest

from aserve.metrics import Histogram, Metrics
from aserve.request import FinishReason
from tests.fakes import make_request


def test_a_value_on_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.count, histogram.sum) == (5, 13.5)


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        (["stop"], "stop"),
        (["stop", "length"], "length"),
        (["length", "cancelled", "stop"], "cancelled"),
        (["deadline", "stop"], "deadline"),
        (["cancelled", "error"], "error"),
    ],
)
def test_a_request_counts_once_under_the_worst_of_its_choices(
    reasons: list[FinishReason], outcome: FinishReason
) -> None:
    metrics = Metrics()
    request = make_request([1, 2, 3], arrival=10.0)
    request.num_cached, request.first_scheduled, request.num_preemptions = 2, 10.5, 1
    assert metrics.count_end(request, reasons, 12.0) == outcome
    assert metrics.outcomes[outcome] == 1 == sum(metrics.outcomes.values())
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_preemptions) == (3, 2, 1)
    assert (metrics.queue.sum, metrics.request.sum) == (0.5, 2.0)
