"""In which order waiting requests are admitted: first come first served, by priority, or fairly between tenants.

scheduler.py asks for the next request whenever there is room; preempted requests never come back here. A policy is one
small class: subclass Policy, and name it on the command line as pkg.module:Class. Times are passed in; every operation
is O(log waiting). A request must not wait for ever: each class says how it bounds that.
"""

from __future__ import annotations

import heapq
import importlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar

from aserve.errors import ConfigError
from aserve.lazy_heap import LazyHeap
from aserve.request import Request

MAX_IDLE_TENANTS = 1024


class Policy(ABC):
    """The waiting requests, and which goes next. `in_order` says that those of one tenant and priority go in order of
    arrival: then a request whose wait is too long for its ttft_timeout is refused at once."""

    in_order: ClassVar[bool] = False

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request waits."""

    @abstractmethod
    def peek(self, now: float) -> Request | None:
        """The request to admit next; the same one until something is added, removed or charged."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """The request was admitted, or has ended (then it has a cancel_reason); it may not be waiting here at all."""

    @abstractmethod
    def __len__(self) -> int:
        """Requests waiting."""

    def charge(self, request: Request, *, prompt: int = 0, output: int = 0) -> None:  # noqa: B027 - optional
        """That many tokens of the request, admitted earlier, were computed."""

    def loser(self, request: Request | None, running: Mapping[str, int]) -> str | None:
        """The tenant whose newest running request gives up its place: to the waiting `request`, which then goes before
        those that were preempted too, or, with None, because memory is short.

        `running` counts sequences by tenant. None: no waiting request has a claim; for memory, whoever is newest.
        Called once per step at most: a claim must end where it is met, or requests take turns without progress.
        """
        return None


class FCFSPolicy(Policy):
    """First come, first served; waiting is bounded by who came before."""

    in_order = True

    def __init__(self) -> None:
        self._waiting: OrderedDict[Request, None] = OrderedDict()  # a dict would scan the entries taken from its front

    def add(self, request: Request) -> None:
        self._waiting[request] = None

    def peek(self, now: float) -> Request | None:
        return next(iter(self._waiting), None)

    def remove(self, request: Request) -> None:
        self._waiting.pop(request, None)

    def __len__(self) -> int:
        return len(self._waiting)


class PriorityPolicy(Policy):
    """Lowest `priority` first. Waiting is bounded by ageing: each `seconds_per_level` of waiting counts as one level,
    which keeps the order of any two requests constant, so a heap does."""

    in_order = True

    def __init__(self, seconds_per_level: float = 10.0) -> None:
        self._seconds_per_level = seconds_per_level
        self._waiting: LazyHeap[Request] = LazyHeap()

    def add(self, request: Request) -> None:
        self._waiting.push(request.priority + request.arrival / self._seconds_per_level, request)

    def peek(self, now: float) -> Request | None:
        head = self._waiting.peek()
        return head[1] if head else None

    def remove(self, request: Request) -> None:
        self._waiting.discard(request)

    def __len__(self) -> int:
        return len(self._waiting)


class _Tenant:
    """One tenant's waiting requests and the tokens it was served, in virtual time.

    Invariant: `head` is what waiting.peek() would return.
    """

    __slots__ = ("head", "served", "waiting")

    def __init__(self, served: float) -> None:
        self.served = served
        self.waiting: LazyHeap[Request] = LazyHeap()
        self.head: tuple[tuple[int, float, int], Request] | None = None

    def add(self, request: Request) -> None:
        self.waiting.push((request.priority, request.arrival, request.id), request)
        self.head = self.waiting.peek()

    def remove(self, request: Request) -> None:
        self.waiting.discard(request)
        if self.head is not None and self.head[1] is request:
            self.head = self.waiting.peek()

    def key(self) -> tuple[int, float, float, int]:
        """Where the tenant stands among those with requests waiting."""
        assert self.head is not None
        priority, arrival, number = self.head[0]
        return (priority, self.served, arrival, number)


class FairPolicy(Policy):
    """Lowest `priority` first, then the tenant served least, then the oldest.

    Service is counted in tokens, an output token as two of the prompt's (virtual token counters: Sheng et al., Fairness
    in Serving Large Language Models, OSDI 2024); a tenant that returns starts at the level of the last one served, so
    idling saves up nothing. Waiting is bounded: of four admissions one goes to the oldest request of all, where that
    has waited `patience` seconds. With `preempt`, a tenant that was served less than the one that runs most, and runs
    clearly less, takes a place from it at once: a flood that came first does not delay others.
    """

    in_order = True

    def __init__(self, patience: float = 30.0, *, preempt: bool = True) -> None:
        self._patience = patience
        self._preempt = preempt
        self._tenants: dict[str, _Tenant] = {}
        self._order: LazyHeap[str] = LazyHeap()  # tenants with waiting requests, by keys no larger than theirs
        self._by_age: OrderedDict[Request, None] = OrderedDict()
        self._level = 0.0  # `served` of the tenant last admitted
        self._turn = 0
        self._sweep_at = MAX_IDLE_TENANTS

    def add(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            self._sweep()
            tenant = self._tenants[request.tenant] = _Tenant(self._level)
        if tenant.head is None:
            tenant.served = max(tenant.served, self._level)
        tenant.add(request)
        self._by_age[request] = None
        if tenant.head is not None and tenant.head[1] is request:
            self._order.push(tenant.key(), request.tenant)

    def peek(self, now: float) -> Request | None:
        oldest = next(iter(self._by_age), None)
        if oldest is None:
            return None
        if self._turn == 3 and now - oldest.arrival >= self._patience:
            return oldest
        head = self._next().head
        return None if head is None else head[1]

    def remove(self, request: Request) -> None:
        if request not in self._by_age:
            return
        del self._by_age[request]
        tenant = self._tenants[request.tenant]
        if request.cancel_reason is None:  # admitted
            self._level = max(self._level, min(tenant.served, self._next().served))
            self._turn = (self._turn + 1) % 4
        tenant.remove(request)
        if tenant.head is None:
            self._order.discard(request.tenant)

    def charge(self, request: Request, *, prompt: int = 0, output: int = 0) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant(self._level)
        tenant.served += prompt + 2 * output

    def loser(self, request: Request | None, running: Mapping[str, int]) -> str | None:
        if not self._preempt or not running:
            return None
        most = max(running, key=running.__getitem__)
        if request is None:
            return most if running[most] > 1 else None
        holds = running.get(request.tenant, 0) + len(request.sequences)
        if 5 * holds > 4 * running[most]:  # for less, places would go to and fro between tenants that are even
            return None
        holder = self._tenants.get(most)
        if holder is not None and holder.served < self._tenants[request.tenant].served:
            return None
        return most

    def __len__(self) -> int:
        return len(self._by_age)

    def _next(self) -> _Tenant:
        """The tenant whose turn it is, of those with requests waiting: keys grow unless one is added, so that each is
        looked at anew only when it surfaces."""
        while True:
            first = self._order.peek()
            assert first is not None
            tenant = self._tenants[first[1]]
            key = tenant.key()
            if key == first[0]:
                return tenant
            self._order.push(key, first[1])

    def _sweep(self) -> None:
        """Bounds the memory of tenants without a request: those served most are remembered, the rest start afresh."""
        if len(self._tenants) < self._sweep_at:
            return
        kept = {name: tenant for name, tenant in self._tenants.items() if tenant.head}
        idle = ((name, each) for name, each in self._tenants.items() if not each.head and each.served > self._level)
        kept.update(heapq.nlargest(MAX_IDLE_TENANTS, idle, key=lambda item: item[1].served))
        self._tenants = kept
        self._sweep_at = 2 * len(kept) + MAX_IDLE_TENANTS


POLICIES: dict[str, type[Policy]] = {"fcfs": FCFSPolicy, "priority": PriorityPolicy, "fair": FairPolicy}


def load_policy(name: str) -> Policy:
    """The policy of that name, or of pkg.module:Class. Raises ConfigError where there is none."""
    if name in POLICIES:
        return POLICIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"--policy must be one of {', '.join(POLICIES)}, or pkg.module:Class; got {name!r}", param="policy"
        )
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"--policy {name!r} cannot be loaded: {error}", param="policy") from error
    if not isinstance(policy, Policy):
        raise ConfigError(f"--policy {name!r} is not a subclass of aserve.policy.Policy", param="policy")
    return policy
