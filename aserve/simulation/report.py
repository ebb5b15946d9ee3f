"""What a simulation measured: latency, throughput, preemptions, and how tenants fared beside each other.

simulator.py fills one Report per run; command.py prints several side by side. Times in seconds of the virtual clock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from aserve.errors import AserveError
from aserve.request import Request
from aserve.scheduler import Scheduler
from aserve.simulation.bound import Served

QUANTILES = (0.5, 0.9, 0.99)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ordered values that at least that share does not exceed; NaN where there is none."""
    if not ordered:
        return float("nan")
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index: 1 where all values are equal, 1/n where one of n has everything."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


class Tenant:
    """One tenant's requests: tokens, and times of those that ended by themselves."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_prompt_tokens = 0  # of requests that had a first token
        self.num_output_tokens = 0
        self.first_token = array("d")  # arrival to first token, of all that had one
        self.per_token = array("d")  # from the first token on, per later token of a choice
        self.total = array("d")  # arrival to end

    def take(self, request: Request) -> None:
        """Counts what the request was served."""
        if request.first_token is not None:
            self.num_prompt_tokens += len(request.prompt)
            self.num_output_tokens += sum(len(sequence.output) for sequence in request.sequences)
            self.first_token.append(request.first_token - request.arrival)

    @property
    def service(self) -> int:
        """Tokens as the fair policy weighs them."""
        return self.num_prompt_tokens + 2 * self.num_output_tokens

    def summary(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {
            "requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "ttft": _quantiles(self.first_token),
            "tpot": _quantiles(self.per_token),
            "total": _quantiles(self.total),
        }


def _quantiles(values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {f"p{round(share * 100)}": quantile(ordered, share) if ordered else None for share in QUANTILES}


class Report:
    """One run of one policy."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.tenants: dict[str, Tenant] = {}
        self.outcomes: Counter[str] = Counter()  # by the worst finish reason of a request
        self.refused: Counter[str] = Counter()  # by error
        self.num_steps = 0
        self.num_output_tokens = 0
        self.seconds = 0.0  # from 0 to the end of the run
        self.num_preemptions: Counter[str] = Counter()  # by kind: swap, recompute; and by cause: memory, fairness
        self.num_preempted_sequences = 0
        self.most_preemptions = 0  # of one request
        self.num_unfinished = 0
        self.most_blocks = 0  # of the device pool in use at once
        self.served: list[Served] = []  # requests of one choice, so far as they came
        self.prefix_hits = 0.0  # share of prompt tokens
        self._live: dict[Request, None] = {}

    def refuse(self, tenant: str, error: AserveError) -> None:
        """Admission let it not in."""
        self.refused[type(error).__name__] += 1
        self.tenants.setdefault(tenant, Tenant()).num_requests += 1

    def arrive(self, request: Request) -> None:
        """It was admitted."""
        self._live[request] = None
        self.tenants.setdefault(request.tenant, Tenant()).num_requests += 1

    def end(self, request: Request, now: float) -> None:
        """Its last choice has ended."""
        del self._live[request]
        reasons = {sequence.finish_reason for sequence in request.sequences}
        served = reasons <= {"stop", "length"}
        self.outcomes["finished" if served else str(request.cancel_reason)] += 1
        tenant = self.tenants[request.tenant]
        self._count(request, tenant)
        if served:
            tenant.total.append(now - request.arrival)
            later = max(len(sequence.output) for sequence in request.sequences) - 1
            if later > 0 and request.first_token is not None:
                tenant.per_token.append((now - request.first_token) / later)

    def _count(self, request: Request, tenant: Tenant) -> None:
        tenant.take(request)
        if request.first_token is not None and len(request.sequences) == 1:
            self.served.append(Served(len(request.prompt), len(request.sequences[0].output)))
        if request.num_preemptions:
            self.num_preempted_sequences += len(request.sequences)
            self.most_preemptions = max(self.most_preemptions, request.num_preemptions)

    def close(self, now: float, scheduler: Scheduler) -> None:
        """The run is over; what is live was served so far."""
        for request in self._live:
            self._count(request, self.tenants[request.tenant])
        self.num_unfinished = len(self._live)
        self.seconds = now
        stats = scheduler.stats()
        self.num_preemptions["swap"] = stats.num_swaps
        self.num_preemptions["recompute"] = stats.num_preemptions - stats.num_swaps
        self.num_preemptions["fairness"] = stats.num_yields
        self.num_preemptions["memory"] = stats.num_preemptions - stats.num_yields
        self.prefix_hits = stats.num_prefix_hit_tokens / max(1, stats.num_prompt_tokens)

    def values(self, name: str) -> list[float]:
        """All tenants' first_token, per_token or total times, in order of size."""
        return sorted(value for tenant in self.tenants.values() for value in getattr(tenant, name))

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def preemptions_per_request(self) -> float:
        """On average over all requests that were admitted."""
        num_admitted = sum(self.outcomes.values()) + self.num_unfinished
        return (self.num_preemptions["swap"] + self.num_preemptions["recompute"]) / max(1, num_admitted)

    @property
    def jain_tokens(self) -> float:
        """Jain's index over tenants of the tokens they were served."""
        return jain(tenant.service for tenant in self.tenants.values())

    @property
    def jain_latency(self) -> float:
        """Jain's index over tenants of the mean time from arrival to first token."""
        means = [sum(each.first_token) / len(each.first_token) for each in self.tenants.values() if each.first_token]
        return jain(means)

    def summary(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "policy": self.policy,
            "seconds": self.seconds,
            "steps": self.num_steps,
            "most_blocks": self.most_blocks,
            "outcomes": dict(self.outcomes),
            "refused": dict(self.refused),
            "unfinished": self.num_unfinished,
            "output_tokens": self.num_output_tokens,
            "output_tokens_per_second": self.throughput,
            "ttft": _quantiles(self.values("first_token")),
            "tpot": _quantiles(self.values("per_token")),
            "total": _quantiles(self.values("total")),
            "preemptions": dict(self.num_preemptions),
            "preemptions_per_request": self.preemptions_per_request,
            "most_preemptions": self.most_preemptions,
            "prefix_hits": self.prefix_hits,
            "jain_tokens": self.jain_tokens,
            "jain_ttft": self.jain_latency,
            "tenants": {name: tenant.summary() for name, tenant in self.tenants.items()},
        }
