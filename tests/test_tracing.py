"""Spans, against the SDK's in-memory exporter: who is whose parent, when phases begin and end, and what is no error."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import ASGIApp

from aserve import Engine, Timeline
from routes.app import create_app
from routes.tracing import Phase, phases
from tests.asgi import call, get, post
from tests.process import server
from tests.serving import serving

pytestmark = pytest.mark.anyio
BODY = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Traced:
    """An app over the engine, and the spans it has made."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(resource=Resource.get_empty(), **options)  # detection would block the loop
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.app: ASGIApp = create_app(engine, tracer_provider=self.provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def one(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.spans if span.name == name]
        return span


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_one_span_with_its_phases_under_the_clients(stream: bool) -> None:
    before = time.time_ns()
    async with serving() as engine:
        traced = Traced(engine)
        await post(traced.app, "/v1/completions", BODY | {"stream": stream}, headers=TRACEPARENT)
    root = traced.one("POST /v1/completions")
    assert root.parent is not None and root.context is not None and root.attributes is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.kind is SpanKind.SERVER
    assert root.status.status_code is StatusCode.UNSET
    assert root.attributes["http.response.status_code"] == 200
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.usage.output_tokens"]) == (3, 8)
    children = [traced.one(name) for name in ("queue", "prefill", "decode")]
    assert len(traced.spans) == 4
    for child in children:
        assert child.parent is not None and child.parent.span_id == root.context.span_id
    began, ended = times(root)
    moments = [at for child in children for at in times(child)]
    assert moments == sorted(moments)
    assert before <= began <= moments[0] and moments[-1] <= ended <= time.time_ns()
    assert not any("abc" in str(value) for span in traced.spans for value in (span.attributes or {}).values())


async def test_the_programs_own_span_goes_before_the_clients() -> None:
    async with serving() as engine:
        traced = Traced(engine)
        with traced.provider.get_tracer("mine").start_as_current_span("outer") as outer:
            await post(traced.app, "/v1/completions", BODY, headers=TRACEPARENT)
    root = traced.one("POST /v1/completions")
    assert root.parent is not None and root.parent.span_id == outer.get_span_context().span_id


async def test_each_prompt_has_its_phases() -> None:
    async with serving() as engine:
        traced = Traced(engine)
        await post(traced.app, "/v1/completions", BODY | {"prompt": ["ab", "cd"]})
    decodes = [span for span in traced.spans if span.name == "decode"]
    assert sorted(str((span.attributes or {})["aserve.prompt"]) for span in decodes) == ["0", "1"]


async def test_refusals_are_no_faults_of_the_server_and_probes_make_no_spans() -> None:
    async with serving() as engine:
        traced = Traced(engine)
        await post(traced.app, "/v1/completions", BODY | {"temperature": "hot"})
        await get(traced.app, "/health")
        await get(traced.app, "/no/such/route/1234")
        assert [span.name for span in traced.spans] == ["POST /v1/completions", "GET"]
        assert {span.status.status_code for span in traced.spans} == {StatusCode.UNSET}
    await post(traced.app, "/v1/completions", BODY)  # the engine is stopped
    assert traced.spans[-1].status.status_code is StatusCode.ERROR


async def test_a_client_that_leaves_is_told_as_an_outcome() -> None:
    async with serving() as engine:
        traced = Traced(engine)
        body = BODY | {"stream": True, "max_tokens": 1000}
        await call(traced.app, "POST", "/v1/completions", body, disconnect_at=3)
    root = traced.one("POST /v1/completions")
    assert root.attributes is not None and root.attributes["aserve.outcome"] == "disconnected"
    assert root.status.status_code is StatusCode.UNSET
    assert times(traced.one("decode"))[1] <= times(root)[1]


async def test_a_resumed_connection_tells_only_what_came_after_it_began() -> None:
    headers = {"x-resume-grace": "60"}
    async with serving() as engine:
        traced = Traced(engine)
        body = BODY | {"stream": True, "max_tokens": 300}
        reply = await call(traced.app, "POST", "/v1/completions", body, headers=headers, disconnect_at=3)
        assert {span.name for span in traced.spans} >= {"queue", "decode"}
        traced.exporter.clear()
        await get(traced.app, f"/v1/streams/{reply.headers['x-stream-id']}", headers=TRACEPARENT)
    root = traced.one("GET /v1/streams/{id}")
    assert {span.name for span in traced.spans} <= {"GET /v1/streams/{id}", "decode"}
    for span in traced.spans:
        assert times(root)[0] <= times(span)[0] <= times(span)[1] <= times(root)[1]


@pytest.mark.parametrize("headers", [{"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"}, {}])
async def test_without_a_valid_parent_a_request_begins_a_trace(headers: dict[str, str]) -> None:
    async with serving() as engine:
        traced = Traced(engine)
        await post(traced.app, "/v1/completions", BODY, headers=headers)
    assert traced.one("POST /v1/completions").parent is None


async def test_a_trace_that_is_not_sampled_makes_nothing() -> None:
    async with serving() as engine:
        traced = Traced(engine, sampler=ALWAYS_OFF)
        await post(traced.app, "/v1/completions", BODY)
        assert traced.spans == ()


async def test_an_engine_notes_preemptions_in_a_streams_timeline() -> None:
    """Two requests that do not fit the pool together."""
    async with serving(num_gpu_blocks=16, max_model_len=256) as engine:
        streams = [await engine.submit("abcd" * 4, None) for _ in range(2)]
        for stream in streams:
            await stream.completions()
        changes = [change for stream in streams for change, _ in stream.timeline.changes]  # type: ignore[union-attr]
        assert changes[:2] == ["preempted", "resumed"]


def test_phases_follow_the_timeline() -> None:
    whole = Timeline(1.0, 2.0, 3.0, 9.0, (("preempted", 4.0), ("resumed", 5.0), ("preempted", 6.0)))
    assert list(phases(whole, 10.0)) == [
        Phase("queue", 1.0, 2.0),
        Phase("prefill", 2.0, 3.0),
        Phase("decode", 3.0, 9.0),
        Phase("preempted", 4.0, 5.0),
        Phase("preempted", 6.0, 9.0),
    ]
    assert list(phases(Timeline(1.0, None, None, None, ()), 10.0)) == [Phase("queue", 1.0, 10.0)]
    assert list(phases(Timeline(1.0, 2.0, None, 4.0, ()), 10.0))[1:] == [Phase("prefill", 2.0, 4.0)]


def test_without_a_provider_opentelemetry_is_not_imported() -> None:
    code = "import sys, aserve, routes.app, routes.server; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_a_server_sends_what_it_has_before_it_ends() -> None:
    """To a collector; and one that is not there costs a stop no more than seconds."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
            with server(otlp_traces_endpoint=endpoint) as process:
                assert httpx.post(process.url + "/v1/completions", json=BODY, timeout=30).status_code == 200
                process.child.terminate()
                assert process.wait() == 0
        finally:
            collector.shutdown()
            thread.join()
    assert b"POST /v1/completions" in b"".join(bodies) and b"prefill" in b"".join(bodies)
    with server(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as process:
        assert httpx.post(process.url + "/v1/completions", json=BODY, timeout=30).status_code == 200
        process.child.terminate()
        assert process.child.wait(timeout=15) == 0
