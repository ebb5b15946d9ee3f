"""The ASGI application: routes over one engine, in a Starlette app that stands alone or is mounted in a user's own.

`create_app` is the shape of a user's own application too (`aserve serve --app pkg.module:create_app`). It uses only
aserve's public names, starts the engine only where it is not running, and installs no signal handler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve import AserveError, Engine, InvalidRequestError, NotFoundError, RequestFailedError, SlowReader
from routes.admin import Admin
from routes.chat import ChatCompletions
from routes.completions import Completions
from routes.dashboard import Dashboard
from routes.docs_page import DocsPage
from routes.endpoint import Options
from routes.http import error_response
from routes.middleware import ApiKeys, RequestLog
from routes.models import Models
from routes.openapi import OpenAPI
from routes.records import Live
from routes.response_store import ResponseStore
from routes.responses import Responses, StoredResponses
from routes.resume import Sessions, StreamEndpoint
from routes.turn import TurnFormat

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def create_app(
    engine: Engine,
    *,
    served_model_names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
    max_requests_per_key: int | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = 8 << 20,
    ping_interval: float = 15.0,
    log_requests: bool = False,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    resume_grace: float = 0.0,
    max_resume_grace: float = 60.0,
    journal_bytes: int = 1 << 20,
    slow_client: SlowReader = "coalesce",
    max_unsent_bytes: int = 1 << 20,
    tracer_provider: TracerProvider | None = None,
) -> Starlette:
    """The application. The engine's own name is served where no names are given.

    `ping_interval` is seconds between comments on an idle stream. A stream whose client is cut off runs on for
    `resume_grace` seconds, or for what the request asks for, up to `max_resume_grace`; its journal, and what waits
    for the client meanwhile, may take `journal_bytes` each. A client that leaves more than `max_unsent_bytes`
    unread is slow, and `slow_client` says what happens to its stream. A mounted app's lifespan is never run by its
    host, which must start the engine itself. `log_requests` logs the beginning of each body. `tool_call_parser`
    (hermes, llama3_json, mistral) and `reasoning_parser` (deepseek_r1, qwen3, think) say how the model writes its
    calls and thoughts. Raises ConfigError for another. With a `tracer_provider` (OpenTelemetry) each request is a span.
    """
    options = Options(
        served_model_names=tuple(served_model_names),
        max_body_bytes=max_body_bytes,
        ping_interval=ping_interval,
        log_requests=log_requests,
        turn_format=TurnFormat(tool_call_parser, reasoning_parser),
        slow_client=slow_client,
        max_unsent_bytes=max_unsent_bytes,
    )
    live = Live()
    sessions = Sessions(live, grace=resume_grace, max_grace=max_resume_grace, limit=journal_bytes)
    app = Starlette(
        routes=_routes(engine, live, sessions, options),
        middleware=_middleware(engine, api_keys, max_requests_per_key, cors_origins, tracer_provider),
        exception_handlers={HTTPException: _http_error, AserveError: _aserve_error, Exception: _internal_error},
        lifespan=_lifespan(engine),
    )
    app.router.redirect_slashes = False
    return app


def _routes(engine: Engine, live: Live, sessions: Sessions, options: Options) -> list[Route]:
    admin = Admin(engine, live, options)
    models = Models(engine, options)
    dashboard = Dashboard(engine)
    store = ResponseStore()
    stored = StoredResponses(store)
    return [
        Route("/v1/completions", Completions(engine, live, sessions, options), methods=["POST"]),
        Route("/v1/chat/completions", ChatCompletions(engine, live, sessions, options), methods=["POST"]),
        Route("/v1/responses", Responses(engine, live, sessions, options, store=store), methods=["POST"]),
        Route("/v1/responses/{id}", stored.retrieve),
        Route("/v1/responses/{id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", stored.cancel, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{id:path}", models.retrieve),
        Route("/v1/requests/{id}", admin.cancel, methods=["DELETE"]),
        Route("/v1/streams/{id}", StreamEndpoint(sessions), methods=["GET"]),
        Route("/tokenize", admin.tokenize, methods=["POST"]),
        Route("/detokenize", admin.detokenize, methods=["POST"]),
        Route("/health", admin.health),
        Route("/ready", admin.ready),
        Route("/version", admin.version),
        Route("/load", admin.load),
        Route("/metrics", admin.metrics),
        Route("/openapi.json", OpenAPI().get),
        Route("/docs", DocsPage().get),
        Route("/dashboard", dashboard.page),
        Route("/v1/stats/stream", dashboard.stream),
    ]


def _middleware(
    engine: Engine,
    api_keys: Sequence[str],
    max_requests: int | None,
    cors_origins: Sequence[str],
    tracer_provider: TracerProvider | None,
) -> list[Middleware]:
    stack = [Middleware(RequestLog, engine=engine)]
    if tracer_provider is not None:
        from routes.tracing import Tracing  # here, so that OpenTelemetry is needed by those who want it only

        stack.append(Middleware(Tracing, provider=tracer_provider))
    if cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-aserve-warning", "x-stream-id", "x-resume-grace", "retry-after"],
            )
        )
    if api_keys:
        stack.append(Middleware(ApiKeys, keys=api_keys, limit=max_requests))
    return stack


def _lifespan(engine: Engine) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if engine.started:  # by the program this app is part of, which also stops it
            yield
            return
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    return lifespan


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in the OpenAI shape."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(NotFoundError(f"no such route: {where}", code="route_not_found"))
    refusal = InvalidRequestError(f"{where}: {error.detail}")
    refusal.status = error.status_code
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def _aserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AserveError)
    return error_response(error)


async def _internal_error(request: Request, error: Exception) -> Response:
    """A bug; Starlette raises it on, so that the server logs the traceback."""
    response = error_response(RequestFailedError("internal error"))
    response.headers["x-request-id"] = request.scope["aserve.record"].label  # this answer bypasses the middleware
    return response
