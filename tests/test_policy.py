from __future__ import annotations

import random

import pytest

from aserve.errors import ConfigError
from aserve.policy import MAX_IDLE_TENANTS, FairPolicy, FCFSPolicy, Policy, PriorityPolicy, load_policy
from aserve.request import Request
from tests.fakes import make_request


def take(policy: Policy, now: float = 0.0) -> Request:
    request = policy.peek(now)
    assert request is not None
    policy.remove(request)
    return request


def test_first_come_is_first_served() -> None:
    policy = FCFSPolicy()
    requests = [make_request([5], priority=priority) for priority in (3, 1, 2)]
    for request in requests:
        policy.add(request)
    policy.remove(requests[1])
    assert [take(policy), take(policy)] == [requests[0], requests[2]]
    assert policy.peek(0.0) is None and len(policy) == 0


def test_the_lowest_priority_value_goes_first() -> None:
    policy = PriorityPolicy()
    low, high = make_request([5], priority=5), make_request([5], priority=-1)
    policy.add(low)
    policy.add(high)
    assert [take(policy), take(policy)] == [high, low]


def test_waiting_makes_up_for_priority() -> None:
    policy = PriorityPolicy(seconds_per_level=10.0)
    old = make_request([5], priority=2, arrival=0.0)
    policy.add(old)
    policy.add(make_request([5], priority=0, arrival=19.0))
    late = make_request([5], priority=0, arrival=21.0)
    policy.add(late)
    take(policy)
    assert take(policy) is old and take(policy) is late


def serve(policy: FairPolicy, request: Request, tokens: int) -> None:
    policy.charge(request, prompt=tokens)


def test_tenants_share_tokens_not_requests() -> None:
    policy = FairPolicy()
    for number in range(60):
        policy.add(make_request([5], tenant="large", arrival=number))
        policy.add(make_request([5], tenant="small", arrival=number))
    tokens = {"large": 0, "small": 0}
    for _ in range(60):
        request = take(policy)
        cost = 300 if request.tenant == "large" else 100
        tokens[request.tenant] += cost
        serve(policy, request, cost)
    assert abs(tokens["large"] - tokens["small"]) <= 300


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    policy = FairPolicy()
    for number in range(1000):
        policy.add(make_request([5], tenant="flood", arrival=float(number)))
    for _ in range(10):
        serve(policy, take(policy), 100)
    guest = make_request([5], tenant="guest", arrival=1000.0)
    policy.add(guest)
    assert guest in [take(policy), take(policy)]


def test_idling_saves_up_nothing() -> None:
    policy = FairPolicy()
    for number in range(100):
        policy.add(make_request([5], tenant="busy", arrival=number))
    for _ in range(50):
        serve(policy, take(policy), 100)
    for number in range(100, 150):
        policy.add(make_request([5], tenant="back", arrival=number))
    served = []
    for _ in range(20):
        request = take(policy)
        served.append(request.tenant)
        serve(policy, request, 100)
    assert 8 <= served.count("busy") <= 12


def test_an_output_token_counts_as_two_of_the_prompt() -> None:
    policy = FairPolicy()
    for tenant in "ab":
        for number in range(3):
            policy.add(make_request([5], tenant=tenant, arrival=number))
    first, second = take(policy), take(policy)
    policy.charge(first, prompt=150)
    policy.charge(second, output=100)
    assert take(policy).tenant == first.tenant


class Plain:
    """The fair order as its definition says it, looked for among all that wait."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.waiting: list[Request] = []
        self.level = 0.0

    def key(self, request: Request) -> tuple[int, float, float, int]:
        return (request.priority, self.served[request.tenant], request.arrival, request.id)

    def heads(self) -> list[Request]:
        first: dict[str, Request] = {}
        for request in sorted(self.waiting, key=lambda each: (each.priority, each.arrival, each.id)):
            first.setdefault(request.tenant, request)
        return sorted(first.values(), key=self.key)

    def add(self, request: Request) -> None:
        served = self.served.setdefault(request.tenant, self.level)
        if all(each.tenant != request.tenant for each in self.waiting):
            self.served[request.tenant] = max(served, self.level)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        if request.cancel_reason is None:
            least = self.served[self.heads()[0].tenant]
            self.level = max(self.level, min(self.served[request.tenant], least))
        self.waiting.remove(request)


def test_the_order_is_that_of_the_definition_whatever_comes_between() -> None:
    rng = random.Random(0)
    policy, plain = FairPolicy(), Plain()
    served: list[Request] = []
    for number in range(3000):
        action = rng.random()
        if action < 0.35:
            arrival = float(number - rng.choice([0, 0, 0, 20]))  # tokenizing a long prompt took its time
            request = make_request(
                [5], tenant=rng.choice("abcdefgh"), priority=rng.choice([0, 0, 0, 1]), arrival=arrival
            )
            policy.add(request)
            plain.add(request)
        elif action < 0.65 and served:
            policy.charge(request := rng.choice(served), prompt=(tokens := rng.randrange(50)))
            plain.served[request.tenant] += tokens
        elif action < 0.75 and plain.waiting:
            request = rng.choice(plain.waiting)
            request.cancel_reason = "cancelled"
            policy.remove(request)
            plain.remove(request)
        elif plain.waiting:
            request = plain.heads()[0]
            assert policy.peek(0.0) is request
            policy.remove(request)
            plain.remove(request)
            served.append(request)
        assert policy.peek(0.0) is (plain.heads()[0] if plain.waiting else None)
        assert len(policy) == len(plain.waiting)
    assert len(served) > 300


def test_the_oldest_waits_for_a_bounded_number_of_admissions() -> None:
    policy = FairPolicy(patience=30.0)
    poor = make_request([5], tenant="poor", priority=9, arrival=0.0)
    policy.add(poor)
    for number in range(20):
        policy.add(make_request([5], tenant="rich", arrival=1.0 + number))
    assert poor not in [take(policy, now=10.0) for _ in range(8)]
    assert poor in [take(policy, now=31.0) for _ in range(4)]


def test_a_cancelled_request_changes_nothing_for_others() -> None:
    policy = FairPolicy()
    gone, kept = make_request([5], tenant="a"), make_request([5], tenant="a", arrival=1.0)
    policy.add(gone)
    policy.add(kept)
    gone.cancel_reason = "cancelled"
    policy.remove(gone)
    policy.remove(gone)
    assert len(policy) == 1 and take(policy) is kept


def test_memory_is_bounded_by_tenants_that_matter() -> None:
    policy = FairPolicy()
    for number in range(10 * MAX_IDLE_TENANTS):
        policy.add(make_request([5], tenant=str(number), arrival=number))
        serve(policy, take(policy), 10)
    assert len(policy._tenants) <= 4 * MAX_IDLE_TENANTS


@pytest.mark.parametrize(("name", "kind"), [("fcfs", FCFSPolicy), ("priority", PriorityPolicy), ("fair", FairPolicy)])
def test_a_policy_is_found_by_name(name: str, kind: type[Policy]) -> None:
    assert type(load_policy(name)) is kind


def test_a_users_own_policy_is_found_by_module_and_class() -> None:
    assert type(load_policy("aserve.policy:PriorityPolicy")) is PriorityPolicy


@pytest.mark.parametrize("name", ["lifo", "", "no.such.module:Class", "aserve.policy:Nothing", "aserve.request:Usage"])
def test_a_policy_that_does_not_load_says_so(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(name)
    assert caught.value.param == "policy"


def test_a_class_that_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a subclass"):
        load_policy("aserve.deadlines:Deadlines")
