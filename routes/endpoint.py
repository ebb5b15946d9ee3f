"""The way of one generation request, the same for completions and chat: body, checks, submit, then events or JSON.

completions.py and chat.py subclass `GenerationEndpoint`; app.py mounts them as ASGI endpoints. Everything that can be
refused is refused here, before the response starts. It never leaves a stream open.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aserve import Completion, Engine, InvalidRequestError, NotFoundError, SamplingParams, SlowReader, Stream
from routes.chunks import B, Job
from routes.http import ClientGone, endpoint_errors, header, json_response, read_body, unless_gone, warning_headers
from routes.middleware import tenant_of
from routes.records import Live, Record, abnormal
from routes.resume import Sessions
from routes.schemas import parse, unknown_fields
from routes.sse import EventStream, Renderer
from routes.turn import TurnFormat

log = logging.getLogger("aserve.requests")

_SHOWN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """What create_app was told. Seconds: `ping_interval`, and how long a step may take before health says so. Past
    `max_unsent_bytes` that a client has not taken, `slow_client` says what happens to its stream."""

    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    ping_interval: float = 15.0
    stall_timeout: float = 60.0
    log_requests: bool = False  # bodies, shortened: prompts too
    turn_format: TurnFormat = field(default_factory=TurnFormat)
    slow_client: SlowReader = "coalesce"
    max_unsent_bytes: int = 1 << 20

    def submit_arguments(self) -> dict[str, Any]:
        """What engine.submit takes for every request."""
        return {"slow_reader": self.slow_client, "max_unread": self.max_unsent_bytes}

    def names(self, engine: Engine) -> tuple[str, ...]:
        """What clients may call the model: the engine's own name where no other was given."""
        return self.served_model_names or (engine.name,)

    def check_model(self, engine: Engine, name: str | None) -> str:
        """The name to answer with. Raises NotFoundError for a model that is not served."""
        names = self.names(engine)
        if name is None:
            return names[0]
        if name not in names:
            raise NotFoundError(f"the model {name!r} does not exist", param="model", code="model_not_found")
        return name


class GenerationEndpoint(ABC, Generic[B]):
    """An ASGI endpoint. Subclasses say how a body is submitted and what its answers look like."""

    kind: ClassVar[type[Any]]

    def __init__(self, engine: Engine, live: Live, sessions: Sessions, options: Options) -> None:
        self.engine = engine
        self.live = live
        self.sessions = sessions
        self.options = options

    @abstractmethod
    async def submit(self, body: B, params: SamplingParams, record: Record) -> list[Stream]:
        """Hands the request to the engine. Raises AserveError where it is refused; then nothing stays open."""

    @abstractmethod
    def frames(self, job: Job[B], position: int) -> Renderer:
        """The renderer of job.streams[position]."""

    @abstractmethod
    def answer(self, job: Job[B], completions: list[list[Completion]]) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with endpoint_errors(scope, receive, send):
            if header(scope, b"last-event-id"):
                raw = await read_body(scope, receive, self.options.max_body_bytes)
                await self.sessions.resume(scope, receive, send, body=raw)
                return
            self.engine.check()
            record: Record = scope["aserve.record"]
            record.tenant = tenant_of(scope)
            grace = self.sessions.grace_of(scope)
            raw = await read_body(scope, receive, self.options.max_body_bytes)
            if self.options.log_requests:
                log.info("id=%s %s", record.label, _shown(raw))
            body: B = parse(raw, self.kind)
            body.check()
            model = self.options.check_model(self.engine, body.model)
            headers = warning_headers(unknown_fields(raw, self.kind))
            params = body.params(self.engine.default_sampling())
            try:
                streams = await self.submit(body, params, record)
            except InvalidRequestError as error:
                body.rename(error)
                raise
            job = Job(body, params, model, int(time.time()), streams)
            self.live.add(record, streams)
            if body.stream and grace:
                await self.sessions.open(self._stream(job, record, headers), grace, raw, scope, receive, send)
                return
            try:
                response = self._stream(job, record, headers) if body.stream else None
                await (response or await self._collect(job, record, receive, headers))(scope, receive, send)
            finally:
                self.live.remove(record)

    def _stream(self, job: Job[B], record: Record, headers: dict[str, str]) -> EventStream:
        sources = [(stream, self.frames(job, i)) for i, stream in enumerate(job.streams)]
        closing = sources[-1][1].closing
        return EventStream(sources, record, closing=closing, ping_interval=self.options.ping_interval, headers=headers)

    async def _collect(self, job: Job[B], record: Record, receive: Receive, headers: dict[str, str]) -> Response:
        """Awaits every choice, unless the client leaves."""
        try:
            with record.cancellable():
                completions = await unless_gone(receive, _completions(job.streams))
            if record.cancellation is not None:
                raise record.cancellation
            for error in (abnormal(c.finish_reason) for group in completions for c in group):
                if error is not None:
                    raise error
            return json_response(self.answer(job, completions), headers=headers)
        except ClientGone:
            record.outcome = "disconnected"
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await close_all(job.streams)


async def submit_all(submissions: Iterable[Awaitable[Stream]]) -> list[Stream]:
    """Awaits each in order. Where one is refused, or this task is cancelled, those before it are closed."""
    streams: list[Stream] = []
    try:
        for submission in submissions:
            streams.append(await submission)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await close_all(streams)
        raise
    return streams


async def _completions(streams: Sequence[Stream]) -> list[list[Completion]]:
    """The choices of each. They run at once, whatever the order of reading."""
    return [await stream.completions() for stream in streams]


async def close_all(streams: Sequence[Stream]) -> None:
    """Cancels what is unfinished."""
    for stream in streams:
        await stream.aclose()


def _shown(raw: bytes) -> str:
    """A body for the log: one line, of a bounded length."""
    text = repr(raw[:_SHOWN_BYTES].decode("utf-8", "replace"))
    return text if len(raw) <= _SHOWN_BYTES else f"{text}... ({len(raw)} bytes)"
