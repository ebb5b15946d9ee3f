"""The server as a process, and what it binds and builds before it serves."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from aserve import ConfigError
from routes.app import create_app
from routes.server import bind, build_app, under_root
from routes.server_options import ServerOptions
from tests.asgi import get
from tests.process import LONG, events, server
from tests.serving import serving


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


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"ping_interval": 0}, "ping_interval"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"api_keys": ("key", " ")}, "api_keys"),
        ({"served_model_names": ("",)}, "served_model_names"),
        ({"max_requests_per_key": 1}, "max_requests_per_key"),
        ({"max_requests_per_key": 0, "api_keys": ("key",)}, "max_requests_per_key"),
        ({"cors_origins": ("https://a.example/",)}, "cors_origins"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
    ],
)
def test_an_option_that_could_not_serve_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**options)
    assert caught.value.param == param


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no certificate")
    ServerOptions().check_certificate()
    for files in ({"ssl_keyfile": "x"}, dict.fromkeys(("ssl_keyfile", "ssl_certfile"), str(tmp_path / "x.pem"))):
        with pytest.raises(ConfigError):
            ServerOptions(**files).check_certificate()  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_root_path_may_be_taken_off_by_the_proxy_or_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aserve.access")
    async with serving() as engine:
        app = under_root(create_app(engine, api_keys=["secret"]), "/llm")
        for path in ("/llm/health", "/health"):
            assert (await get(app, path)).status == 200
            assert caplog.records == []  # probes are logged at debug, wherever they come in
        for path in ("/llm/openapi.json", "/openapi.json"):
            reply = await get(app, path, headers={"authorization": "Bearer secret"})
            assert reply.json()["servers"] == [{"url": "/llm"}]
        assert (await get(app, "/llm/v1/models")).status == 401


def test_a_client_that_sends_a_huge_body_to_its_end_sees_why_it_is_refused() -> None:
    body = b"a" * (16 << 20)
    stated = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 256 + b"0\r\n\r\n"
    with server(max_body_bytes=1000) as process:
        for request in (stated, chunked):
            with socket.create_connection(("127.0.0.1", int(process.url.rpartition(":")[2])), timeout=30) as client:
                client.sendall(request)  # a closed connection would be reset by this
                reply = b"".join(iter(lambda: client.recv(65536), b""))
            assert reply.startswith(b"HTTP/1.1 413 ")
            assert b"request_too_large" in reply


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
