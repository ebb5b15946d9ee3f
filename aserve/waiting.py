"""Requests that are not in device memory: preempted ones and those set aside, by rank, then new ones, by policy.

scheduler.py takes from the front when there is room. Nothing here knows blocks or slots.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from aserve.forecast import Ahead
from aserve.policy import Policy
from aserve.request import Request

Rank = tuple[int, float, int]


def rank_of(request: Request) -> Rank:
    """Order of requests that have run: lowest priority value, then oldest. Victims come from its end."""
    return (request.priority, request.arrival, request.id)


class WaitingLine:
    """Who is next. Those that were in already, or had their turn, come before every new request."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._returning: list[tuple[Rank, Request]] = []
        self._new: dict[Request, None] = {}  # those that wait with the policy
        self._by_tenant: dict[str, dict[int, Ahead]] = {}  # of these, by priority

    def __len__(self) -> int:
        return len(self._policy) + len(self._returning)

    @property
    def returning(self) -> list[Request]:
        """Requests that go before new ones, in order. A copy."""
        return [request for _, request in self._returning]

    def add(self, request: Request) -> None:
        """A new request."""
        self._policy.add(request)
        self._new[request] = None
        self._count(request, 1)

    def _count(self, request: Request, sign: int) -> None:
        levels = self._by_tenant.setdefault(request.tenant, {})
        requests, tokens, sequences = levels.get(request.priority, Ahead())
        left = Ahead(requests + sign, tokens + sign * len(request.prompt), sequences + sign * len(request.sequences))
        levels[request.priority] = left
        if not left.num_requests:
            del levels[request.priority]
            if not levels:
                del self._by_tenant[request.tenant]

    def num_new(self, tenant: str) -> int:
        """The tenant's requests that have not run yet."""
        return sum(level.num_requests for level in self._by_tenant.get(tenant, {}).values())

    def ahead(self, tenant: str, priority: int) -> Ahead:
        """What a request that comes now can surely not overtake."""
        if not self._policy.in_order:
            return Ahead()
        levels = [level for each, level in self._by_tenant.get(tenant, {}).items() if each <= priority]
        return Ahead(*map(sum, zip(*levels, strict=True))) if levels else Ahead()

    def peek(self, now: float) -> Request | None:
        """The new request that is next."""
        return self._policy.peek(now)

    def put_back(self, request: Request) -> None:
        """A request that was running, or whose turn came too early."""
        insort(self._returning, (rank_of(request), request))

    def remove(self, request: Request) -> None:
        """The request runs, or has ended. No matter where it waits, or whether."""
        entry = (rank_of(request), request)
        at = bisect_left(self._returning, entry)
        if at < len(self._returning) and self._returning[at] == entry:
            del self._returning[at]
        else:
            self._policy.remove(request)
            if request in self._new:
                del self._new[request]
                self._count(request, -1)
