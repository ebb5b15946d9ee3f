"""What arrives when: a trace is one JSON object per line, or is generated from a short specification.

command.py reads or generates a trace; simulator.py replays it. Lengths are in tokens, times in seconds. Nothing here
knows the scheduler.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, get_type_hints

from aserve.errors import ConfigError


class TraceRequest(NamedTuple):
    """One request. The first `prefix_tokens` of its prompt are those of every prompt with the same `prefix`."""

    arrival: float
    prompt: int
    output: int  # tokens each choice draws before it ends, its end token included
    tenant: str = ""
    priority: int = 0
    prefix: str | None = None
    prefix_tokens: int = 0
    n: int = 1
    max_tokens: int | None = None  # what the client asked for; None is what context and pool allow
    deadline: float | None = None  # after arrival, for the whole request
    first_token_deadline: float | None = None  # after arrival


_KINDS: dict[str, tuple[type, ...]] = {
    "arrival": (int, float),
    "prompt": (int,),
    "output": (int,),
    "tenant": (str,),
    "priority": (int,),
    "prefix": (str, type(None)),
    "prefix_tokens": (int,),
    "n": (int,),
    "max_tokens": (int, type(None)),
    "deadline": (int, float, type(None)),
    "first_token_deadline": (int, float, type(None)),
}


def read_trace(lines: Iterable[str], name: str = "trace") -> list[TraceRequest]:
    """The requests of JSON lines by arrival. Raises ConfigError naming the line of the first mistake."""
    trace = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                trace.append(_parse(json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{name}, line {number}: {error}", param="trace") from None
    trace.sort(key=lambda request: request.arrival)
    return trace


def _parse(fields: Any) -> TraceRequest:
    if not isinstance(fields, dict):
        raise ValueError("a request is a JSON object")
    if missing := {"arrival", "prompt", "output"} - fields.keys():
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    for field, value in fields.items():
        if field not in _KINDS:
            raise ValueError(f"no field {field!r}; known are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[field]) or isinstance(value, bool):
            raise ValueError(f"{field} is {value!r}")
    request = TraceRequest(**fields)
    if not 0 <= request.arrival < math.inf:
        raise ValueError("arrival must be 0 or more")
    for field, low in (("prompt", 1), ("output", 1), ("n", 1), ("prefix_tokens", 0)):
        if fields.get(field, low) < low:
            raise ValueError(f"{field} must be at least {low}")
    if request.prefix_tokens > request.prompt or (request.prefix_tokens and request.prefix is None):
        raise ValueError("prefix_tokens are the first of the prompt's, and need a prefix")
    return request


def write_trace(trace: Iterable[TraceRequest]) -> Iterator[str]:
    """The JSON lines of a trace; what is at its default is left out."""
    defaults = TraceRequest._field_defaults
    for request in trace:
        fields = request._asdict().items()
        yield json.dumps({name: value for name, value in fields if name not in defaults or value != defaults[name]})


class Load(NamedTuple):
    """The options of a generator. Lengths are log-normal around their medians, as chats are; `sigma` 0 fixes them."""

    rate: float = 1.0  # requests a second
    n: int = 1000
    start: float = 0.0
    prompt: float = 256.0
    output: float = 160.0
    sigma: float = 0.8
    longest: int = 4096  # of a prompt or an output
    tenant: str = ""
    tenants: int = 0  # with more than 0: that many, named after `tenant`, at random
    priority: int = 0
    prefixes: int = 0  # how many beginnings are shared, at random, of `prefix_tokens` on top of each prompt
    prefix_tokens: int = 256
    choices: int = 1
    max_tokens: int | None = None
    deadline: float | None = None
    first_token_deadline: float | None = None
    seed: int = 0


def _poisson(load: Load, rng: random.Random) -> Iterator[float]:
    now = load.start
    for _ in range(load.n):
        now += rng.expovariate(load.rate)
        yield now


def _steady(load: Load, rng: random.Random) -> Iterator[float]:
    return (load.start + index / load.rate for index in range(load.n))


def _burst(load: Load, rng: random.Random) -> Iterator[float]:
    return (load.start for _ in range(load.n))


ARRIVALS: dict[str, Callable[[Load, random.Random], Iterator[float]]] = {
    "poisson": _poisson,
    "steady": _steady,
    "burst": _burst,
}


def generate(kind: str, load: Load) -> Iterator[TraceRequest]:
    """Requests that arrive as `kind` says: "poisson", "steady" (evenly) or "burst" (at once)."""
    rng = random.Random(f"{kind}{load}")  # nosec B311 # no secret

    def draw(median: float) -> int:
        return max(1, min(load.longest, round(median * math.exp(load.sigma * rng.gauss(0.0, 1.0)))))

    for arrival in ARRIVALS[kind](load, rng):
        tenant = f"{load.tenant}{rng.randrange(load.tenants)}" if load.tenants else load.tenant
        prefix = f"{load.tenant}/{rng.randrange(load.prefixes)}" if load.prefixes else None
        shared = load.prefix_tokens if load.prefixes else 0
        yield TraceRequest(
            arrival=arrival,
            prompt=shared + draw(load.prompt),
            output=draw(load.output),
            tenant=tenant,
            priority=load.priority,
            prefix=prefix,
            prefix_tokens=shared,
            n=load.choices,
            max_tokens=load.max_tokens,
            deadline=load.deadline,
            first_token_deadline=load.first_token_deadline,
        )


def parse_load(text: str) -> tuple[str, Load]:
    """`KIND:NAME=VALUE,...` as generate() takes it. Raises ConfigError."""
    kind, _, options = text.partition(":")
    if kind not in ARRIVALS:
        raise ConfigError(f"--generate knows {', '.join(ARRIVALS)}; got {kind!r}", param="generate")
    given: dict[str, Any] = {}
    hints = get_type_hints(Load)
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if name not in Load._fields or not equals:
            raise ConfigError(f"--generate takes {', '.join(Load._fields)}; got {option!r}", param="generate")
        convert = next(each for each in (str, float, int) if hints[name] in (each, each | None))
        try:
            given[name] = convert(value)
        except ValueError:
            raise ConfigError(f"--generate: {name} is a number, got {value!r}", param="generate") from None
    load = Load(**given)
    if load.rate <= 0 or load.n < 1 or min(load.start, load.sigma, load.tenants, load.prefixes, load.prefix_tokens) < 0:
        raise ConfigError(f"--generate {text!r}: rate and n must be above 0, counts not below", param="generate")
    return kind, load
