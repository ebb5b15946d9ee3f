"""The server as a process: real sockets, signals, exit codes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aserve import ConfigError, EngineConfig
from routes.server import ServerOptions, bind, build_app, serve

ROOT = Path(__file__).resolve().parent.parent
LONG = {"prompt": "abc", "max_tokens": 4000, "temperature": 0, "stream": True}


class Process:
    """A running server."""

    def __init__(self, child: subprocess.Popen[str], port: int) -> None:
        self.child = child
        self.url = f"http://127.0.0.1:{port}"

    def wait(self) -> int:
        return self.child.wait(timeout=30)


@contextmanager
def server(drain_timeout: float = 30.0) -> Iterator[Process]:
    """A server over the fake model that answers /health with 200."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.serve_fake", "0", str(drain_timeout)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        process = Process(child, int(child.stdout.readline()))
        with httpx.Client(timeout=30) as client:
            while client.get(process.url + "/health").status_code != 200:
                pass
        yield process
    finally:
        child.kill()
        child.communicate()


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_a_stream_over_a_real_socket_and_a_clean_stop() -> None:
    with server() as process, httpx.Client(timeout=30) as client:
        body = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "stream": True}
        with client.stream("POST", process.url + "/v1/completions", json=body) as response:
            assert response.headers["x-accel-buffering"] == "no"
            received = list(events(response.iter_lines()))
        assert "".join(event["choices"][0]["text"] for event in received[:-1]) == "abcab"
        assert received[-1] == "[DONE]"
        process.child.send_signal(signal.SIGTERM)
        assert process.wait() == 0


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


def test_a_client_that_is_killed_frees_its_blocks() -> None:
    with server() as process:
        with (
            httpx.Client(timeout=30) as client,
            client.stream("POST", process.url + "/v1/completions", json=LONG) as response,
        ):
            next(events(response.iter_lines()))
        with httpx.Client(timeout=30) as client:
            while "aserve_kv_blocks_used 0.0" not in client.get(process.url + "/metrics").text:
                pass


def test_a_busy_port_is_found_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            serve(EngineConfig(model="/nonexistent"), ServerOptions(port=port))
    assert str(port) in caught.value.message


def test_a_port_that_is_none_is_refused() -> None:
    for host, port in (("127.0.0.1", 99999), ("no such host.invalid", 1)):
        with pytest.raises(ConfigError):
            bind(host, port)


def test_bind_listens_so_that_early_clients_queue() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        pass


def test_an_app_of_the_users_own_takes_the_place_of_ours() -> None:
    class Marker:
        def __init__(self, engine: object) -> None:
            self.engine = engine

    engine: Any = object()
    sys.modules["user_app"] = module = type(sys)("user_app")
    module.create_app = Marker  # type: ignore[attr-defined]
    try:
        app = build_app(engine, ServerOptions(app="user_app:create_app"))
    finally:
        del sys.modules["user_app"]
    assert isinstance(app, Marker)
    assert app.engine is engine
    for name in ("no_such_module:create_app", "json:no_such_name", ":"):
        with pytest.raises(ConfigError):
            build_app(engine, ServerOptions(app=name))
