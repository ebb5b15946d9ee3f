"""The server as a process, and what it binds and builds before it serves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest

from aserve import ConfigError
from routes.server import ServerOptions, bind, build_app
from tests.process import LONG, events, server


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


def test_a_thread_that_goes_on_does_not_hold_up_the_exit() -> None:
    code = """
import threading
from routes.server import _leave_threads_behind
threading.Thread(target=threading.Event().wait).start()
_leave_threads_behind(3)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 3
