"""What the engine counts: requests by outcome, tokens, and times.

Pure: pipeline.py calls it with times it has read, a route exports it. Every admitted request is counted under exactly
one outcome when it ends. Counters only grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from aserve.request import FinishReason, Request

LAG_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
MAX_TENANTS = 100
OTHER_TENANTS = "(others)"
# the worst of a request's finish reasons, the last here, names its outcome
_SEVERITY: tuple[FinishReason, ...] = ("stop", "length", "cancelled", "deadline", "error")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine now, and its totals since the start."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_paused: int  # their readers are behind
    num_blocks_used: int
    num_blocks: int
    num_in_flight: int
    num_steps: int
    num_output_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    swap_out_bytes: int
    swap_in_bytes: int
    last_step_seconds: float
    last_step_age: float | None  # seconds since the last step was done
    oldest_wait: float  # seconds that the oldest request which has not run yet waits
    preemptions: Mapping[tuple[str, str], int]  # by kind (swap, recompute) and cause (memory, fairness, away)


@dataclass(slots=True)
class Histogram:
    """How many values were at most each bound; `counts` has one more entry, for those above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value; a bound belongs to its own bucket, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)


def _per_token() -> Histogram:
    return Histogram(TOKEN_SECONDS)


def _per_lag() -> Histogram:
    return Histogram(LAG_SECONDS)


def _per_request() -> Histogram:
    return Histogram(REQUEST_SECONDS)


@dataclass(slots=True)
class Metrics:
    """Everything counted since the engine started. Times in seconds."""

    outcomes: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    num_refused: int = 0  # refused before admission; not among the outcomes
    num_steps: int = 0
    num_failed_steps: int = 0
    num_prompt_tokens: int = 0  # of requests that ended
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_token: Histogram = field(default_factory=_per_request)  # arrival to first token
    inter_token: Histogram = field(default_factory=_per_token)  # between two tokens of a choice
    queue: Histogram = field(default_factory=_per_request)  # arrival to first step
    request: Histogram = field(default_factory=_per_request)  # arrival to end
    waits: dict[str, tuple[int, float]] = field(default_factory=dict)  # by tenant: number and sum of queue's values
    loop_lag: Histogram = field(default_factory=_per_lag)  # a step's end on the model thread to the loop's turn
    step: Histogram = field(default_factory=_per_token)  # submitted to result

    def _count_wait(self, tenant: str, seconds: float) -> None:
        """The first MAX_TENANTS tenants are told apart: a label a client chooses must not grow without bound."""
        name = tenant if tenant in self.waits or len(self.waits) < MAX_TENANTS else OTHER_TENANTS
        count, total = self.waits.get(name, (0, 0.0))
        self.waits[name] = (count + 1, total + seconds)

    def count_end(self, request: Request, reasons: list[FinishReason], now: float) -> FinishReason:
        """Counts a request once, under the worst of its choices' reasons."""
        outcome = max(reasons, key=_SEVERITY.index)
        self.outcomes[outcome] += 1
        self.num_prompt_tokens += len(request.prompt)
        self.num_cached_tokens += request.num_cached
        self.num_preemptions += request.num_preemptions
        self.request.observe(now - request.arrival)
        if request.first_scheduled is not None:
            self.queue.observe(request.first_scheduled - request.arrival)
            self._count_wait(request.tenant, request.first_scheduled - request.arrival)
        return outcome
