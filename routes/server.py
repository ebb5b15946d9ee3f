"""One process that serves: port bound first, then the model, then requests until a signal says to drain.

The CLI calls `serve`. uvicorn on its own would wait for open streams before it tells the application to stop; so the
first signal stops the engine instead: no new requests (503), open ones finish within the drain timeout or end with an
error, and only then does uvicorn shut down. A second signal ends what is open at once.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from aserve import ConfigError, Engine, EngineConfig, profiled
from routes.app import create_app
from routes.logs import logging_to_stderr
from routes.protocol import Protocol
from routes.server_options import ServerOptions

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

log = logging.getLogger("aserve.server")

_CLOSE_SECONDS = 5.0  # for the last error events to reach slow readers
_SWITCH_INTERVAL = 1e-4  # seconds that the event loop may keep the interpreter from the model thread
_UNSENT_BYTES = 64 << 10
_PROBE_SECONDS, _NUM_PROBES = 60, 4  # of a connection on which nothing is said


def serve(config: EngineConfig, options: ServerOptions) -> int:
    """Serves until a signal; the exit code: 0 after a whole drain, 1 where requests were cut or the engine died.

    Raises ConfigError for what is wrong before serving, a busy port included.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL)
    _allow_many_connections()
    with logging_to_stderr(options.log_level, options.log_format), bind(options.host, options.port) as listener:
        status = serve_engine(Engine(config), listener, options)
    _leave_threads_behind(status)
    return status


def _leave_threads_behind(status: int) -> None:
    """Ends the process now where a thread goes on: one that converts a model would hold the exit up for minutes, and
    one that hangs in a step could break it. What they write appears whole or not at all."""
    if threading.active_count() > 1:
        logging.shutdown()
        os._exit(status)


def _allow_many_connections() -> None:
    """Each is a file, and the limit that a shell gives (1024) is below what a server may hold."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the system says no
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve_engine(engine: Engine, listener: socket.socket, options: ServerOptions) -> int:
    """`serve`, for an engine that is made but not started, on a listening socket."""
    options.check_certificate()
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    log.info("listening on %s://%s:%d, loading the model", scheme, f"[{host}]" if ":" in host else host, port)
    with ExitStack() as stack:
        tracer_provider = None
        if options.otlp_traces_endpoint is not None:
            from routes.tracing import exporting

            tracer_provider = stack.enter_context(exporting(options.otlp_traces_endpoint))
        return _run(build_app(engine, options, tracer_provider), engine, listener, options)


def _run(app: ASGIApp, engine: Engine, listener: socket.socket, options: ServerOptions) -> int:
    settings = uvicorn.Config(
        under_root(app, options.root_path),
        loop="uvloop",
        http=Protocol,
        ws="none",
        access_log=False,
        log_config=None,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        timeout_graceful_shutdown=int(_CLOSE_SECONDS),
    )
    server = Server(
        settings, engine, options.drain_timeout, exit_on_death=options.exit_on_death, profile=options.profile
    )
    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
        return runner.run(server.run_engine(listener))


def under_root(app: ASGIApp, root: str) -> ASGIApp:
    """The application where a proxy shows it at `root`, whether or not the proxy takes that off the path."""
    if not root:
        return app

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            whole = path if path.startswith(f"{root}/") else root + path
            scope = {**scope, "root_path": root, "path": whole}
        await app(scope, receive, send)

    return mounted


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from here on a second server on the port fails, and clients queue. Raises ConfigError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, got {port}", param="port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bound_connections(listener)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", param="port") from None
    return listener


def _bound_connections(listener: socket.socket) -> None:
    """What every accepted connection inherits: the system holds little that a slow client has not taken, so that the
    server sees that it is slow; and a client that is gone without a word is noticed in minutes."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
        ("TCP_KEEPIDLE", _PROBE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", _NUM_PROBES),
    ):
        if hasattr(socket, name):  # Linux
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def build_app(engine: Engine, options: ServerOptions, tracer_provider: TracerProvider | None = None) -> ASGIApp:
    """aserve's application, or the user's own. Raises ConfigError where that cannot be imported."""
    if options.app is None:
        return create_app(
            engine,
            served_model_names=options.served_model_names,
            api_keys=options.api_keys,
            max_requests_per_key=options.max_requests_per_key,
            cors_origins=options.cors_origins,
            max_body_bytes=options.max_body_bytes,
            ping_interval=options.ping_interval,
            resume_grace=options.resume_grace,
            max_resume_grace=options.max_resume_grace,
            journal_bytes=options.journal_bytes,
            slow_client=options.slow_client,
            max_unsent_bytes=options.max_unsent_bytes,
            log_requests=options.log_requests,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            tracer_provider=tracer_provider,
        )
    module, _, name = options.app.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name or "create_app")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--app {options.app}: {error}", param="app") from error
    return cast(Callable[[Engine], ASGIApp], factory)(engine)


class Server(uvicorn.Server):
    """uvicorn, with a drain between the first signal and its own shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engine,
        drain_timeout: float,
        *,
        exit_on_death: bool = True,
        profile: str | None = None,
    ) -> None:
        super().__init__(config)
        self._profile = profile
        self._engine = engine
        self._exit_on_death = exit_on_death
        self._drain_timeout = drain_timeout
        self._num_signals = 0
        self._signalled = asyncio.Event()
        self._hurried = asyncio.Event()
        self._began = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_engine(self, listener: socket.socket) -> int:
        """Loads the model while the port already answers 503, serves, drains; the exit code."""
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        starting = asyncio.create_task(self._start())
        serving = asyncio.create_task(self.serve([listener]))
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait([starting, serving, signalled], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # raises what loading failed with
                self._log_ready()
                died = asyncio.create_task(self._engine.died())
                ends = [serving, signalled, died] if self._exit_on_death else [serving, signalled]
                async with profiled(self._engine, Path(self._profile), window=True) if self._profile else nullcontext():
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if died.done() and not signalled.done():
                    log.critical("exiting, because the engine is dead: a supervisor should start the server again")
                died.cancel()
            return await self._drain(starting)
        finally:
            signalled.cancel()
            self.should_exit = True
            await serving

    async def _start(self) -> None:
        await self._engine.start()
        await self._engine.warm_up()

    def _log_ready(self) -> None:
        info = self._engine.info
        log.info(
            "ready: %s, %s %s, context %d, # GPU blocks: %d, # CPU blocks: %d, after %.1f s",
            self._engine.name,
            info.device,
            info.dtype,
            info.max_model_len,
            info.num_gpu_blocks,
            info.num_cpu_blocks,
            time.monotonic() - self._began,
        )

    async def _drain(self, starting: asyncio.Task[None]) -> int:
        """Ends open requests: by themselves in time, else, or at the second signal, with an error."""
        if not self._engine.dead:
            log.info("draining for up to %g s; signal again to end at once", self._drain_timeout)
        starting.cancel()
        began = time.monotonic()
        stopping = asyncio.create_task(self._engine.stop(drain_timeout=self._drain_timeout))
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait([stopping, hurried], return_when=asyncio.FIRST_COMPLETED)
        whole = stopping.done() and time.monotonic() - began < self._drain_timeout
        hurried.cancel()
        stopping.cancel()
        await asyncio.wait([stopping])
        await self._engine.stop()
        return 0 if whole and not self._engine.dead else 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn's signal handlers, between two bytecodes of the loop's thread."""
        self._num_signals += 1
        if self._num_signals > 2 or self._loop is None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
            return
        event = self._signalled if self._num_signals == 1 else self._hurried
        self._loop.call_soon_threadsafe(event.set)
