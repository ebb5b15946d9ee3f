"""GET /metrics: the engine's counters, gauges and histograms in Prometheus text. admin.py calls it.

Everything is read from the engine when asked for; nothing is counted here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from aserve import Engine

_COUNTERS = {
    "num_refused": ("requests_refused", "Requests refused before admission"),
    "num_steps": ("steps", "Model steps"),
    "num_failed_steps": ("failed_steps", "Model steps that failed"),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of ended requests"),
    "num_cached_tokens": ("cached_prompt_tokens", "Prompt tokens of ended requests found in the prefix cache"),
    "num_output_tokens": ("output_tokens", "Output tokens"),
}
_GAUGES = {
    "num_running": ("requests_running", "Sequences that hold a slot"),
    "num_waiting": ("requests_waiting", "Requests in the queue"),
    "num_swapped": ("requests_swapped", "Sequences whose KV is in host memory"),
    "num_blocks_used": ("kv_blocks_used", "KV blocks in use"),
    "num_blocks": ("kv_blocks", "KV blocks of the device pool"),
    "num_in_flight": ("steps_in_flight", "Steps submitted and not committed"),
    "num_paused": ("requests_paused", "Requests whose readers are behind"),
    "oldest_wait": ("oldest_wait_seconds", "Age of the oldest request that has not run yet"),
    "last_step_seconds": ("last_step_seconds", "Duration of the last step"),
}
_HISTOGRAMS = {
    "first_token": ("time_to_first_token_seconds", "Arrival to first token"),
    "inter_token": ("inter_token_seconds", "Between two tokens of a choice"),
    "queue": ("queue_seconds", "Arrival to first step"),
    "request": ("request_seconds", "Arrival to end"),
    "step": ("step_seconds", "Step submitted to result"),
    "loop_lag": ("event_loop_lag_seconds", "A step's end on the model thread to the event loop's turn"),
}


class EngineCollector(Collector):
    """One engine's numbers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        metrics, stats = self._engine.metrics, self._engine.stats()
        outcomes = CounterMetricFamily("aserve_requests", "Requests that ended, by outcome", labels=["outcome"])
        for outcome, count in metrics.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        preemptions = CounterMetricFamily(
            "aserve_preemptions", "Preemptions by kind and cause", labels=["kind", "cause"]
        )
        for labels, count in stats.preemptions.items():
            preemptions.add_metric(labels, count)
        yield preemptions
        swapped = CounterMetricFamily("aserve_swap_bytes", "KV copied between the pools", labels=["direction"])
        swapped.add_metric(["out"], stats.swap_out_bytes)
        swapped.add_metric(["in"], stats.swap_in_bytes)
        yield swapped
        waits = SummaryMetricFamily("aserve_tenant_queue_seconds", "Arrival to first step", labels=["tenant"])
        for tenant, (count, total) in metrics.waits.items():
            waits.add_metric([tenant], count, total)
        yield waits
        if stats.last_step_age is not None:
            when = time.time() - stats.last_step_age
            yield GaugeMetricFamily("aserve_last_step_timestamp_seconds", "When the last step was done", value=when)
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"aserve_{name}", text, value=getattr(metrics, field))
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"aserve_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _HISTOGRAMS.items():
            histogram = getattr(metrics, field)
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            yield HistogramMetricFamily(f"aserve_{name}", text, buckets=buckets, sum_value=histogram.sum)


def exposition(engine: Engine) -> tuple[bytes, str]:
    """The text and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(engine))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
