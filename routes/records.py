"""What the server knows of each request in flight: who asked, what it cost, and how to cancel it.

The middleware opens a Record per HTTP request and logs it at the end; generation routes fill it in and register it
in `Live`, where DELETE /v1/requests/{id} finds it. A client's own id is a label here, never a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from aserve import AserveError, DeadlineError, RequestFailedError, Stream

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/load"})  # asked for all the time


class CancelledRequestError(RequestFailedError):
    """The request was cancelled through the API, or by the server's end."""

    status = 499
    type = "request_cancelled"
    code = "request_cancelled"


def abnormal(reason: str) -> AserveError | None:
    """The error for a finish reason that is no success, so that no cut answer looks complete."""
    if reason in ("stop", "length"):
        return None
    if reason == "deadline":
        return DeadlineError("the request's deadline passed")
    if reason == "cancelled":
        return CancelledRequestError("the request was cancelled")
    return RequestFailedError("the request failed")


@dataclass(slots=True)
class Record:
    """One HTTP request, for its access-log line. Times are seconds of the monotonic clock."""

    label: str  # the client's X-Request-ID, or ours
    tenant: str | None = None  # stands for the API key; None without keys
    start: float = field(default_factory=time.perf_counter)
    streams: Sequence[Stream] = ()
    first_token: float | None = None
    status: int = 0  # of the answer; 0 before it
    outcome: str = ""
    cancellation: AserveError | None = None
    away: Callable[[], None] | None = None  # what cancels a resumable request whose client is away
    _scope: anyio.CancelScope | None = None

    def submit_arguments(self) -> dict[str, str]:
        """What engine.submit takes of it. A key's requests are one tenant's, whatever `user` their bodies name."""
        return {"label": self.label} | ({} if self.tenant is None else {"tenant": self.tenant})

    def token(self) -> None:
        """Notes the time of the first token."""
        if self.first_token is None:
            self.first_token = time.perf_counter()

    def cancellable(self) -> anyio.CancelScope:
        """A scope that `cancel` ends, around the part of the work that waits for tokens."""
        self._scope = anyio.CancelScope()
        if self.cancellation is not None:
            self._scope.cancel()
        return self._scope

    def cancel(self, message: str) -> None:
        """Ends the request from outside; its client gets the error."""
        self.cancellation = CancelledRequestError(message)
        if self.away is not None:
            self.away()
        if self._scope is not None:
            self._scope.cancel()

    def finish(self, error: AserveError | None, *, gone: bool) -> None:
        """Notes how it ended."""
        self.outcome = "disconnected" if gone else (error.code or error.type) if error else "ok"

    def fields(self) -> dict[str, float | int | str]:
        """Tokens and times, for structured logs."""
        fields: dict[str, float | int | str] = {}
        if self.streams:
            fields["prompt_tokens"] = sum(len(stream.prompt_token_ids) for stream in self.streams)
            fields["completion_tokens"] = sum(stream.usage.completion_tokens for stream in self.streams)
        if self.first_token is not None:
            fields["ttft"] = round(self.first_token - self.start, 6)
        fields["total"] = round(time.perf_counter() - self.start, 6)
        if self.outcome:
            fields["outcome"] = self.outcome
        return fields

    def describe(self) -> str:
        """The same on one line."""
        fields = self.fields()
        parts = []
        if self.streams:
            parts.append(f"prompt={fields['prompt_tokens']} completion={fields['completion_tokens']}")
        parts += [f"{name}={fields[name]:.3f}s" for name in ("ttft", "total") if name in fields]
        if self.outcome not in ("", "ok"):
            parts.append(self.outcome)
        return " ".join(parts)


class Live:
    """Generation requests in flight, by the keys of their engine streams."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, streams: Sequence[Stream]) -> None:
        """Makes a request cancellable by any of its streams' keys."""
        record.streams = streams
        for stream in streams:
            self._records[stream.key] = record

    def record(self, stream: Stream) -> Record:
        """The request of a stream that is in flight."""
        return self._records[stream.key]

    def remove(self, record: Record) -> None:
        """Forgets a request that has ended."""
        self.forget(record.streams)

    def forget(self, streams: Sequence[Stream]) -> None:
        """Forgets the request of these streams, whichever connection it is on."""
        for stream in streams:
            self._records.pop(stream.key, None)

    def cancel(self, name: str) -> bool:
        """Cancels by key, with or without a response's prefix (cmpl-, chatcmpl-, resp_). False where it is unknown."""
        record = self._records.get(name.replace("_", "-").rpartition("-")[2])
        if record is None:
            return False
        record.cancel("the request was cancelled by DELETE /v1/requests")
        return True
