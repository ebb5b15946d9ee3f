"""OpenTelemetry: a span per request, with children for its time in the queue, in prefill, in decode, and preempted.

app.py puts `Tracing` on its stack where it is given a tracer provider, and only then is OpenTelemetry imported. Spans
are made once a request has ended, from times that are noted anyway, so a token costs nothing. The parent is the
program's own current span where there is one, else the client's W3C `traceparent`. Spans hold no prompt and no output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from aserve import ConfigError, Timeline, __version__
from routes.http import route_path
from routes.records import QUIET_PATHS, Record

_PROPAGATOR = TraceContextTextMapPropagator()
_NO_FAULT = frozenset({"", "ok", "disconnected", "request_cancelled"})  # outcomes that are the client's own doing
_EXPORT_SECONDS = 5


class Phase(NamedTuple):
    """A stretch of a request's life, in seconds of its loop's clock."""

    name: str
    start: float
    end: float


def phases(timeline: Timeline, now: float) -> Iterator[Phase]:
    """What a request has been through by `now`."""
    arrival, scheduled, first_token, ended, changes = timeline
    end = now if ended is None else ended
    yield Phase("queue", arrival, end if scheduled is None else scheduled)
    if scheduled is not None:
        yield Phase("prefill", scheduled, end if first_token is None else first_token)
    if first_token is not None:
        yield Phase("decode", first_token, end)
    since: float | None = None
    for change, at in changes:
        if change == "preempted":
            since = at
        elif since is not None:
            yield Phase("preempted", since, at)
            since = None
    if since is not None:
        yield Phase("preempted", since, end)


class Tracing:
    """Pure ASGI; below RequestLog, whose Record it reads. Probes make no spans."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self.app = app
        self._tracer = provider.get_tracer("aserve", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in QUIET_PATHS:
            await self.app(scope, receive, send)
            return
        began = time.time_ns()
        try:
            await self.app(scope, receive, send)
        finally:
            self._tell(scope, began)

    def _tell(self, scope: Scope, began: int) -> None:
        record: Record = scope["aserve.record"]
        parent = _parent(scope)
        route = getattr(scope.get("route"), "path", "")
        attributes: dict[str, str | int | float] = {"http.request.method": scope["method"], "http.route": route}
        name = f"{scope['method']} {route}".rstrip()
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=began)
        if span.is_recording():
            fields = record.fields()
            for key, value in (
                ("http.response.status_code", record.status),
                ("aserve.request_id", record.label),
                ("aserve.outcome", record.outcome),
                ("aserve.time_to_first_token", fields.get("ttft")),
                ("gen_ai.usage.input_tokens", fields.get("prompt_tokens")),
                ("gen_ai.usage.output_tokens", fields.get("completion_tokens")),
            ):
                if value:
                    span.set_attribute(key, value)
            if record.status >= 500 or record.outcome not in _NO_FAULT:
                span.set_status(Status(StatusCode.ERROR, record.outcome))
            self._tell_phases(record, trace.set_span_in_context(span, parent), began)
        span.end()

    def _tell_phases(self, record: Record, parent: Context, began: int) -> None:
        """Those of each prompt. A connection that resumed a stream tells what came after it began."""
        now = asyncio.get_running_loop().time()
        offset = time.time_ns() - int(now * 1e9)
        for index, stream in enumerate(record.streams):
            for name, start, end in phases(stream.timeline, now) if stream.timeline else ():
                since, until = max(began, offset + int(start * 1e9)), offset + int(end * 1e9)
                if since <= until:
                    attributes = {"aserve.prompt": index}
                    self._tracer.start_span(name, parent, attributes=attributes, start_time=since).end(until)


def _parent(scope: Scope) -> Context:
    if trace.get_current_span().get_span_context().is_valid:
        return get_current()
    headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in scope["headers"]}
    return _PROPAGATOR.extract(headers, Context())


@contextmanager
def exporting(endpoint: str) -> Iterator[TracerProvider]:
    """A provider that sends spans to a collector (OTLP over HTTP) from a thread of its own; at the end it sends what
    waits. Raises ConfigError where the exporter is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as Provider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"tracing needs pip install 'aserve[otel]': {error}", param="otlp_traces_endpoint") from None
    provider = Provider(resource=Resource.create({"service.name": "aserve", "service.version": __version__}))
    exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider
    finally:
        provider.shutdown()
