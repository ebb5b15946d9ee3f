"""Requests made up from /openapi.json against a live server: whatever is sent, no answer may be a server's error.

python -m tests.fuzz [CASES] [PATH]: so many cases per operation (2000). Half of them do not fit the document; of those
that do, half are a request that works but for a few fields.
A deadline that a request gave itself and missed (504) is the answer it asked for.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from tests.process import server

ENDLESS = {"/v1/stats/stream"}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab<eos>", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab<eos>"}], "max_tokens": 9},
    "/v1/responses": {"input": "ab<eos>", "max_output_tokens": 9},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [5, 6]},
}


def fuzz(url: str, cases: int, only: str | None = None) -> dict[str, Counter[int]]:
    """Answers by status, per operation. Raises AssertionError with the request for a server's error."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = {}
    for result in schema.get_all_operations():
        operation: Any = result.ok()
        if operation.path not in ENDLESS and only in (None, operation.path):
            began = time.monotonic()
            counts = found[operation.label] = _operation(operation, url, cases)
            print(f"{operation.label}: {dict(sorted(counts.items()))} in {time.monotonic() - began:.0f} s", flush=True)
    return found


def _operation(operation: Any, url: str, cases: int) -> Counter[int]:
    counts: Counter[int] = Counter()

    def check(case: Any) -> None:
        response = case.call(base_url=url, timeout=60)
        counts[response.status_code] += 1
        late = response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
        assert response.status_code < 500 or late, f"{response.status_code}: {case.as_curl_command()}: {response.text}"

    fitting = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not operation.body:
        _run(check, fitting, cases if operation.path_parameters else 1)
        return counts
    _run(check, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), cases // 2)
    _run(check, fitting, cases // 4)
    if operation.path in VALID:
        _run(check, _nearly_valid(fitting, VALID[operation.path]), cases // 4)
    return counts


@st.composite
def _nearly_valid(draw: st.DrawFn, fitting: st.SearchStrategy[Any], valid: dict[str, Any]) -> Any:
    """A request that works, with a few fields made up: only such a one comes as far as the engine."""
    case = draw(fitting)
    made_up = case.body if isinstance(case.body, dict) else {}
    names = draw(st.lists(st.sampled_from(sorted(made_up)), max_size=3, unique=True)) if made_up else []
    case.body = {**valid, **{name: made_up[name] for name in names}}
    return case


def _run(check: Callable[[Any], None], cases: st.SearchStrategy[Any], count: int) -> None:
    settings(
        max_examples=count,
        deadline=None,
        database=None,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )(given(case=cases)(check))()


def run(cases: int, only: str | None = None) -> dict[str, Counter[int]]:
    """`fuzz` of a fresh server, which must be well after it. Its log is printed where it is not."""
    with server(step=0.0, max_model_len=256) as process:
        try:
            found = fuzz(process.url, cases, only)
            assert httpx.get(process.url + "/health").status_code == 200
            return found
        except BaseException:
            print(process.log()[-20_000:], file=sys.stderr)
            raise


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    run(cases, sys.argv[2] if len(sys.argv) > 2 else None)


if __name__ == "__main__":
    main()
