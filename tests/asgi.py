"""A raw ASGI client: sees each message as the application sends it, and can leave at any of them.

Used where httpx's transport would hide what matters, since that one buffers whole bodies and never disconnects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.types import ASGIApp, Message


@dataclass
class Reply:
    """Everything the application sent."""

    messages: list[Message] = field(default_factory=list)

    @property
    def started(self) -> bool:
        return bool(self.messages)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode("latin-1"): value.decode("latin-1") for key, value in self.messages[0]["headers"]}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def body(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def complete(self) -> bool:
        """True once the application has said that nothing follows."""
        return self.started and not self.messages[-1].get(
            "more_body", self.messages[-1]["type"] != "http.response.body"
        )

    def json(self) -> Any:
        """The body under a parser that takes no NaN."""
        return json.loads(self.body, parse_constant=_refuse)

    def events(self) -> list[Any]:
        """The data of each event; "[DONE]" as it is. Checks the framing: LF only, id before data, no empty event."""
        text = self.body.decode("ascii")
        assert "\r" not in text
        assert text == "" or text.endswith("\n")
        events: list[Any] = []
        for block in text.split("\n\n")[:-1]:
            lines = [line for line in block.split("\n") if not line.startswith(":")]
            assert [line.split(": ", 1)[0] for line in lines] in (["id", "data"], ["data"]), block
            data = lines[-1].removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data, parse_constant=_refuse))
        return events


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | Any = b"",
    *,
    headers: dict[str, str] | None = None,
    disconnect_at: int | None = None,
    on_message: Callable[[Reply], None] | None = None,
) -> Reply:
    """One request. With `disconnect_at` N the client leaves once the application has sent N messages."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(key.lower().encode(), value.encode("latin-1")) for key, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    reply = Reply()
    gone = anyio.Event()
    if disconnect_at == 0:
        gone.set()
    pending = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if gone.is_set():
            return  # as uvicorn does: what is written after the client left goes nowhere
        reply.messages.append(dict(message))
        if on_message is not None:
            on_message(reply)
        if len(reply.messages) == disconnect_at:
            gone.set()
        await anyio.lowlevel.checkpoint()

    await app(scope, receive, send)
    return reply


async def post(app: ASGIApp, path: str, body: bytes | Any, **options: Any) -> Reply:
    """A POST of JSON."""
    return await call(app, "POST", path, body, **options)


async def get(app: ASGIApp, path: str, **options: Any) -> Reply:
    """A GET."""
    return await call(app, "GET", path, **options)


async def delete(app: ASGIApp, path: str, **options: Any) -> Reply:
    """A DELETE."""
    return await call(app, "DELETE", path, **options)
