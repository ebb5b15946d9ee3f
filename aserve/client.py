"""A small client of an aserve server (or any OpenAI-compatible one): typed deltas over server-sent events.

For programs elsewhere on the network; a program that holds an Engine needs no client. Imports httpx only when used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from aserve.errors import (
    AserveError,
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
)
from aserve.request import Delta

if TYPE_CHECKING:
    import httpx

_PASSING = frozenset({409, 425, 429, 500, 502, 503, 504})  # what a proxy or a busy server may answer meanwhile


class Client:
    """Requests to one server. `async with Client(url) as client: async for delta in client.complete(prompt): ...`

    Breaking out of the iteration and closing it (`contextlib.aclosing`) hangs up, which cancels the request.
    Refusals and failures are raised as aserve's own errors. A connection that is lost is made again for up to
    `resume_grace` seconds, and the stream goes on where it stopped (0: it fails). `http` is a client of the caller's,
    left open.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        resume_grace: float = 30.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._grace = resume_grace
        self._owned = http is None
        self._http = http or httpx.AsyncClient(
            base_url=url, headers=headers, timeout=httpx.Timeout(timeout, connect=10)
        )

    async def models(self) -> list[str]:
        """The names the server serves."""
        response = await self._http.get("/v1/models")
        if response.status_code != 200:
            raise _error(response.status_code, response.content)
        return [str(entry["id"]) for entry in response.json()["data"]]

    def complete(
        self, prompt: str | Items[int], *, model: str | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Streams a completion. Options are the fields of POST /v1/completions."""
        return self._stream("/v1/completions", {"prompt": prompt}, model, options)

    def chat(
        self, messages: Items[Mapping[str, Any]], *, model: str | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Streams the next message. Options are the fields of POST /v1/chat/completions."""
        return self._stream("/v1/chat/completions", {"messages": messages}, model, options)

    async def _stream(
        self, path: str, body: dict[str, Any], model: str | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        body = {**options, **body, "stream": True, "model": model or (await self.models())[0]}
        headers = {"X-Resume-Grace": f"{self._grace:g}"} if self._grace else {}
        place = _Place()
        try:
            async with aclosing(self._connection("POST", path, place, json=body, headers=headers)) as deltas:
                async for delta in deltas:
                    yield delta
            while not place.done:
                await self._pause(place)
                again = self._connection("GET", f"/v1/streams/{place.key}", place, headers=place.headers())
                async with aclosing(again) as deltas:
                    async for delta in deltas:
                        yield delta
        finally:
            if place.key and not place.done:
                await self._give_up(place.key)

    async def _connection(self, method: str, path: str, place: _Place, **request: Any) -> AsyncGenerator[Delta, None]:
        """The deltas of one connection. Where it is lost, and the stream can go on, they just end."""
        import httpx

        try:
            async with self._http.stream(method, path, **request) as response:
                if response.status_code != 200:
                    if place.key and response.status_code in _PASSING:
                        return
                    place.done = True
                    raise _error(response.status_code, await response.aread())
                place.key = response.headers.get("x-stream-id", "")
                async for event in _events(response, place):
                    place.lost_at = None
                    if event == "[DONE]":
                        place.done = True
                        return
                    chunk = json.loads(event)
                    if "error" in chunk:
                        place.done = True
                        raise _error(500, event.encode())
                    for choice in chunk["choices"]:
                        yield _delta(choice)
        except httpx.TransportError:
            if not place.key:
                raise
        if not place.key:
            raise RequestFailedError("the server closed the stream before its end")

    async def _pause(self, place: _Place) -> None:
        """Waits before the next connection, longer each time. Raises RequestFailedError once the grace is over."""
        now = anyio.current_time()
        if place.lost_at is None:
            place.lost_at, place.delay = now, 0.0
        if now - place.lost_at > self._grace:
            raise RequestFailedError(f"the server closed the stream before its end, and for {self._grace:g} s since")
        await anyio.sleep(place.delay)
        place.delay = min(1.0, max(0.05, 2 * place.delay))

    async def _give_up(self, key: str) -> None:
        """Cancels a request that would otherwise wait for us. Best effort: its grace ends it too."""
        with anyio.move_on_after(2, shield=True), suppress(Exception):
            await self._http.delete(f"/v1/requests/{key}")

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._owned:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(slots=True)
class _Place:
    """How far a stream has come."""

    key: str = ""  # of a stream that can be resumed
    last_id: str = ""
    done: bool = False  # nothing will follow
    lost_at: float | None = None
    delay: float = 0.0

    def headers(self) -> dict[str, str]:
        return {"Last-Event-ID": self.last_id} if self.last_id else {}


async def _events(response: httpx.Response, place: _Place) -> AsyncIterator[str]:
    """The data of each event, its id noted. Lines end in LF or CR LF, and in nothing else that str.splitlines knows.

    An event counts once its blank line is there: what a cut leaves of one is dropped, and comes again.
    """
    buffer, data, last_id = "", [], ""
    async for text in response.aiter_text():
        *lines, buffer = (buffer + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif line.startswith("id:"):
                last_id = line[3:].strip()
            elif not line and data:
                place.last_id = last_id
                yield "\n".join(data)
                data = []


def _delta(choice: Mapping[str, Any]) -> Delta:
    text = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
    return Delta(
        int(choice["index"]),
        text or "",
        tuple(choice.get("token_ids") or ()),
        choice.get("finish_reason"),
        choice.get("stop_reason"),
    )


def _error(status: int, body: bytes) -> AserveError:
    try:
        details = json.loads(body)["error"]
        message, param = str(details["message"]), details.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = f"HTTP {status}: {body[:500].decode('utf-8', 'replace')}", None
    match status:
        case 401:
            return AuthenticationError(message)
        case 404:
            return NotFoundError(message)
        case 503:
            return OverloadedError(message)
        case _ if 400 <= status < 500:
            return InvalidRequestError(message, param=param)
        case _:
            return RequestFailedError(message)
