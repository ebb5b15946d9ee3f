"""A small client of an aserve server (or any OpenAI-compatible one): typed deltas over server-sent events.

For programs elsewhere on the network; a program that holds an Engine needs no client. Imports httpx only when used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from aserve.errors import (
    AserveError,
    AuthenticationError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    MediaTypeError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
    RequestTooLargeError,
    TooManyRequestsError,
)
from aserve.request import Delta

if TYPE_CHECKING:
    import httpx

D = TypeVar("D", bound=Delta)
_BY_CODE = {error.code: error for error in (DeadlineError, EngineDeadError, OverloadedError, TooManyRequestsError)}
_BY_STATUS = {
    error.status: error
    for error in (
        AuthenticationError,
        NotFoundError,
        RequestTooLargeError,
        MediaTypeError,
        TooManyRequestsError,
        OverloadedError,
        DeadlineError,
    )
}
_PASSING = frozenset({409, 425, 429, 500, 502, 503, 504})  # what a proxy or a busy server may answer meanwhile


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: the first one of each `index` has the id and the name, all together the arguments."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ChatDelta(Delta):
    """What a chat stream yields. `text` is content."""

    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


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
            raise _error(response.status_code, response.content, response.headers)
        return [str(entry["id"]) for entry in response.json()["data"]]

    def complete(
        self, prompt: str | Items[int], *, model: str | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Streams a completion. Options are the fields of POST /v1/completions."""
        return self._stream("/v1/completions", {"prompt": prompt}, model, options, _delta)

    def chat(
        self, messages: Items[Mapping[str, Any]], *, model: str | None = None, **options: Any
    ) -> AsyncGenerator[ChatDelta, None]:
        """Streams the next message. Options are the fields of POST /v1/chat/completions."""
        return self._stream("/v1/chat/completions", {"messages": messages}, model, options, _chat_delta)

    async def _stream(
        self,
        path: str,
        body: dict[str, Any],
        model: str | None,
        options: Mapping[str, Any],
        read: Callable[[Mapping[str, Any]], D],
    ) -> AsyncGenerator[D, None]:
        body = {**options, **body, "stream": True, "model": model or (await self.models())[0]}
        headers = {"X-Resume-Grace": f"{self._grace:g}"} if self._grace else {}
        place = _Place()
        try:
            async with aclosing(self._connection("POST", path, place, json=body, headers=headers)) as choices:
                async for choice in choices:
                    yield read(choice)
            while not place.done:
                await self._pause(place)
                again = self._connection("GET", f"/v1/streams/{place.key}", place, headers=place.headers())
                async with aclosing(again) as choices:
                    async for choice in choices:
                        yield read(choice)
        finally:
            if place.key and not place.done:
                await self._give_up(place.key)

    async def _connection(
        self, method: str, path: str, place: _Place, **request: Any
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The choices in the chunks of one connection. Where it is lost, and the stream can go on, they just end."""
        import httpx

        try:
            async with self._http.stream(method, path, **request) as response:
                if response.status_code != 200:
                    if place.key and response.status_code in _PASSING:
                        return
                    place.done = True
                    raise _error(response.status_code, await response.aread(), response.headers)
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
                        yield choice
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
    return Delta(text=choice.get("text") or "", **_common(choice))


def _chat_delta(choice: Mapping[str, Any]) -> ChatDelta:
    delta = choice.get("delta") or {}
    return ChatDelta(
        text=delta.get("content") or "",
        **_common(choice),
        reasoning=delta.get("reasoning_content") or "",
        tool_calls=tuple(map(_tool_call, delta.get("tool_calls") or ())),
    )


def _common(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": int(choice["index"]),
        "token_ids": tuple(choice.get("token_ids") or ()),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": choice.get("stop_reason"),
    }


def _tool_call(call: Mapping[str, Any]) -> ToolCallDelta:
    function = call.get("function") or {}
    return ToolCallDelta(
        int(call["index"]), call.get("id") or "", function.get("name") or "", function.get("arguments") or ""
    )


def _error(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> AserveError:
    """aserve's own class for what the server answered, with its words, field and code."""
    try:
        details = json.loads(body)["error"]
        message, param, code = str(details["message"]), details.get("param"), details.get("code")
    except (ValueError, KeyError, TypeError):
        message, param, code = f"HTTP {status}: {body[:500].decode('utf-8', 'replace')}", None, None
    error: AserveError
    kind: type[AserveError] | None = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is not None and issubclass(kind, OverloadedError):
        wait = (headers or {}).get("retry-after", "")
        error = kind(message, retry_after=float(wait) if wait.isdecimal() else 1.0)
    else:
        error = (kind or (InvalidRequestError if 400 <= status < 500 else RequestFailedError))(message, param=param)
    if code not in _BY_CODE:  # inside a stream there is no status but that of its beginning
        error.status = status
    error.code = code or error.code
    return error
