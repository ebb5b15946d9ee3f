"""What every request passes: an id in and out, one access-log line with tokens and times, API keys. Pure ASGI.

app.py stacks them (CORS is Starlette's own). None may buffer or re-send a body: they are on the path of every token.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections import Counter
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve import AuthenticationError, Engine, TooManyRequestsError
from routes.http import error_response, header, route_path
from routes.records import QUIET_PATHS, Record

log = logging.getLogger("aserve.access")

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/dashboard", "/docs"})  # probes, and pages without data
_LABEL = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_SHOWN = 256  # characters of a path


class RequestLog:
    """Gives each request a Record at scope["aserve.record"], answers with X-Request-ID, and logs the end."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        label = header(scope, b"x-request-id") or ""
        record = Record(label if _LABEL.fullmatch(label) else uuid.uuid4().hex)
        scope["aserve.record"] = record

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                extra = [(b"x-request-id", record.label.encode("ascii"))]
                if self.engine.draining:
                    extra.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        try:
            await self.app(scope, receive, labelled)
        finally:
            method, path = scope["method"], scope["path"][:_MAX_SHOWN]
            fields = {"method": method, "path": path, "status": record.status, "request_id": record.label}
            level = logging.DEBUG if route_path(scope) in QUIET_PATHS else logging.INFO
            log.log(
                level,
                "%s %s %s %s id=%s",
                method,
                path.encode("unicode_escape").decode("ascii"),  # whatever was asked for, it is one line
                record.status or "-",
                record.describe(),
                record.label,
                extra={"fields": fields | record.fields()},
            )


class ApiKeys:
    """Asks for `Authorization: Bearer KEY` on every path but OPEN_PATHS. With `limit`, a key may have that many
    requests in flight."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], limit: int | None = None) -> None:
        self.app = app
        self._limit = limit
        self._num_open: Counter[bytes] = Counter()
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self._allows(scope):
            await self._bounded(scope, receive, send)
        else:
            await error_response(AuthenticationError("no or wrong API key"))(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get("aserve.api_key")
        if self._limit is None or key is None:
            await self.app(scope, receive, send)
            return
        if self._num_open[key] >= self._limit:
            refusal = TooManyRequestsError(f"this API key has {self._limit} requests in flight already")
            await error_response(refusal)(scope, receive, send)
            return
        self._num_open[key] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_open[key] -= 1

    def _allows(self, scope: Scope) -> bool:
        if route_path(scope) in OPEN_PATHS:
            return True
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Every key is compared, in constant time: how long it takes says nothing about any of them.
        scope["aserve.api_key"] = given  # whose streams the caller may resume
        return any([hmac.compare_digest(given, digest) for digest in self._digests])


def tenant_of(scope: Scope) -> str | None:
    """A name that stands for the caller's API key and does not give it away; None without keys."""
    key: bytes | None = scope.get("aserve.api_key")
    return None if key is None else f"key-{key.hex()[:12]}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
