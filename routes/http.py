"""The plain HTTP of every route: reading a bounded body, JSON answers and errors, noticing that the client left.

Called by the route files. An answer's body is ASCII JSON (so it is valid whatever text it holds), and an error's is
always the OpenAI error object.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aserve import AserveError, AuthenticationError, MediaTypeError, OverloadedError, RequestTooLargeError

T = TypeVar("T")
_LINGER_SECONDS = 30.0  # how long a body that is refused may still be sent, before its client may miss the answer
_LINGER_IDLE_SECONDS = 5.0
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]+")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises MediaTypeError, RequestTooLargeError past `limit` bytes, before reading on, and ClientGone.
    """
    check_media_type(scope)
    length = header(scope, b"content-length")
    if length and length.isdigit() and int(length) > limit:
        raise RequestTooLargeError(f"the body has {int(length)} bytes, at most {limit} are taken")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            scope["aserve.body_ended"] = not message.get("more_body", False)
            raise RequestTooLargeError(f"the body has more than {limit} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def check_media_type(scope: Scope) -> None:
    """Raises MediaTypeError unless the body is called JSON, or nothing.

    Other types are what a browser sends to a foreign server without asking it: so a web page cannot drive this one by
    a form. A body without a type is taken, as small clients send it.
    """
    given = header(scope, b"content-type")
    if given is not None:
        kind = given.partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise MediaTypeError(f"send the body as content-type: application/json, not {given[:64]!r}")
    if (header(scope, b"content-encoding") or "identity").lower() != "identity":
        raise MediaTypeError("send the body without content-encoding: this server takes plain JSON")


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def route_path(scope: Scope) -> str:
    """The path under the application's own root."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def warning_headers(unknown: list[str]) -> dict[str, str]:
    """Names fields that were accepted and ignored, as printable ASCII in a bounded header."""
    if not unknown:
        return {}
    names = ", ".join(_UNPRINTABLE.sub("?", name)[:64] for name in unknown[:16])
    return {"x-aserve-warning": f"ignored unknown fields: {names}"}


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as strict JSON (NaN raises), escaped to ASCII."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Response(body, status, dict(headers or {}), media_type="application/json")


def error_response(error: AserveError) -> Response:
    """The error's status and wire form, with the headers that its kind calls for."""
    headers = {}
    if isinstance(error, RequestTooLargeError):
        return _LingeringResponse(error)
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    elif isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return json_response(error.wire(), error.status, headers)


class _LingeringResponse(Response):
    """Answers at once, then takes the rest of the body and drops it.

    A connection that is closed with bytes unread is reset, and the client, which still sends, never sees the answer.
    """

    def __init__(self, error: AserveError) -> None:
        body = json.dumps(error.wire()).encode("ascii")
        super().__init__(body, error.status, {"connection": "close"}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with anyio.move_on_after(_LINGER_SECONDS):
            # a client that expects a go-ahead sends nothing without it
            more = not scope.get("aserve.body_ended") and header(scope, b"expect") is None
            while more:
                more = False
                with anyio.move_on_after(_LINGER_IDLE_SECONDS):
                    more = (await receive()).get("more_body", False)
        await send({"type": "http.response.body", "body": b""})


async def watch_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancels `scope` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel("the client disconnected")


async def unless_gone(receive: Receive, answer: Awaitable[T]) -> T:
    """Awaits `answer`, or cancels it and raises ClientGone as soon as the client leaves."""
    gone = True
    error: AserveError | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_disconnect, receive, tasks.cancel_scope)
        try:
            result = await answer
            gone = False
        except AserveError as failure:  # carried out by hand: a task group would wrap it
            error, gone = failure, False
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    if gone:
        raise ClientGone
    return result


@asynccontextmanager
async def endpoint_errors(scope: Scope, receive: Receive, send: Send) -> AsyncIterator[None]:
    """Answers an AserveError raised inside, before the response started, with its JSON; a lost client with nothing."""
    try:
        yield
    except ClientGone:
        pass
    except AserveError as error:
        await error_response(error)(scope, receive, send)
