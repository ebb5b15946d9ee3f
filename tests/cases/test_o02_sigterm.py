"""O02: SIGTERM refuses new calls, drains open streams up to a limit, then ends them with an error, and exits."""

from __future__ import annotations

import signal

import httpx

from tests.process import LONG, events, server


def test_sigterm_refuses_new_requests_and_lets_open_ones_finish() -> None:
    with server() as process, httpx.Client(timeout=30) as client:
        body = LONG | {"max_tokens": 300}
        with client.stream("POST", process.url + "/v1/completions", json=body) as response:
            received = events(response.iter_lines())
            next(received)
            process.child.send_signal(signal.SIGTERM)
            while (
                refused := httpx.post(process.url + "/v1/completions", json=body | {"max_tokens": 1, "stream": False})
            ).is_success:
                pass
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert refused.headers["connection"] == "close"
            rest = list(received)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert process.wait() == 0


def test_what_outlives_the_drain_timeout_ends_with_an_error_event() -> None:
    with server(drain_timeout=0.1) as process, httpx.Client(timeout=30) as client:
        with client.stream("POST", process.url + "/v1/completions", json=LONG) as response:
            received = events(response.iter_lines())
            next(received)
            process.child.send_signal(signal.SIGTERM)
            rest = list(received)
        assert "error" in rest[-1]
        assert process.wait() == 1


def test_a_second_signal_ends_at_once() -> None:
    with server(drain_timeout=1000) as process, httpx.Client(timeout=30) as client:
        with client.stream("POST", process.url + "/v1/completions", json=LONG) as response:
            received = events(response.iter_lines())
            next(received)
            process.child.send_signal(signal.SIGINT)
            while httpx.get(process.url + "/health").status_code == 200:
                pass
            process.child.send_signal(signal.SIGINT)
            rest = list(received)
        assert "error" in rest[-1]
        assert process.wait() == 1
